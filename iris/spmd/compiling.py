"""Makes the program of one call, in agreement with the other ranks."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from iris import config
from iris.errors import (
    CollectiveMismatchError,
    SpecError,
    TraceError,
    TypeRuleError,
    UnsupportedError,
)
from iris.graph.nodes import Graph, Ref, Value
from iris.graph.ops import Output as Returned, check_outputs
from iris.graph.passes import PASSES
from iris.graph.types import TensorType
from iris.lower.choices import Choose
from iris.lower.cost import ANY, Profile, profile_of
from iris.lower.dtypes import dtype_name
from iris.lower.tuned import Measured, of_group
from iris.runtime.context import current
from iris.runtime.groups import Group
from iris.spmd.agreement import (
    agree_on_choices,
    agree_on_graph,
    agreed,
    group_of,
    one_rank_retraces,
    resolve_types,
)
from iris.spmd.arguments import Arguments, graph_names
from iris.spmd.binding import Bases, from_bases, overlapping, with_bases
from iris.spmd.context import TraceContext
from iris.spmd.dump import Dump
from iris.spmd.guards import Access
from iris.spmd.importing import Importer
from iris.spmd.mesh import ProgramMesh
from iris.spmd.modules import Buffer
from iris.spmd.options import Options
from iris.spmd.program import Program, generated
from iris.spmd.recording import returned
from iris.spmd.specs import Leaf, match
from iris.spmd.tracing import Output, OutsideWriteError, Traced, collector_paused, trace


class Compiler:
    """Makes the program of one call. ``run()`` is collective over the program's mesh."""

    def __init__(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        watched: Sequence[Access],
        variants: Sequence[Program],
    ) -> None:
        self.fn, self.arguments, self.options = fn, arguments, arguments.options
        self.watched, self.variants = watched, variants
        self.name, self.tensors = arguments.options.name, arguments.bound.tensors
        self.leaves: list[Leaf] = []
        self.types: list[TensorType] | None = None  # of the leaves; None while there is no mesh
        self.held_types: dict[int, Value] = {}  # by the tensor's id
        self.bases: Bases = ()
        self.written: Sequence[Buffer] = ()  # all of the module's, where it writes to one
        self.measured = Measured({})
        self.doubtful = False  # some rank's arguments fit programs of several sizes

    def run(self) -> Program:
        """Check specs, trace, import, run the passes, and agree with the other ranks."""
        mesh = self.arguments.mesh()
        group, held = group_of(mesh), self.arguments.held
        self.leaves = self._agreed_leaves(mesh, group)
        types = None
        if mesh is not None:
            types = tuple(self._types([*self.leaves, *held], mesh, group))
            if (known := self._known(types, group)) is not None:
                return known
            self._type_held(types[len(self.leaves) :])
            self.types = list(types[: len(self.leaves)])
        if not (mesh is not None and mesh.abstract) and self._lowering(mesh) == "triton":
            self.measured = of_group(current(), group or current().world)
        program = agreed(group, f"trace of {self.name}", lambda: self._program(mesh))
        everyone = group or group_of(program.mesh)
        agree_on_choices(program, everyone)
        agree_on_graph(program, everyone)
        program.signature = types
        return program

    def _agreed_leaves(self, mesh: ProgramMesh | None, group: Group | None) -> list[Leaf]:
        what = f"arguments of {self.name}"
        for attempt in (1, 2):
            try:
                return agreed(group, what, lambda: self.arguments.leaves(mesh))
            except CollectiveMismatchError as error:
                if attempt == 2 or not one_rank_retraces(error, self.name):
                    raise  # else the others trace now too
        raise AssertionError

    def _known(self, types: tuple[TensorType, ...], group: Group | None) -> Program | None:
        """A program of these global types, where every rank has one: see NOTE [Same shard]."""
        if group is None or group.size == 1:
            return None
        found = next((p for p in self.variants if p.signature == types), None)
        others = any(p.signature != types for p in self.variants)
        answers = group.exchange_object(f"programs of {self.name}", (found is not None, others))
        self.doubtful = any(other for _, other in answers)
        return found if all(known for known, _ in answers) else None

    def _types(
        self, leaves: Sequence[Leaf], mesh: ProgramMesh, group: Group | None = None
    ) -> list[TensorType]:
        """Global types of tensor leaves, from all ranks' shapes; those of ranks not asked are taken
        to be this rank's.
        """
        mine = [(dtype_name(leaf.value.dtype), tuple(leaf.value.shape)) for leaf in leaves]
        shapes = [mine] * len(mesh.ranks)
        if group is not None and any(leaf.spec is not None for leaf in leaves):
            shapes = group.exchange_object(f"shapes of {self.name}", mine)
        return resolve_types(self.name, leaves, mesh, shapes)

    def _type_held(self, types: Sequence[TensorType]) -> None:
        held = self.arguments.held
        for leaf, name, type_ in zip(held, graph_names(held), types, strict=True):
            self.held_types[id(leaf.value)] = Value(f"self_{name}", type_)

    @collector_paused()
    def _program(self, mesh: ProgramMesh | None) -> Program:
        traced, context = self._trace(mesh)
        program = self._import(traced, context)
        if program.graph.writes and (bases := overlapping(self.tensors)):
            self.bases = bases
            program = self._import(*self._trace(context.mesh))
        if torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (*self.tensors, *program.captured)
        ):
            from iris.spmd.grad import differentiate

            return differentiate(program, traced, context, self.tensors, self._part)
        return program

    def _part(
        self, name: str, module: Any, inputs: Sequence[Value], context: TraceContext, claims: bool
    ) -> Program:
        """One half of a differentiated program, over whatever shapes ranks have. Of a backward
        nothing is claimed: what was right in the forward is not refused in what autograd made.
        """
        outputs = tuple(Output("value", i) for i in range(len(returned(module.graph))))
        traced = Traced(module, outputs, pytree.tree_structure([*outputs]))
        mesh = context.mesh or ProgramMesh.world("world")
        importer = self._importer(context, mesh)
        importer.name, importer.claims = name, claims
        options = replace(self.options, name=name, alike=False, outputs="fresh")
        graph = replace(importer.run(traced, inputs), alike=False)
        return self._planned(graph, traced, mesh, (), (), options)

    def _trace(self, mesh: ProgramMesh | None) -> tuple[Traced, TraceContext]:
        context = TraceContext(self.name, mesh)
        context.type_of = self._prober(context)
        for type_ in [*(self.types or ()), *(value.type for value in self.held_types.values())]:
            for n, axes in zip(type_.shape, type_.spec, strict=True):
                if axes:
                    context.know(axes, n)
        try:
            return self._traced(context), context
        except OutsideWriteError as error:
            if self.written or not self.arguments.buffers:
                raise TraceError(error.message, help=error.help) from None
            self.written = self.arguments.buffers
        self._check_buffers()
        return self._trace(mesh)

    def _check_buffers(self) -> None:
        """UnsupportedError where a buffer shares memory with another, or with an argument."""
        values = [*self.tensors, *(buffer.value for buffer in self.written)]
        number = max((i for members in overlapping(values) for i in members), default=-1)
        if number >= len(self.tensors):
            path = self.written[number - len(self.tensors)].path
            raise UnsupportedError(
                f"{self.name}: writes to a buffer, and {path} shares memory with another buffer or "
                "an argument",
                help="hold that memory once, and view it in the function",
            )

    def _traced(self, context: TraceContext) -> Traced:
        """The trace; buffers that are written to are inputs, which the module holds meanwhile."""
        bound, bases, given = self.arguments.bound, self.bases, list[Tensor]()
        inputs = with_bases(self.tensors, bases, self.name)

        def rebuild(traced: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given[:] = traced[len(inputs) :]
            leaves = from_bases(traced[: len(inputs)], self.tensors, bases)
            return self.arguments.binder.rebuild(bound.values, leaves)

        def fn(*args: Any, **kwargs: Any) -> Any:
            held = [*zip(self.written, given, strict=True)]
            for buffer, value in held:
                buffer.swap(buffer.value, value)
            try:
                return self.fn(*args, **kwargs)
            finally:
                for buffer, value in held:
                    buffer.swap(value, buffer.value)

        buffers = [buffer.value for buffer in self.written]
        return trace(fn, rebuild, [*inputs, *buffers], context, self.watched)

    def _prober(self, context: TraceContext) -> Callable[[Tensor], TensorType]:
        """A function that tells the type of a traced tensor: it imports what was traced so far."""
        probe: list[tuple[Importer, list[Value]]] = []

        def type_of(x: Tensor) -> TensorType:
            recorder = context.recorder
            if not probe:
                assert context.mesh is not None
                inputs = self._inputs(context.mesh)
                probe.append((self._importer(context, context.mesh), inputs))
            importer, inputs = probe[0]
            importer.advance(recorder.module, recorder.graph, inputs)
            inner = torch._C._functorch._unwrap_functional_tensor(x, True)
            return importer.type_of(recorder.node_of(inner))

        return type_of

    def _inputs(self, mesh: ProgramMesh) -> list[Value]:
        """The graph's inputs: leaves, then the bases of leaves that share memory."""
        types = self.types or self._types(self.leaves, mesh)
        values = [*map(Value, graph_names(self.leaves), types)]
        shared = {index for members in self.bases for index in members}
        inputs = [value for index, value in enumerate(values) if index not in shared]
        whole = with_bases(self.tensors, self.bases, self.name)[len(inputs) :]
        for number, base in enumerate(whole):
            type_ = TensorType(dtype_name(base.dtype), tuple(base.shape), varying=mesh.shape.names)
            inputs.append(Value(f"shared{number}", type_))
        for buffer in self.written:
            name = re.sub(r"\W", "_", f"self_{buffer.path}")
            type_ = TensorType(
                dtype_name(buffer.value.dtype), tuple(buffer.value.shape), varying=mesh.shape.names
            )
            inputs.append(self.held_types.get(id(buffer.value)) or Value(name, type_))
        return inputs

    def _importer(self, context: TraceContext, mesh: ProgramMesh) -> Importer:
        device = torch.device("cpu") if mesh.abstract else current().device
        held = self.arguments.held
        if len(self.held_types) < len(held):  # no axis was named before the trace
            self._type_held(self._types(held, mesh))
        place = mesh.shape, dict(mesh.coord), device, mesh.axes_over
        return Importer(self.name, *place, context, self.held_types)

    def _import(self, traced: Traced, context: TraceContext) -> Program:
        mesh = context.mesh or ProgramMesh.world("world")
        inputs = self._inputs(mesh)
        importer = self._importer(context, mesh)
        graph = importer.run(traced, inputs)
        self._check_results(traced, graph)
        captured, leaves = (*(b.value for b in self.written), *importer.captured), self.leaves
        return self._planned(graph, traced, mesh, captured, leaves, self.options)

    def _planned(
        self,
        graph: Graph,
        traced: Traced,
        mesh: ProgramMesh,
        captured: tuple[Tensor, ...],
        leaves: Sequence[Leaf],
        options: Options,
    ) -> Program:
        """The program of a graph, after the passes."""
        dump = Dump(options.name)
        lowering = self._lowering(mesh)
        engine = not mesh.abstract and current().copies_beside_kernels
        profile = self.measured.profile or _profile(mesh)
        choose = Choose(lowering, profile, self.measured.times, self.options.config, engine)
        fused = dump.passes(graph, (*PASSES, choose)) if self.options.fuse else choose(graph)
        for name, source in generated(choose.choices).items():
            dump.write(f"kernel_{name}", source)
        return Program(
            options,
            graph,
            fused,
            mesh,
            captured,
            traced.outputs,
            traced.out_tree,
            tuple(replace(leaf, value=leaf.value.detach().to("meta")) for leaf in leaves),
            choose,
            self.bases,
            dump,
        )

    def _lowering(self, mesh: ProgramMesh | None) -> str:
        """How stages run: what the decorator or the environment says, else by the device."""
        name = self.options.lowering or config.lowering()
        if name != "auto":
            return name
        abstract = mesh is not None and mesh.abstract
        return "torch" if not abstract and current().device.type == "cpu" else "triton"

    def _check_results(self, traced: Traced, graph: Graph) -> None:
        """Every result against its out-spec."""
        if self.options.out_specs is None:
            return
        tree = pytree.tree_unflatten(list(range(len(traced.outputs))), traced.out_tree)
        locs = {value.name: node.loc for node in graph.nodes for value in node.outputs}
        returned = []
        try:
            for leaf in match(self.options.out_specs, tree, graph.mesh, "result"):
                arg = graph.outputs[leaf.value]
                if leaf.spec is not None and isinstance(arg, Ref):
                    type_, name = graph.types[arg.name], arg.name
                    due = tuple(axis for axis in type_.partial if axis not in leaf.spec.partial)
                    type_ = replace(type_, partial=due)
                    returned.append(Returned(type_, leaf.spec.dims, name, locs.get(name, "")))
            check_outputs(returned)
        except (SpecError, TypeRuleError) as error:
            raise type(error)(f"{self.name}: {error.message}", help=error.help) from None


def _profile(mesh: ProgramMesh) -> Profile | None:
    """What one rank has of its GPU; None on CPU ranks. An abstract mesh is taken to be of GPUs."""
    if mesh.abstract:
        return ANY
    ctx = current()
    if ctx.device.type == "cpu":
        return None
    profile = profile_of(torch.cuda.get_device_name(ctx.device))
    return profile.shared(ctx.ranks_on_device, ctx.get_usable_units())
