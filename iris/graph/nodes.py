"""The dataflow graph: frozen values, nodes and graphs. No torch here.

A fused stage is a node with a *body*: the very nodes it replaces. Its outputs are values that the
body defines. So a fusion cannot change the meaning, and the unfused form of every stage is at hand.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from iris.graph.types import Mesh, TensorType


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of a value, by name: printed ``%name``."""

    name: str


@dataclass(frozen=True, slots=True)
class Token:
    """A constant that is no Python number (a dtype, a layout, the device), printed ``:f32``."""

    text: str


# One argument: a use, a constant, or a tuple of arguments.
Arg = Ref | Token | int | float | complex | bool | str | None | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A named value with its type."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class Node:
    """``outputs = op(*args, **attrs)``, made at the user's line ``loc`` (``mlp.py:9``)."""

    op: str
    args: tuple[Arg, ...]
    attrs: tuple[tuple[str, Arg], ...]
    outputs: tuple[Value, ...]
    loc: str = ""
    body: tuple["Node", ...] = ()
    uses: tuple[str, ...] = field(init=False, compare=False, repr=False)
    """Names this node reads, in order, repeats included."""

    def __post_init__(self) -> None:
        uses = tuple(refs((*self.args, *(value for _, value in self.attrs))))
        object.__setattr__(self, "uses", uses)

    @property
    def kwargs(self) -> dict[str, Arg]:
        return dict(self.attrs)

    @property
    def out(self) -> Value:
        """The only output."""
        (value,) = self.outputs
        return value


@dataclass(frozen=True)
class Graph:
    """A program: inputs, nodes in order, outputs (None and constants allowed), and in-place writes.

    ``writes`` holds ``(input name, value name)``: at the end the caller's tensor takes that value.
    ``coord`` is the place of the rank that traced it, () the first: where shards are uneven, sizes
    among the arguments of nodes are that rank's.
    """

    name: str
    mesh: Mesh
    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Arg, ...]
    writes: tuple[tuple[str, str], ...] = ()
    coord: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    alike: bool = field(default=True, compare=False)  # whether ranks have the same types

    @property
    def place(self) -> dict[str, int]:
        """The coordinate of the rank that traced it."""
        return dict(self.coord) or self.mesh.origin

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """Type of every value, those inside stage bodies included."""
        table = {value.name: value.type for value in self.inputs}
        for node in walk(self.nodes):
            table.update((value.name, value.type) for value in node.outputs)
        return table

    @property
    def live_out(self) -> tuple[str, ...]:
        """Names read after the last node: outputs and writes."""
        return (*refs(self.outputs), *(value for _, value in self.writes))

    def users(self) -> dict[str, list[Node]]:
        """Top-level nodes that read each value."""
        table: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.uses):
                table.setdefault(name, []).append(node)
        return table

    def with_nodes(self, nodes: tuple[Node, ...]) -> "Graph":
        return replace(self, nodes=nodes)

    def __str__(self) -> str:
        from iris.graph.printing import format_graph

        return format_graph(self)


def refs(args: tuple[Arg, ...]) -> list[str]:
    """Every name used in ``args``, nested tuples included."""
    names: list[str] = []
    for arg in args:
        if isinstance(arg, Ref):
            names.append(arg.name)
        elif isinstance(arg, tuple):
            names += refs(arg)
    return names


def walk(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """Every node; the body of a stage before the stage."""
    for node in nodes:
        yield from walk(node.body)
        yield node


def map_refs(arg: Arg, fn: Callable[[str], Arg]) -> Arg:
    """``arg`` with every use replaced by ``fn(name)``."""
    if isinstance(arg, Ref):
        return fn(arg.name)
    if isinstance(arg, tuple):
        return tuple(map_refs(item, fn) for item in arg)
    return arg


def rename(node: Node, names: Mapping[str, str]) -> Node:
    """``node`` reading ``names[x]`` wherever it read ``x``, its body too."""
    if not any(name in names for name in node.uses) and not node.body:
        return node

    def new(name: str) -> Arg:
        return Ref(names.get(name, name))

    return replace(
        node,
        args=tuple(map_refs(arg, new) for arg in node.args),
        attrs=tuple((key, map_refs(arg, new)) for key, arg in node.attrs),
        body=tuple(rename(inner, names) for inner in node.body),
    )
