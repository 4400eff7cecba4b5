"""Ops that pick or place elements by index."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from iris.graph.nodes import Node
from iris.graph.ops.base import Args, Attrs, InferContext, Locals, Op, PerRank, Types
from iris.graph.ops.rules import Link, aligned, propagate, shape_dim
from iris.graph.types import Mesh, TensorType


class Embedding(Op):
    """Rows of a table: ``f32[100, 8/tp], i64[4/dp] -> f32[4/dp, 8/tp]``.

    A table split over its rows gives a varying value: each rank looks up in its own rows.
    """

    name = "embedding"

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        (local,), (table, index) = locals, args[:2]
        links = [(None, len(local.shape) - 1), tuple(range(len(index.shape)))]
        return (propagate(self.name, ctx, [table, index], links, local, ((0,),)),)

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        return [[table[index] for table, index in zip(args[0], args[1], strict=True)]]


class IndexSelect(Op):
    """Slices along a dim, in the order of a list: ``f32[8, 4/tp], i64[3] -> f32[3, 4/tp]``."""

    name = "index_select"

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        (local,), (x, dim, index) = locals, args[:3]
        dim = shape_dim(dim, len(x.shape))
        through: list[Link] = [None if d == dim else d for d in range(len(x.shape))]
        links: list[Sequence[Link]] = [through, [dim] * len(index.shape)]
        return (propagate(self.name, ctx, [x, index], links, local, ((0,),)),)

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        pairs = zip(args[0], args[2], strict=True)
        return [[np.take(x, index, axis=args[1]) for x, index in pairs]]


class Gather(Op):
    """Elements along a dim, one an index: ``f32[8/tp, 4], i64[8/tp, 2] -> f32[8/tp, 2]``."""

    name = "gather"

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        (local,), (x, dim, index) = locals, args[:3]
        dim, sizes = shape_dim(dim, len(x.shape)), ctx.local(x)
        through: list[Link] = [
            d if d != dim and n == local.shape[d] else None for d, n in enumerate(sizes)
        ]
        links = [through, tuple(range(len(index.shape)))]
        return (propagate(self.name, ctx, [x, index], links, local, ((0,),)),)

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        pairs = zip(args[0], args[2], strict=True)
        return [[np.take_along_axis(x, index, args[1]) for x, index in pairs]]


class Index(Op):
    """Indexing with tensors, ``x[i, :]``: ``f32[8, 4/tp], (i64[3], None) -> f32[3, 4/tp]``.

    Dims without an index pass through. Index tensors stand side by side, else nothing is known.
    """

    name = "index"

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        (local,), (x, given) = locals, args[:2]
        places = [d for d, index in enumerate(given) if index is not None]
        indices = [given[d] for d in places]
        if not places or places[-1] - places[0] >= len(places) or _has_mask(indices):
            links: list[Sequence[Link]] = [[None] * len(t.shape) for t in (x, *indices)]
            return (propagate(self.name, ctx, [x, *indices], links, local, ((0,),)),)
        first, wide = places[0], len(local.shape) - (len(x.shape) - len(places))
        shift = wide - len(places)
        through: list[Link] = [
            None if d in places else d + (shift if d > first else 0) for d in range(len(x.shape))
        ]
        window = local.shape[first : first + wide]
        links = [through]
        for t in indices:
            inside = aligned(ctx.local(t), window)
            links.append([first + d if isinstance(d, int) else None for d in inside])
        return (propagate(self.name, ctx, [x, *indices], links, local, ((0,),)),)

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        out = []
        for rank, x in enumerate(args[0]):
            index = [slice(None) if i is None else i[rank] for i in args[1]]
            out.append(np.asarray(x[tuple(index)]))
        return [out]


def _has_mask(indices: Sequence[TensorType]) -> bool:
    return any(t.dtype in ("bool", "u8") for t in indices)


class Placed(Op):
    """A value with some elements replaced: ``f32[8, 4/tp], f32[2, 4/tp] -> f32[8, 4/tp]``.

    The result is laid out as the first; axes over which only the others differ make it varying. It
    is linear in the first and the last, what is replaced and by what.
    """

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        (local,), operands = locals, [arg for arg in _flat(args) if isinstance(arg, TensorType)]
        links: list[Sequence[Link]] = [tuple(range(len(local.shape)))]
        links += [[None] * len(t.shape) for t in operands[1:]]
        linear = ((0, len(operands) - 1),)
        return (propagate(self.name, ctx, operands, links, local, linear),)

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        place = PLACING[self.name]
        out = []
        for rank, x in enumerate(args[0]):
            result = x.copy()
            place(result, *[_at_rank(arg, rank) for arg in args[1:]], **attrs)
            out.append(result)
        return [out]


def _flat(args: Sequence[Any]) -> list[Any]:
    return [a for arg in args for a in (_flat(arg) if isinstance(arg, tuple) else [arg])]


def _at_rank(arg: Any, rank: int) -> Any:
    """One rank's view of an argument of a reference."""
    if isinstance(arg, list):
        return arg[rank]
    return tuple(_at_rank(a, rank) for a in arg) if isinstance(arg, tuple) else arg


def _slots(x: np.ndarray, dim: int, index: Any) -> Any:
    return (*[slice(None)] * (dim % x.ndim), index)


def place_slice(
    x: np.ndarray, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> None:
    x[_slots(x, dim, slice(start, end, step))] = src


def place_select(x: np.ndarray, src: Any, dim: int, index: int) -> None:
    x[_slots(x, dim, index)] = src


def place_index(x: np.ndarray, indices: Any, values: Any, accumulate: bool = False) -> None:
    where: Any = tuple(slice(None) if i is None else i for i in indices)
    if accumulate:
        np.add.at(x, where, values)
    else:
        x[where] = values


def place_rows(x: np.ndarray, dim: int, index: Any, src: Any) -> None:
    x[_slots(x, dim, index)] = src


def add_rows(x: np.ndarray, dim: int, index: Any, src: Any, *, alpha: Any = 1) -> None:
    np.add.at(x, _slots(x, dim, index), alpha * src)


def place_along(x: np.ndarray, dim: int, index: Any, src: Any) -> None:
    np.put_along_axis(x, index, _under(src, index), dim)


def add_along(x: np.ndarray, dim: int, index: Any, src: np.ndarray) -> None:
    grid = list(np.indices(index.shape))
    grid[dim] = index
    np.add.at(x, tuple(grid), _under(src, index))


def _under(src: Any, index: np.ndarray) -> Any:
    """The part of ``src`` that has an index; a number stays one."""
    return src[tuple(map(slice, index.shape))] if isinstance(src, np.ndarray) else src


PLACING: dict[str, Callable[..., None]] = {
    "slice_scatter": place_slice,
    "select_scatter": place_select,
    "index_put": place_index,
    "index_copy": place_rows,
    "index_add": add_rows,
    "scatter": place_along,
    "scatter_add": add_along,
}
INDEXING: dict[str, Op] = {
    op.name: op
    for op in (Embedding(), IndexSelect(), Gather(), Index(), *(Placed(name) for name in PLACING))
}
"""Every indexing op by ATen name."""
