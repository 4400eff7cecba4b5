"""From an FX graph of ATen ops to our graph: names, types, user lines, in-place writes."""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from iris.errors import TraceError
from iris.graph.nodes import Arg, Graph, Node, Ref, Token, Value, map_refs, refs
from iris.graph.ops import infer_node
from iris.graph.ops.base import InferContext, Local
from iris.graph.types import Mesh, TensorType
from iris.lower.dtypes import dtype_name
from iris.spmd import recognised
from iris.spmd.context import TraceContext
from iris.spmd.inlining import CALL
from iris.spmd.recording import returned
from iris.spmd.tracing import Output, Traced

# Constants by a number of Python's, which may be a size of this rank's shard.
FILLED = {"full", "new_full", "full_like", "scalar_tensor", "arange"}
RENAMED = {"mm": "matmul", "bmm": "matmul"}
WAIT = torch.ops._c10d_functional.wait_tensor.default
VIEWS = {
    "view", "_unsafe_view", "t", "transpose.int", "permute", "select.int", "slice.Tensor", "expand",
    "alias", "detach", "squeeze.dim", "squeeze", "unsqueeze", "as_strided", "narrow", "diagonal",
    "split.Tensor", "unbind.int", "reshape", "view.dtype",
}  # fmt: skip


@dataclass
class Importer:
    """Builds a Graph node by node. ``captured``: tensors read from outside, by reference."""

    name: str
    mesh: Mesh
    coord: Mapping[str, int]
    device: torch.device
    axes_over: Callable[[tuple[int, ...]], tuple[str, ...]]
    context: TraceContext
    known: Mapping[int, Value] = field(default_factory=dict)  # by id of a tensor read from outside
    claims: bool = True  # whether types say more than what this rank holds
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    captured: list[Tensor] = field(default_factory=list)
    writes: dict[str, str] = field(default_factory=dict)
    _env: dict[Any, Arg] = field(default_factory=dict)
    _types: dict[str, TensorType] = field(default_factory=dict)
    _makers: dict[str, str] = field(default_factory=dict)
    _lines: dict[str, str] = field(default_factory=dict)
    _captured_names: dict[int, str] = field(default_factory=dict)  # by id of the tensor
    _joined: dict[Any, Any] = field(default_factory=dict)  # FX nodes that a gather's dim stands for
    _count: int = 0
    _seen: int = 0

    def run(self, traced: Traced, inputs: Sequence[Value]) -> Graph:
        """The whole graph; ``inputs`` name and type the placeholders."""
        self.advance(traced.module, traced.module.graph, inputs)
        values = returned(traced.module.graph)
        outputs = tuple(self._output(output, values, inputs) for output in traced.outputs)
        writes = tuple(self.writes.items())
        return Graph(
            self.name,
            self.mesh,
            tuple(self.inputs),
            tuple(self.nodes),
            outputs,
            writes,
            tuple(self.coord.items()),
        )

    def advance(self, module: Any, graph: torch.fx.Graph, inputs: Sequence[Value]) -> None:
        """Import the nodes that are new; ``module`` holds the graph's tensors."""
        for node in itertools.islice(graph.nodes, self._seen, None):
            self._seen += 1
            if node.op == "placeholder":
                self._bind_input(node, inputs[len(self.inputs)])
            elif node.op == "get_attr":
                self._capture(node, getattr(module, node.target))
            elif node.op == "call_function":
                self._call(node)

    def type_of(self, node: Any) -> TensorType:
        """The type of an imported FX node of one tensor."""
        ref = self._env[node]
        assert isinstance(ref, Ref)
        return self._types[ref.name]

    def _bind_input(self, node: Any, value: Value) -> None:
        self.inputs.append(value)
        self._env[node] = Ref(value.name)
        self._types[value.name] = value.type

    def _capture(self, node: Any, tensor: Any) -> None:
        """A tensor from outside becomes one more input, however often it is read."""
        if not isinstance(tensor, Tensor):  # a process group, say: the op that takes it decides
            return
        if id(tensor) in self._captured_names:
            self._env[node] = Ref(self._captured_names[id(tensor)])
            return
        literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        same = literal and not self.context.uneven  # a literal may hold a size of this rank's
        varying = () if same else self.mesh.names
        type_ = TensorType(dtype_name(tensor.dtype), tuple(tensor.shape), varying=varying)
        value = self.known.get(id(tensor)) or Value(f"captured{len(self.captured)}", type_)
        self._bind_input(node, value)
        self.captured.append(tensor)
        self._captured_names[id(tensor)] = value.name

    def _call(self, node: Any) -> None:
        if node in self._joined:
            self._env[node] = self._env.get(self._joined[node], ())
            return
        if node.target is operator.getitem:
            source = self._env[node.args[0]]
            assert isinstance(source, tuple)
            self._env[node] = source[node.args[1]]
            return
        if node.target is CALL:
            self._inline(node)
            return
        if node.target is WAIT and not self._is_foreign(self._env[node.args[0]]):
            self._env[node] = self._env[node.args[0]]
            return
        if node.target.namespace == "c10d":
            name = node.target._schema.name.partition("::")[2]
            raise recognised.refusal(self.name, name, node.meta.get("loc", ""))
        op, args, attrs = self._operation(node)
        if op == "copy_" and self._is_input(args[0]):
            assert isinstance(args[0], Ref)
            assert isinstance(args[1], Ref)
            self.writes[args[0].name] = args[1].name
            self._env[node] = args[0]
            return
        mutated = op.partition(".")[0].endswith("_") and not op.startswith("_")
        if mutated:
            op = self._functional(op, args, node)
        outputs = self._emit(op, args, attrs, recognised.joined(node, self._joined) or node)
        if mutated:  # later reads of the operand see the new value
            self._env.update({key: outputs for key, arg in self._env.items() if arg == args[0]})
        self._env[node] = outputs

    def _inline(self, node: Any) -> None:
        """The nodes of a nested function, once more, on this call's operands."""
        operands, number = node.args
        module = self.context.calls[number].module
        waiting = [self._env[operand] for operand in operands]
        for inner in module.graph.nodes:
            if inner.op == "placeholder":
                self._env[inner] = waiting.pop(0)
            elif inner.op == "get_attr":
                self._capture(inner, getattr(module, inner.target))
            elif inner.op == "call_function":
                self._call(inner)
        self._env[node] = tuple(self._env[value] for value in returned(module.graph))

    def _emit(
        self, op: str, args: tuple[Arg, ...], attrs: tuple[tuple[str, Arg], ...], node: Any
    ) -> Arg:
        loc = node.meta.get("loc", "")
        results = node.meta["val"]
        many = isinstance(results, list | tuple)
        tensors = [t for t in (results if many else [results]) if isinstance(t, Tensor)]
        locals_ = [Local(dtype_name(t.dtype), tuple(t.shape)) for t in tensors]
        typed = tuple(map_refs(arg, self._type_of) for arg in args)
        typed_attrs = {key: map_refs(arg, self._type_of) for key, arg in attrs}
        names = refs((*args, *(value for _, value in attrs)))
        sources = [(name, self._lines.get(name, "")) for name in names]
        context = InferContext(self.mesh, self.coord, loc, sources)
        types = infer_node(op, context, typed, typed_attrs, locals_)
        if self.context.uneven and op.partition(".")[0] in FILLED:
            types = tuple(replace(t, varying=self.mesh.names) for t in types)
        if not self.claims:
            types = tuple(TensorType(x.dtype, x.shape, varying=self.mesh.names) for x in locals_)
        values = tuple(Value(self._fresh(), type_) for type_ in types)
        self.nodes.append(Node(op, args, attrs, values, loc))
        for value in values:
            self._types[value.name] = value.type
            self._makers[value.name] = op
            self._lines[value.name] = loc
        made = iter(values)
        if not many:
            return Ref(next(made).name)
        return tuple(Ref(next(made).name) if isinstance(t, Tensor) else None for t in results)

    def _type_of(self, name: str) -> Any:
        return self._types[name]

    def _fresh(self) -> str:
        self._count += 1
        return str(self._count - 1)

    def _is_foreign(self, arg: Arg) -> bool:
        """Whether torch.distributed makes this value, which then has to be waited for."""
        maker = self._makers.get(arg.name, "") if isinstance(arg, Ref) else ""
        return maker.startswith("_c10d_functional::")

    def _is_input(self, arg: Arg) -> bool:
        return isinstance(arg, Ref) and any(value.name == arg.name for value in self.inputs)

    def _functional(self, op: str, args: tuple[Arg, ...], node: Any) -> str:
        """The functional form of an in-place op that torch itself applied to a value of its own."""
        target = args[0]
        name, dot, overload = op.partition(".")
        made_by = self._makers.get(target.name, "input") if isinstance(target, Ref) else "input"
        if made_by == "input" or made_by in VIEWS:
            raise TraceError(
                f"{self.name}: {op} writes in place to "
                f"{'an input' if made_by == 'input' else 'a view'} "
                f"below functionalisation\n  at {node.meta.get('loc', '')}",
                help="use the form that returns a new tensor",
            )
        return name[:-1] + dot + overload

    def _operation(self, node: Any) -> tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        """Name, arguments and attributes of an FX call, in our terms."""
        target = node.target
        space, name = target.namespace, target._schema.name.partition("::")[2]
        args = tuple(self._arg(arg) for arg in node.args)
        attrs = tuple((key, self._arg(arg)) for key, arg in node.kwargs.items())
        if space == "iris":
            return recognised.own(name, args)
        if space == "_c10d_functional":
            found = recognised.functional(node, name, args, self.axes_over, self._env)
            if found is not None:
                return found
        overload = target._overloadname
        if overload not in ("default", ""):
            name = f"{name}.{overload}"
        if space != "aten":
            return f"{space}::{name}", args, attrs
        return RENAMED.get(name, name), args, attrs

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, torch.fx.Node):
            return self._env[arg]
        if isinstance(arg, list | tuple):
            return tuple(self._arg(item) for item in arg)
        if isinstance(arg, torch.dtype):
            return Token(dtype_name(arg))
        if isinstance(arg, torch.device):
            return Token("device" if arg.type == self.device.type else arg.type)
        if isinstance(arg, torch.layout | torch.memory_format):
            return Token(str(arg).removeprefix("torch."))
        if arg is None or isinstance(arg, bool | int | float | complex | str):
            return arg
        raise TraceError(f"{self.name}: a {type(arg).__name__} among the arguments of an op")

    def _output(self, output: Output, values: Sequence[Any], inputs: Sequence[Value]) -> Arg:
        if output.kind == "value":
            return self._env[values[output.item]]
        if output.kind == "input":
            return Ref(inputs[output.item].name)
        return None
