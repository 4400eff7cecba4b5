"""What can run on a tile of a product: pointwise chains, and views that keep rows and columns."""

import heapq
import math
from collections.abc import Collection, Iterable, Iterator

from iris.graph.nodes import Node
from iris.graph.passes.bench import REACH, Bench
from iris.graph.passes.memory import base

Shape = tuple[int, ...]

# Pointwise ops that a generated epilogue computes.
EPILOGUE = frozenset(
    {
        "_to_copy", "abs", "add", "addcmul", "clamp", "clamp_max", "clamp_min", "clone", "cos",
        "div", "elu", "eq", "erf", "exp", "exp2", "ge", "gelu", "gt", "hardsigmoid",
        "hardswish", "hardtanh", "le", "leaky_relu", "log", "lt", "maximum", "minimum", "mul",
        "ne", "neg", "pow", "reciprocal", "relu", "relu6", "rsqrt", "rsub", "sigmoid", "silu",
        "sin", "softplus", "sqrt", "square", "sub", "tanh", "where",
    }
)  # fmt: skip
RESHAPES = frozenset({"view", "_unsafe_view", "unsqueeze", "squeeze"})


def tile(shape: Shape) -> tuple[int, int]:
    """Rows and columns of a value: its last dim are the columns.

    >>> tile((2, 3, 8))
    (6, 8)
    """
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def is_row_view(bench: Bench, node: Node) -> bool:
    """A view that keeps rows and columns: ``[B, S, N]`` as ``[B * S, N]`` or back."""
    if base(node.op) not in RESHAPES:
        return False
    before, after = bench.local(node.uses[0]), bench.local(node.out.name)
    return bool(before and after) and tile(before) == tile(after)


def is_epilogue(bench: Bench, node: Node) -> bool:
    """Whether an element of ``node`` needs one of each operand: at its place, row or column."""
    if is_row_view(bench, node):
        return True
    if base(node.op) not in EPILOGUE or not node.uses:
        return False
    shape = bench.shape(node.out.name)
    return all(_meets(bench.shape(name), shape) for name in node.uses)


def _meets(operand: Shape, shape: Shape) -> bool:
    """Whether an operand is a tile, a row, a column or a scalar beside a tile of ``shape``."""
    row, column = (1, tile(shape)[1]), (*shape[:-1], 1)
    return math.prod(operand) == 1 or operand in (shape, column) or tile(operand) == row


def grow(bench: Bench, core: Collection[int], seeds: Iterable[str]) -> set[int]:
    """Nodes that run in the epilogue of ``seeds``, values that ``core`` makes.

    Everything pointwise that follows them, unless the core cannot wait for it; up to values with a
    reader outside.
    """
    values, found = set(seeds), set(core)
    inside = {value.name for number in core for value in bench.nodes[number].outputs}
    waiting = [(bench.slot[n], n) for name in values for n in bench.readers.get(name, ())]
    heapq.heapify(waiting)
    start = min(bench.slot[number] for number in core)
    while waiting:
        slot, number = heapq.heappop(waiting)
        node = bench.nodes[number]
        if number in found or slot - start > REACH or not is_epilogue(bench, node):
            continue
        own = [name for name in node.uses if name in values]
        same_tile = all(tile(bench.shape(n)) == tile(bench.shape(node.out.name)) for n in own)
        if not same_tile or any(name in inside and name not in values for name in node.uses):
            continue
        found.add(number)
        values.add(node.out.name)
        for reader in bench.readers.get(node.out.name, ()):
            heapq.heappush(waiting, (bench.slot[reader], reader))
    return trim(bench, core, found, values)


def trim(bench: Bench, core: Collection[int], group: set[int], values: Collection[str]) -> set[int]:
    """``group`` less what cannot move to the core, what follows an output, and views at the end."""
    group = set(group)
    while (obstacle := bench.obstacle(group)) and obstacle.node not in core:
        drop(bench, core, group, obstacle.node)
    if obstacle:
        return set(core)
    while (number := next(_loose_ends(bench, core, group, values), None)) is not None:
        drop(bench, core, group, number)
    return group


def _loose_ends(
    bench: Bench, core: Collection[int], group: set[int], values: Collection[str]
) -> Iterator[int]:
    """Nodes that read an output of the group, and views that nothing in it reads."""
    for number in group.difference(core):
        node = bench.nodes[number]
        escapes = any(n in values and not bench.is_private(n, group) for n in node.uses)
        unread = base(node.op) in RESHAPES and group.isdisjoint(
            bench.readers.get(node.out.name, ())
        )
        if escapes or unread:
            yield number


def drop(bench: Bench, core: Collection[int], group: set[int], number: int) -> None:
    """Take ``number``, and all outside the core that needs it, out of ``group``."""
    gone = [number]
    while gone:
        number = gone.pop()
        group.discard(number)
        for value in bench.nodes[number].outputs:
            readers = bench.readers.get(value.name, set())
            gone += [n for n in readers if n in group and n not in core]
