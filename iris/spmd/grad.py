"""Gradients of programs: autograd differentiates the traced graph, which is then cut in two
programs, forward and backward.

NOTE [Whose gradient]
Autograd sees what one rank does; the formula of a collective is its transpose over all ranks. So
together they give the gradient of the sum of all that ranks return. A result that is known to be
the same on all ranks of an axis is one value and counts once: each rank takes its share of the
cotangent. The gradient of an argument that is the same on all ranks is the sum of theirs. (The rule
by which JAX transposes `shard_map`.)
"""

import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import once_differentiable

from iris.errors import UnsupportedError
from iris.graph.nodes import Ref, Value
from iris.graph.ops import Effect, effects, group_size
from iris.graph.types import TensorType
from iris.lower.dtypes import dtype_name
from iris.spmd.context import TraceContext, trace_scope
from iris.spmd.inlining import CALL
from iris.spmd.program import Program, prepare
from iris.spmd.recording import Recorder, fake, returned
from iris.spmd.tracing import Traced

Node = torch.fx.Node
OPS = torch.ops.iris


def _is_sum(op: str, name: str) -> bool:
    if op not in ("sum", "avg"):
        raise UnsupportedError(f"{name} by {op} has no gradient", help="reduce by sum or avg")
    return op == "sum"


def _of_reduce_scatter(
    g: Tensor, x: Tensor, ranks: int, axis: str, dim: int, op: str, size: int
) -> Tensor:
    whole: Tensor = OPS.all_gather(g, axis, dim, x.shape[dim])
    return whole if _is_sum(op, "reduce_scatter") else whole / ranks


def _of_all_to_all(
    g: Tensor, x: Tensor, ranks: int, axis: str, split: int, concat: int, kept: int, size: int
) -> Tensor:
    if split != concat and (x.shape[split], size) != (kept * ranks, x.shape[concat] * ranks):
        raise UnsupportedError(
            "all_to_all of uneven pieces has no gradient", help="pad both dims to divide"
        )
    return OPS.all_to_all(g, axis, concat, split, x.shape[concat], x.shape[split])  # type: ignore[no-any-return]


def _of_broadcast(g: Tensor, x: Tensor, ranks: int, axis: str, src: int) -> Tensor:
    total = OPS.all_reduce(g, axis, "sum")
    here = OPS.axis_index(axis, g.device) == src
    return torch.where(here, total, torch.zeros_like(total))


def _of_ppermute(g: Tensor, x: Tensor, ranks: int, axis: str, perm: Sequence[int]) -> Tensor:
    """The pairs turned round; where a source sent to several, in as many rounds."""
    rounds: list[list[int]] = []
    for src, dst in zip(perm[::2], perm[1::2], strict=True):
        free = next((r for r in rounds if src not in r[1::2]), None)
        if free is None:
            rounds.append(free := [])
        free += [dst, src]
    return sum((OPS.ppermute(g, axis, pairs) for pairs in rounds), torch.zeros_like(g))


TRANSPOSES: dict[Any, Callable[..., Tensor]] = {
    OPS.all_gather.default: lambda g, x, ranks, axis, dim, size: OPS.reduce_scatter(
        g, axis, dim, "sum", x.shape[dim]
    ),
    OPS.reduce_scatter.default: _of_reduce_scatter,
    OPS.all_reduce.default: lambda g, x, ranks, axis, op: OPS.all_reduce(
        g, axis, "sum" if _is_sum(op, "all_reduce") else "avg"
    ),
    OPS.all_to_all.default: _of_all_to_all,
    OPS.broadcast.default: _of_broadcast,
    OPS.ppermute.default: _of_ppermute,
}
"""The gradient of a collective's operand, from that of its result, the operand, and the rest."""


class _Collective(torch.autograd.Function):
    """One collective, with its transpose."""

    @staticmethod
    def forward(ctx: Any, op: Any, ranks: int, x: Tensor, *rest: Any) -> Tensor:
        ctx.op, ctx.ranks, ctx.rest, ctx.x = op, ranks, rest, x.detach()
        return op(x, *rest)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        found = TRANSPOSES[ctx.op](grad, ctx.x, ctx.ranks, *ctx.rest)
        return None, None, found, *[None] * len(ctx.rest)


@dataclass(eq=False)
class GradProgram(Program):
    """A program that autograd can go back through. ``kept``: which inputs the backward reads."""

    forward: Any = None
    backward: Any = None
    kept: tuple[int, ...] = ()
    returned: int = 0  # results of ``forward`` before those saved for ``backward``
    wanted: tuple[int, ...] = ()  # inputs with a gradient
    given: tuple[int, ...] = ()  # results with one

    @property
    def parts(self) -> tuple[Program, ...]:
        return self.forward, self.backward

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        prepare(self)
        values = _Run.apply(self, *tensors, *self.captured)  # type: ignore[no-untyped-call]
        leaves = [out.of(values, tensors) for out in self.outputs]
        return pytree.tree_unflatten(leaves, self.out_tree)


class _Run(torch.autograd.Function):
    """A call of a GradProgram."""

    @staticmethod
    def forward(ctx: Any, program: GradProgram, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = program.forward([x.detach() for x in inputs])
        results, saved = values[: program.returned], values[program.returned :]
        ctx.program, ctx.inputs = program, len(inputs)
        ctx.save_for_backward(*(inputs[i] for i in program.kept), *saved)
        ctx.mark_non_differentiable(*(v for i, v in enumerate(results) if i not in program.given))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        program: GradProgram = ctx.program
        prepare(program.backward)
        given = [grads[i].contiguous() for i in program.given]
        found = program.backward([*(x.detach() for x in ctx.saved_tensors), *given])
        by_input = dict(zip(program.wanted, found, strict=True))
        return None, *(by_input.get(i) for i in range(ctx.inputs))


def differentiate(
    plain: Program,
    traced: Traced,
    context: TraceContext,
    tensors: Sequence[Tensor],
    make: Callable[[str, Any, Sequence[Value], TraceContext, bool], Program],
) -> Program:
    """``plain`` as a program with a gradient. ``make`` plans a part, from its name, FX graph and
    inputs, and whether its types claim anything.
    """
    _check(plain)
    joint = _Joint(plain, traced, context, [*tensors, *plain.captured])
    if not joint.given:
        return plain
    name, shown = (
        plain.options.name,
        {f.name: getattr(plain, f.name) for f in fields(plain) if f.init},
    )
    kept, saved = joint.cut()
    results = [joint.recorder.node_of(value) for value in joint.results]
    forward = _extract(joint.graph, joint.inputs, [*results, *saved])
    reads = [*(joint.inputs[i] for i in kept), *saved, *joint.cotangents]
    backward = _extract(joint.graph, reads, joint.gradients)
    names = [plain.graph.inputs[i].name for i in kept] + [f"saved{i}" for i in range(len(saved))]
    names += [f"grad{i}" for i in joint.given]
    axes = plain.mesh.shape.names
    values = [
        Value(n, TensorType(dtype_name(t.dtype), tuple(t.shape), varying=axes))
        for n, t in zip(names, (node.meta["val"] for node in reads), strict=True)
    ]
    parts = (
        make(f"{name} forward", forward, plain.graph.inputs, context, True),
        make(f"{name} backward", backward, values, context, False),
    )
    for part in parts:
        part.whole = f"{plain.title}, gradients of {joint.wanted}"
    return GradProgram(
        **shown,
        forward=parts[0],
        backward=parts[1],
        kept=tuple(kept),
        returned=len(results),
        wanted=tuple(joint.wanted),
        given=tuple(joint.given),
    )


def _check(plain: Program) -> None:
    what = ""
    if plain.graph.writes:
        what = "writes to an argument or a buffer"
    elif any(Effect.RANDOM in effects(node) for node in plain.graph.nodes):
        what = "draws random numbers"
    if what:
        raise UnsupportedError(
            f"{plain.options.name}: an argument or parameter requires grad, and the program {what}",
            help="do that outside the program, or call it under torch.no_grad()",
        )


class _Joint:
    """Forward and backward in one graph, as autograd has them."""

    def __init__(
        self, plain: Program, traced: Traced, context: TraceContext, tensors: Sequence[Tensor]
    ) -> None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = [fake(mode, tensor) for tensor in tensors]
        self.plain, self.context, self.mesh = plain, context, plain.mesh.shape
        self.recorder = context.recorder = Recorder(mode, fakes[0].device.type)
        self.graph = self.recorder.graph
        self._whole = {  # by number of a result: axes over which it is the same on all ranks
            out.item: self._axes(plain.graph.types[arg.name])
            for arg, out in zip(plain.graph.outputs, plain.outputs, strict=True)
            if out.kind == "value" and isinstance(arg, Ref)
        }
        for tensor in fakes:
            self._input(tensor)
        self.inputs = [self.recorder.node_of(tensor) for tensor in fakes]
        self.wanted = [i for i, t in enumerate(tensors) if t.requires_grad]
        outside = fakes[len(fakes) - len(plain.captured) :]
        self._outside = dict(zip(map(id, plain.captured), outside, strict=True))
        with trace_scope(context), mode, self.recorder, torch.enable_grad():
            for i in self.wanted:
                fakes[i].requires_grad_()
            leaves = fakes[: len(fakes) - len(plain.captured)]
            self.results = self._replay(traced.module, leaves)
            self.given = [i for i, value in enumerate(self.results) if value.requires_grad]
            if self.given:
                self._go_back(mode, [fakes[i] for i in self.wanted])

    def _input(self, tensor: Tensor) -> None:
        self.recorder.add_input(tensor)
        self.recorder.node_of(tensor).meta["val"] = tensor

    def _replay(self, module: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the traced function does, with autograd looking."""
        env: dict[Node, Any] = {}
        waiting = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(waiting)
            elif node.op == "get_attr":
                outside = getattr(module, node.target)
                env[node] = self._outside.get(id(outside), outside)
            elif node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
                self.recorder.loc = node.meta.get("loc", "")
                with torch.set_grad_enabled(node.meta.get("grad", True)):
                    env[node] = self._call(node.target, args, kwargs)
        return [env[value] for value in returned(module.graph)]

    def _call(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is CALL:
            return self._replay(self.context.calls[args[1]].module, args[0])
        if target in TRANSPOSES:
            ranks = group_size(self.mesh, args[1].split(","))
            return _Collective.apply(target, ranks, *args)  # type: ignore[no-untyped-call]
        space = getattr(target, "namespace", "aten")
        if space not in ("aten", "prims", "iris") and any(
            isinstance(arg, Tensor) and arg.requires_grad for arg in pytree.tree_leaves(args)
        ):
            raise UnsupportedError(
                f"{self.plain.options.name}: {target} has no gradient in a program",
                help="use iris's collectives and torch's own ops, or call it under no_grad",
            )
        if target is torch.ops.aten._scaled_dot_product_efficient_attention.default:
            args = (*args[:4], True, *args[5:])  # what its gradient needs is asked for
        return target(*args, **kwargs)

    def _go_back(self, mode: FakeTensorMode, leaves: list[Tensor]) -> None:
        self.recorder.loc = ""
        cotangents, shares = [], []
        for i in self.given:
            value = self.results[i]
            with torch._C._DisableTorchDispatch():
                empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
                cotangents.append(ct := FakeTensor(mode, empty, value.device))
            self._input(ct)
            ranks = group_size(self.mesh, self._whole[i])
            shares.append(ct * (1 / ranks) if ranks > 1 else ct)
        self.cotangents = [self.recorder.node_of(ct) for ct in cotangents]
        grads: Any = torch.autograd.grad(
            [self.results[i] for i in self.given], leaves, shares, allow_unused=True
        )
        pairs = [(i, grad) for i, grad in zip(self.wanted, grads, strict=True) if grad is not None]
        self.wanted = [place for place, _ in pairs]
        self.gradients = []
        for i, grad in pairs:
            same = self._axes(self.plain.graph.inputs[i].type)
            total = OPS.all_reduce(grad, ",".join(same), "sum") if same else grad
            self.gradients.append(self.recorder.node_of(total))
        self._sum_what_is_alike()

    def _axes(self, type_: TensorType) -> tuple[str, ...]:
        """Axes over which a value of this type is the same on all ranks."""
        return tuple(axis for axis in self.mesh.names if type_.replicated_over(axis))

    def _sum_what_is_alike(self) -> None:
        """``all_reduce(x) => x * ranks`` where ranks are known to have the same ``x``."""
        alike: dict[Node, set[str]] = {}
        for node, value in zip(self.inputs, self.plain.graph.inputs, strict=True):
            alike[node] = set(self._axes(value.type))
        for node, i in zip(self.cotangents, self.given, strict=True):
            alike[node] = set(self._whole[i])
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            own = set(self.mesh.names).intersection(
                *(alike.get(arg, set()) for arg in node.all_input_nodes)
            )
            if self.context.uneven and not node.all_input_nodes:
                own = set()  # a number may be a size of this rank's shard
            target: Any = node.target
            if getattr(target, "namespace", "") == "iris":
                axes = set(str(node.args[0 if target is OPS.axis_index.default else 1]).split(","))
                gathers = (OPS.all_reduce.default, OPS.all_gather.default, OPS.broadcast.default)
                if target is OPS.all_reduce.default and axes <= own and node.args[2] == "sum":
                    with self.graph.inserting_before(node):
                        args = (node.args[0], group_size(self.mesh, axes))
                        product = self.graph.call_function(torch.ops.aten.mul.Tensor, args)
                    product.meta = dict(node.meta)
                    node.replace_all_uses_with(product)
                    self.gradients = [product if g is node else g for g in self.gradients]
                    alike[product] = own
                own = own | axes if target in gathers else own - axes
            alike[node] = own

    def cut(self) -> tuple[list[int], list[Node]]:
        """Inputs, by number, and values of the forward that the backward reads."""
        late: set[Node] = set(self.cotangents)
        for node in self.graph.nodes:
            if any(arg in late for arg in node.all_input_nodes):
                late.add(node)
        reads: dict[Node, None] = {}
        seen: set[Node] = set()
        waiting = list(self.gradients)
        while waiting:
            node = waiting.pop()
            if node in seen or node in self.cotangents:
                continue
            seen.add(node)
            if node in late or _is_view(node):
                waiting += node.all_input_nodes
            else:
                reads[node] = None
        kept = [i for i, node in enumerate(self.inputs) if node in reads]
        return kept, [node for node in reads if node not in self.inputs]


def _is_view(node: Node) -> bool:
    if node.op != "call_function":
        return False
    target: Any = node.target
    if target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    return bool(getattr(target, "is_view", False))


def _extract(graph: torch.fx.Graph, inputs: Sequence[Node], outputs: Sequence[Node]) -> Any:
    """The part of a graph from ``inputs`` to ``outputs``, as a module of its own."""
    needed, waiting = set(inputs), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    part = torch.fx.Graph()
    env: dict[Node, Node] = {}
    for node in inputs:
        env[node] = part.placeholder(node.name)
    for node in graph.nodes:
        if node in needed and node not in env:
            env[node] = part.node_copy(node, env.__getitem__)
    part.output([env[node] for node in outputs])
    return types.SimpleNamespace(graph=part)
