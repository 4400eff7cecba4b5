"""A graph as straight-line Python: the plan that CPU ranks run, and what `as_text()` of a compiled program shows.

Every node becomes one line. Pure ops are torch calls; a collective is a call of an object made at compile time, which
owns its staging and its place in the group's order. A stage is its body, or one fused object where the lowering has one.
"""

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from iris.errors import UnsupportedError
from iris.graph.nodes import Arg, Graph, Node, Ref, Token, refs, walk
from iris.graph.types import TensorType, chunk_sizes
from iris.lower import collectives
from iris.lower.collectives import Collective
from iris.lower.dtypes import TORCH_DTYPES
from iris.runtime.groups import Group

COMMENT_COLUMN = 60


@dataclass(frozen=True)
class Place:
    """Where a program runs: its mesh, this rank's coordinate, the device, and the group along any axes."""

    coord: Mapping[str, int]
    device: torch.device
    group: Callable[[tuple[str, ...]], Group]


@dataclass(frozen=True)
class Executable:
    """``run(*inputs)`` returns the graph's outputs; its writes are done in place.

    ``text`` is the source that runs, ``workspace`` the bytes it uses on the symmetric heap.
    """

    run: Callable[..., tuple[Any, ...]]
    text: str
    workspace: int


def axes_of(node: Node) -> tuple[str, ...]:
    axis = node.kwargs["axis"]
    return (axis,) if isinstance(axis, str) else tuple(str(a) for a in axis)  # type: ignore[union-attr]


def scattered(size: int, axes: Sequence[str], graph: Graph) -> list[int]:
    """Rows that each member along ``axes`` keeps of a dim of ``size`` rows."""
    parts = [size]
    for axis in axes:
        parts = [n for part in parts for n in chunk_sizes(part, graph.mesh.size(axis))]
    return parts


def build(graph: Graph, place: Place) -> Executable:
    """Compile ``graph`` for one rank with torch ops. Collective: all ranks of the mesh build the same graph."""
    return _Writer(graph, place).build()


@dataclass
class _Writer:
    graph: Graph
    place: Place
    space: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    groups: dict[Group, None] = field(default_factory=dict)

    def group(self, node: Node) -> Group:
        """The ranks that ``node`` communicates among."""
        group = self.place.group(axes_of(node))
        if group.size > 1:
            self.groups[group] = None
        return group

    def build(self) -> Executable:
        nodes = [node for node in walk(self.graph.nodes) if not node.body]
        last = self._last_uses(nodes)
        for index, node in enumerate(nodes):
            self._emit(node)
            dead = [_variable(name) for name in last.get(index, ())]
            if dead:
                self.lines.append(f"del {', '.join(dead)}")
        for target, value in self.graph.writes:
            self.lines.append(f"{_variable(target)}.copy_({_variable(value)})")
        outputs = "".join(f"{self._text(arg)}, " for arg in self.graph.outputs)
        self.lines.append(f"return ({outputs})")
        parameters = ", ".join(_variable(value.name) for value in self.graph.inputs)
        text = f"def {self._name()}({parameters}):\n" + "".join(
            f"    {line}\n" for line in self.lines
        )
        staging = [group.staging(1) for group in self.groups]
        return Executable(self._compile(text), text, sum(2 * s.nbytes for s in staging))

    def _name(self) -> str:
        return self.graph.name if self.graph.name.isidentifier() else "program"

    def _compile(self, text: str) -> Callable[..., tuple[Any, ...]]:
        filename = f"<iris {self.graph.name} {id(self.graph):x}>"
        exec(compile(text, filename, "exec"), self.space)
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
        run: Callable[..., tuple[Any, ...]] = self.space[self._name()]
        return run

    def _last_uses(self, nodes: Sequence[Node]) -> dict[int, list[str]]:
        """Values to drop after each node: made by a node, and not read again."""
        made = {value.name for node in nodes for value in node.outputs}
        last = {
            name: i
            for i, node in enumerate(nodes)
            for name in (*node.uses, *(v.name for v in node.outputs))
        }
        table: dict[int, list[str]] = {}
        for name in made - set(self.graph.live_out):
            table.setdefault(last[name], []).append(name)
        return table

    def _emit(self, node: Node) -> None:
        targets = ", ".join(_variable(value.name) for value in node.outputs)
        if len(node.outputs) == 1 and node.op in MULTIPLE:
            targets += ","
        line = f"{targets} = {self._call(node)}"
        self.lines.append(f"{line:<{COMMENT_COLUMN}}  # {node.loc}" if node.loc else line)

    def _call(self, node: Node) -> str:
        if node.op in COLLECTIVES:
            name = f"{node.op}_{node.out.name}"
            self.space[name] = COLLECTIVES[node.op](self, node)
            return f"{name}({', '.join(self._text(arg) for arg in node.args)})"
        if node.op == "axis_index":
            index = self.place.group(axes_of(node)).index
            self.space["axis_index"] = torch.tensor
            return f"axis_index({index}, device={self._text(Token('device'))})"
        name, function = torch_function(
            node.op, self.graph.types[node.out.name] if node.outputs else None
        )
        self.space[name] = function
        args = [self._text(arg) for arg in node.args]
        args += [f"{key}={self._text(arg)}" for key, arg in node.attrs]
        return f"{name}({', '.join(args)})"

    def _text(self, arg: Arg) -> str:
        if isinstance(arg, Ref):
            return _variable(arg.name)
        if isinstance(arg, tuple):
            return "[" + ", ".join(self._text(item) for item in arg) + "]"
        if isinstance(arg, Token):
            value = self._token(arg.text)
            name = f"_{arg.text}"
            self.space[name] = value
            return name
        if isinstance(arg, float) and (arg != arg or arg in (float("inf"), float("-inf"))):
            return f"float('{arg}')"
        return repr(arg)

    def _token(self, text: str) -> Any:
        if text == "device":
            return self.place.device
        if text in TORCH_DTYPES:
            return TORCH_DTYPES[text]
        found = getattr(torch, text, None)
        return torch.device(text) if found is None else found

    def _what(self, node: Node) -> str:
        at = f" at {node.loc}" if node.loc else ""
        return f"{node.op} %{node.out.name}{at} in program {self.graph.name}"

    def _operand(self, node: Node) -> tuple[TensorType, list[int]]:
        (name,) = refs(node.args)
        type_ = self.graph.types[name]
        return type_, list(type_.local_shape(self.graph.mesh, self.place.coord))

    def _all_gather(self, node: Node) -> Collective:
        type_, shape = self._operand(node)
        axes, dim = axes_of(node), int(node.kwargs["dim"])  # type: ignore[arg-type]
        group = self.group(node)
        sizes = [shape[dim]] * group.size
        if type_.spec[dim][-len(axes) :] == axes:
            joined = node.out.type.local_shape(self.graph.mesh, self.place.coord)[dim]
            sizes = scattered(joined, axes, self.graph)
        return collectives.make_all_gather(
            group, shape, sizes, dim, TORCH_DTYPES[type_.dtype], self._what(node)
        )

    def _reduce_scatter(self, node: Node) -> Collective:
        type_, shape = self._operand(node)
        axes, dim = axes_of(node), int(node.kwargs["dim"])  # type: ignore[arg-type]
        sizes = scattered(shape[dim], axes, self.graph)
        dtype, op = TORCH_DTYPES[type_.dtype], str(node.kwargs.get("op", "sum"))
        group = self.group(node)
        return collectives.make_reduce_scatter(
            group, shape, sizes, dim, op, dtype, self._what(node)
        )

    def _all_reduce(self, node: Node) -> Collective:
        type_, shape = self._operand(node)
        dtype, op = TORCH_DTYPES[type_.dtype], str(node.kwargs.get("op", "sum"))
        group = self.group(node)
        return collectives.make_all_reduce(group, shape, op, dtype, self._what(node))

    def _all_to_all(self, node: Node) -> Collective:
        type_, shape = self._operand(node)
        axes = axes_of(node)
        split, concat = int(node.kwargs["split_dim"]), int(node.kwargs["concat_dim"])  # type: ignore[arg-type]
        group = self.group(node)
        shapes = [list(shape) for _ in range(group.size)]
        if split != concat and type_.spec[concat][-len(axes) :] == axes:
            joined = node.out.type.local_shape(self.graph.mesh, self.place.coord)[concat]
            for member, size in enumerate(scattered(joined, axes, self.graph)):
                shapes[member][concat] = size
        splits = scattered(shape[split], axes, self.graph)
        dtype = TORCH_DTYPES[type_.dtype]
        return collectives.make_all_to_all(
            group, shapes, split, splits, concat, dtype, self._what(node)
        )

    def _broadcast(self, node: Node) -> Collective:
        type_, shape = self._operand(node)
        group, src = self.group(node), int(node.kwargs["src"])  # type: ignore[arg-type]
        return collectives.make_broadcast(
            group, shape, src, TORCH_DTYPES[type_.dtype], self._what(node)
        )

    def _ppermute(self, node: Node) -> Collective:
        type_, shape = self._operand(node)
        perm: Any = node.kwargs["perm"]
        group = self.group(node)
        return collectives.make_ppermute(
            group, shape, perm, TORCH_DTYPES[type_.dtype], self._what(node)
        )


COLLECTIVES: dict[str, Callable[[_Writer, Node], Collective]] = {
    "all_gather": _Writer._all_gather,
    "reduce_scatter": _Writer._reduce_scatter,
    "all_reduce": _Writer._all_reduce,
    "all_to_all": _Writer._all_to_all,
    "broadcast": _Writer._broadcast,
    "ppermute": _Writer._ppermute,
}
# Ops that return a list or tuple even of one tensor.
MULTIPLE = {"split.Tensor", "split_with_sizes", "unbind.int", "chunk", "tensor_split.sections"}


def torch_function(op: str, type_: TensorType | None) -> tuple[str, Callable[..., Any]]:
    """The torch callable behind a graph op, and a readable name for it."""
    if op == "matmul":
        batched = type_ is not None and len(type_.shape) == 3
        return ("bmm", torch.bmm) if batched else ("mm", torch.mm)
    space, _, name = op.rpartition("::")
    packet_name, _, overload = name.partition(".")
    try:
        packet = getattr(getattr(torch.ops, space or "aten"), packet_name)
        function = getattr(packet, overload or "default")
    except AttributeError:
        raise UnsupportedError(
            f"this torch has no op {op!r}", help="trace the program with this version"
        ) from None
    return op.replace("::", "_").replace(".", "_"), function


def _variable(name: str) -> str:
    return f"v{name}" if name.isdigit() else name


__all__ = ["Executable", "Place", "Tensor", "build"]
