"""Recognises RMSNorm, fused or written out."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from iris.graph.nodes import Node, Ref
from iris.graph.passes.memory import base

Shape = tuple[int, ...]


class Bench(Protocol):
    """What is asked of nodes and their readers; `iris.graph.passes.bench` has it for a graph."""

    nodes: dict[int, Node]
    slot: dict[int, int]
    live: set[str]

    def readers_of(self, name: str) -> list[int]: ...

    def is_private(self, name: str, group: Collection[int]) -> bool: ...

    def shape(self, name: str) -> Shape: ...


@dataclass(frozen=True)
class Norm:
    """``result = weight * value / rms(value)`` by ``nodes``; ``weight`` may be None."""

    value: str
    weight: str | None
    eps: float
    result: str
    nodes: tuple[Node, ...]


class NormSearch:
    """The nodes of a stage's body, to be searched for a norm."""

    def __init__(
        self, nodes: Sequence[Node], live: Collection[str], shape: Callable[[str], Shape]
    ) -> None:
        self.nodes = dict(enumerate(nodes))
        self.slot = {number: number for number in self.nodes}
        self.live = set(live)
        self.shape = shape

    def readers_of(self, name: str) -> list[int]:
        """Numbers of the nodes that read ``name``, in order."""
        return [number for number, node in self.nodes.items() if name in node.uses]

    def is_private(self, name: str, group: Collection[int]) -> bool:
        """Whether only nodes of ``group`` read ``name``."""
        return name not in self.live and set(self.readers_of(name)) <= set(group)

    def norm_of(self, name: str) -> Norm | None:
        """The norm of ``name``, if it is one that says its eps and gives nothing else."""
        group = rms_norm(self, name)
        if group is None:
            return None
        nodes = tuple(self.nodes[number] for number in sorted(group))
        if nodes[0].op == "_fused_rms_norm":
            _, _, weight, eps = (*nodes[0].args, None, None)[:4]
            result, *others = (value.name for value in nodes[0].outputs)
            unread = all(self.is_private(other, ()) for other in others)
        else:
            numbers = [n.args[1] for n in nodes if _is_add_number(self, n) and not n.attrs]
            eps = next(iter(numbers), None)
            weights = [_vector(self, node) for node in nodes if base(node.op) == "mul"]
            weight = next((Ref(found) for found in weights if found), None)
            result, unread = nodes[-1].out.name, True
        if not unread or not isinstance(eps, int | float):
            return None
        return Norm(name, weight.name if isinstance(weight, Ref) else None, eps, result, nodes)


def rms_norm(bench: Bench, name: str) -> set[int] | None:
    """The nodes that make ``weight * x * rsqrt(mean(x ** 2, -1) + eps)`` of ``name``, or None.

    Either ``_fused_rms_norm`` over the last dim, or written out, with casts anywhere between.
    """
    for number in bench.readers_of(name):
        node = bench.nodes[number]
        if node.op == "_fused_rms_norm" and node.args[0] == Ref(name):
            return {number} if len(node.args[1]) == 1 else None  # type: ignore[arg-type]
    for value, casts in _with_casts(bench, name):
        found = _written_out(bench, value, casts)
        if found is not None and _is_closed(bench, found):
            return found
    return None


def _is_closed(bench: Bench, group: set[int]) -> bool:
    """Whether only the last value of the group is read outside."""
    last = max(group, key=bench.slot.__getitem__)
    return all(bench.is_private(bench.nodes[n].out.name, group) for n in group if n != last)


def _with_casts(bench: Bench, name: str) -> Iterator[tuple[str, set[int]]]:
    """``name`` itself, and each cast of it with the cast's number."""
    yield name, set()
    for number in bench.readers_of(name):
        if bench.nodes[number].op == "_to_copy":
            yield bench.nodes[number].out.name, {number}


def _written_out(bench: Bench, x: str, casts: set[int]) -> set[int] | None:
    """The nodes from ``x`` to its norm; ``casts`` made ``x`` and belong to them."""
    group, value = set(casts), x
    for test in (_is_square, _is_mean, _is_add_number, lambda _, node: node.op == "rsqrt"):
        number = _reader(bench, value, test)
        if number is None:
            return None
        group.add(number)
        value = bench.nodes[number].out.name
    number = _reader(bench, value, lambda _, node: set(node.args) == {Ref(x), Ref(value)})
    if number is None or base(bench.nodes[number].op) != "mul":
        return None
    group.add(number)
    return group | _weight(bench, bench.nodes[number].out.name)


def _reader(bench: Bench, name: str, test: Callable[[Bench, Node], bool]) -> int | None:
    """The first node that reads ``name`` and passes ``test``."""
    return next((n for n in bench.readers_of(name) if test(bench, bench.nodes[n])), None)


def _weight(bench: Bench, value: str) -> set[int]:
    """Casts and one product with a vector after the norm, while they are its only readers."""
    group: set[int] = set()
    weighted = False
    while True:
        readers = bench.readers_of(value)
        if len(readers) != 1 or value in bench.live:
            return group
        node = bench.nodes[readers[0]]
        if node.op != "_to_copy":
            if weighted or not _is_vector_product(bench, node, value):
                return group
            weighted = True
        group.add(readers[0])
        value = node.out.name


def _is_square(bench: Bench, node: Node) -> bool:
    kind = base(node.op)
    return (
        kind == "square"
        or (kind == "pow" and node.args[1] == 2)
        or (kind == "mul" and node.args[0] == node.args[1])
    )


def _is_mean(bench: Bench, node: Node) -> bool:
    shape = bench.shape(node.uses[0])
    return (
        node.op == "mean.dim"
        and node.args[1] in ((-1,), (len(shape) - 1,))
        and bench.shape(node.out.name) == (*shape[:-1], 1)
    )


def _is_add_number(bench: Bench, node: Node) -> bool:
    return base(node.op) == "add" and len(node.uses) == 1


def _is_vector_product(bench: Bench, node: Node, value: str) -> bool:
    """``value * weight`` with one weight a column."""
    return base(node.op) == "mul" and _vector(bench, node) not in (None, value)


def _vector(bench: Bench, node: Node) -> str | None:
    """The operand of a product of two that has one element a column of the other."""
    shapes = {name: bench.shape(name) for name in node.uses}
    columns = bench.shape(node.outputs[0].name)[-1:]
    found = [name for name, shape in shapes.items() if shape == columns]
    return found[0] if len(shapes) == 2 and len(found) == 1 else None
