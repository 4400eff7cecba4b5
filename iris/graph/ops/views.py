"""Ops that move elements and do not change them: views, permutations, slices, joins."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from iris.graph.nodes import Node
from iris.graph.ops.base import Args, Attrs, InferContext, Local, Locals, Op, PerRank, Types
from iris.graph.ops.groups import coordinates
from iris.graph.ops.rules import (
    Dim,
    Link,
    aligned,
    at,
    group_size,
    propagate,
    redimmed,
    shape_dim,
    tensors,
)
from iris.graph.types import Mesh, TensorType

Shape = tuple[int, ...]

# Dims of an output, from the context, the operand, the call's other arguments and the output's
# local shape.
DimRule = Callable[[InferContext, TensorType, Args, Shape], list[Dim]]
# One rank's outputs, from its arrays, the call's other arguments and this rank's output shapes.
Function = Callable[[np.ndarray, Args, Sequence[Shape]], list[np.ndarray]]
# Dims of an operand and the dims of the output with as many elements.
Pair = tuple[tuple[int, ...], tuple[int, ...]]


def dims_of(x: TensorType) -> list[Dim]:
    return [*zip(x.shape, x.spec, strict=True)]


def reshape_dims(ctx: InferContext, x: TensorType, args: Args, out: Shape) -> list[Dim]:
    """Dims meet in groups of equal product: ``(2, 3, 8) -> (6, 8)`` is two: ``(2, 3), (8)``.

    A group that is one dim on both sides, beside dims of one row, keeps it. A merged or cut group
    stays split where its outermost dim is split evenly, for then the shards of the whole are blocks
    of it.
    """
    sizes = ctx.local(x)
    result: list[Dim] = [(n, ()) for n in out]
    for inner, outer in dim_groups(sizes, out):
        wide, made = _wide(inner, x.shape), _wide(outer, out)
        if len(wide) == len(made) == 1:
            result[made[0]] = (x.shape[wide[0]], x.spec[wide[0]])
            continue
        first = next((d for d in inner if x.shape[d] > 1), None)
        target = next((d for d in outer if out[d] > 1), outer[0] if outer else None)
        if first is None or target is None or not x.spec[first]:
            continue
        ranks = group_size(ctx.mesh, x.spec[first])
        if x.shape[first] % ranks == 0:
            result[target] = (out[target] * ranks, x.spec[first])
    return result


def _wide(dims: Sequence[int], sizes: Sequence[int]) -> Sequence[int]:
    """Those of ``dims`` that have not one row; all of them if there is but one."""
    return dims if len(dims) == 1 else [d for d in dims if sizes[d] != 1]


def dim_groups(sizes: Shape, out: Shape) -> list[Pair]:
    """The finest pairing of runs of dims with equal products, left to right.

    >>> dim_groups((2, 3, 8), (6, 8))
    [((0, 1), (0,)), ((2,), (1,))]
    """
    if 0 in sizes:
        return empty_groups(sizes, out)
    pairs: list[Pair] = []
    i = j = 0
    while i < len(sizes) or j < len(out):
        start, stop, here, there = i, j, 1, 1
        if i < len(sizes):
            here, i = sizes[i], i + 1
        if j < len(out):
            there, j = out[j], j + 1
        while here != there:
            if here < there:
                here, i = here * sizes[i], i + 1
            else:
                there, j = there * out[j], j + 1
        pairs.append((tuple(range(start, i)), tuple(range(stop, j))))
    return pairs


def empty_groups(sizes: Shape, out: Shape) -> list[Pair]:
    """Pairs of equal dims from both ends: products say nothing where a dim has no rows."""
    short = min(len(sizes), len(out))
    front = next((d for d in range(short) if sizes[d] != out[d]), short)
    back = next((d for d in range(short - front) if sizes[-1 - d] != out[-1 - d]), short - front)
    pairs: list[Pair] = [((d,), (d,)) for d in range(front)]
    pairs += [((len(sizes) - 1 - d,), (len(out) - 1 - d,)) for d in range(back)]
    return pairs


def permute_dims(ctx: InferContext, x: TensorType, args: Args, out: Shape) -> list[Dim]:
    dims = dims_of(x)
    return [dims[d] for d in permutation(len(dims), args)]


def permutation(ndim: int, args: Args) -> list[int]:
    """The order of dims that ``t()``, ``transpose(a, b)`` or ``permute(dims)`` asks for."""
    if args and isinstance(args[0], tuple | list):
        return [shape_dim(d, ndim) for d in args[0]]
    order = list(range(ndim))
    a, b = (shape_dim(d, ndim) for d in args) if args else (0, ndim - 1)
    if ndim:
        order[a], order[b] = order[b], order[a]
    return order


def unsqueeze_dims(ctx: InferContext, x: TensorType, args: Args, out: Shape) -> list[Dim]:
    dims = dims_of(x)
    dims.insert(shape_dim(args[0], len(out)), (1, ()))
    return dims


def squeeze_dims(ctx: InferContext, x: TensorType, args: Args, out: Shape) -> list[Dim]:
    given = at(args, 0, tuple(range(len(x.shape))))
    given = given if isinstance(given, tuple | list) else (given,)
    drop, local = {shape_dim(d, len(x.shape)) for d in given}, ctx.local(x)
    return [dim for d, dim in enumerate(dims_of(x)) if d not in drop or local[d] != 1]


def expand_dims(ctx: InferContext, x: TensorType, args: Args, out: Shape) -> list[Dim]:
    result: list[Dim] = [(n, ()) for n in out]
    for d, target in enumerate(aligned(ctx.local(x), out)):
        if isinstance(target, int):
            result[target] = (x.shape[d], x.spec[d])
    return result


def cut_dim(ctx: InferContext, x: TensorType, dim: int, rows: int) -> list[Dim]:
    """Dims of ``x`` when each rank keeps ``rows`` rows of its own shard of ``dim``."""
    dims, ranks = dims_of(x), group_size(ctx.mesh, x.spec[dim])
    even = x.shape[dim] % ranks == 0
    dims[dim] = (rows * ranks, x.spec[dim]) if even else (rows, ())
    return dims


def slice_dims(ctx: InferContext, x: TensorType, args: Args, out: Shape) -> list[Dim]:
    dim = shape_dim(at(args, 0, 0), len(x.shape))
    start, stop, step = at(args, 1), at(args, 2), at(args, 3, 1)
    largest = x.local_shape(ctx.mesh, ctx.mesh.origin)[dim]
    if start in (None, 0) and (stop is None or stop >= largest) and step == 1:
        return dims_of(x)
    return cut_dim(ctx, x, dim, out[dim])


def split_dims(ctx: InferContext, x: TensorType, args: Args, out: Shape) -> list[Dim]:
    dim = shape_dim(at(args, 1, 0), len(x.shape))
    return cut_dim(ctx, x, dim, out[dim])


def select_dims(ctx: InferContext, x: TensorType, args: Args, out: Shape) -> list[Dim]:
    dim = shape_dim(at(args, 0, 0), len(x.shape))
    return [kept for d, kept in enumerate(dims_of(x)) if d != dim]


def repeat_dims(ctx: InferContext, x: TensorType, args: Args, out: Shape) -> list[Dim]:
    counts, skip = args[0], len(out) - len(x.shape)
    return [
        (x.shape[d - skip], x.spec[d - skip]) if d >= skip and counts[d] == 1 else (out[d], ())
        for d in range(len(out))
    ]


class View(Op):
    """A rearrangement of one value's elements: ``view f32[8/tp, 4, 2] -> f32[8/tp, 8]``.

    Dims that pass through keep their split, and sums still due stay due. Slices of a split dim take
    the same rows of every shard.
    """

    def __init__(self, name: str, dims: DimRule, function: Function) -> None:
        super().__init__(name)
        self.dims = dims
        self.function = function

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        x: TensorType = args[0]
        if x.is_replicated:
            return tuple(TensorType(local.dtype, local.shape) for local in locals)
        rest = (*args[1:], *attrs.values())
        return tuple(
            redimmed(ctx, x, self.dims(ctx, x, rest, local.shape), local) for local in locals
        )

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        outs: list[PerRank] = [[] for _ in node.outputs]
        rest = (*args[1:], *attrs.values())
        for coord, array in zip(coordinates(mesh), args[0], strict=True):
            shapes = [value.type.local_shape(mesh, coord) for value in node.outputs]
            for out, piece in zip(outs, self.function(array, rest, shapes), strict=True):
                out.append(piece)
        return outs


class Join(Op):
    """Values joined along a dim: ``cat f32[8, 4/tp], f32[2, 4/tp] -> f32[10, 4/tp]``.

    Along a split dim every rank joins its own shards, which must be split alike and evenly to stay
    split.
    """

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        (local,), parts = locals, list(tensors(args[:1]))
        dim = shape_dim(at(args, 1, attrs.get("dim", 0)), len(local.shape))
        links: list[Sequence[Link]]
        if self.name == "stack":
            links = [[d + (d >= dim) for d in range(len(t.shape))] for t in parts]
        else:
            if len({t.spec[dim:] and t.spec[dim] for t in parts}) == 1 and parts[0].spec[dim]:
                return (self._join_shards(ctx, parts, dim, local),)
            links = [[None if d == dim else d for d in range(len(t.shape))] for t in parts]
        return (propagate(self.name, ctx, parts, links, local, (tuple(range(len(parts))),)),)

    def _join_shards(
        self, ctx: InferContext, parts: list[TensorType], dim: int, local: Local
    ) -> TensorType:
        """Parts all split alike on the joined dim, seen as dims of the output's size."""
        ranks = group_size(ctx.mesh, parts[0].spec[dim])
        even = all(t.shape[dim] % ranks == 0 for t in parts)
        size = local.shape[dim] * ranks
        links = [[None if d == dim and not even else d for d in range(len(t.shape))] for t in parts]
        grown = [t.with_dim(dim, size, t.spec[dim]) for t in parts]
        return propagate(self.name, ctx, grown, links, local, (tuple(range(len(parts))),))

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        join = np.stack if self.name == "stack" else np.concatenate
        dim, by_rank = at(args, 1, attrs.get("dim", 0)), zip(*args[0], strict=True)
        return [[join(arrays, axis=dim) for arrays in by_rank]]


def to_slice(x: np.ndarray, args: Args) -> np.ndarray:
    index = [slice(None)] * x.ndim
    index[at(args, 0, 0)] = slice(at(args, 1), at(args, 2), at(args, 3, 1))
    return x[tuple(index)]


def to_parts(x: np.ndarray, args: Args) -> list[np.ndarray]:
    dim, rows = at(args, 1, 0), args[0]
    cuts = range(rows, x.shape[dim], rows or 1) if isinstance(rows, int) else accumulate(rows[:-1])
    return np.split(x, list(cuts), dim)


PERMUTE: tuple[DimRule, Function] = (
    permute_dims,
    lambda x, args, shapes: [x.transpose(permutation(x.ndim, args))],
)
KEEP: DimRule = lambda ctx, x, args, out: dims_of(x)  # noqa: E731
RESHAPE: tuple[DimRule, Function] = (reshape_dims, lambda x, args, shapes: [x.reshape(shapes[0])])
SPLIT: tuple[DimRule, Function] = (split_dims, lambda x, args, shapes: to_parts(x, args))
RULES: dict[str, tuple[DimRule, Function]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), RESHAPE),
    **dict.fromkeys(("t", "transpose", "permute"), PERMUTE),
    **dict.fromkeys(("split", "split_with_sizes"), SPLIT),
    "unsqueeze": (unsqueeze_dims, lambda x, args, shapes: [x.reshape(shapes[0])]),
    "squeeze": (squeeze_dims, lambda x, args, shapes: [x.reshape(shapes[0])]),
    "expand": (expand_dims, lambda x, args, shapes: [np.broadcast_to(x, shapes[0])]),
    "slice": (slice_dims, lambda x, args, shapes: [to_slice(x, args)]),
    "select": (select_dims, lambda x, args, shapes: [np.take(x, args[1], axis=args[0])]),
    "unbind": (select_dims, lambda x, args, shapes: list(np.moveaxis(x, at(args, 0, 0), 0))),
    "flip": (KEEP, lambda x, args, shapes: [np.flip(x, tuple(args[0]))]),
    "roll": (
        KEEP,
        lambda x, args, shapes: [np.roll(x, tuple(args[0]), tuple(at(args, 1, ())) or None)],
    ),
    "repeat": (repeat_dims, lambda x, args, shapes: [np.tile(x, tuple(args[0]))]),
}
VIEWS: dict[str, Op] = {
    **{name: View(name, dims, function) for name, (dims, function) in RULES.items()},
    "cat": Join("cat"),
    "stack": Join("stack"),
}
"""Every rearranging op by ATen name."""
