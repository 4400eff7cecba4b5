"""What the collectives share: groups of ranks over mesh axes, in types and in the reference."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np

from iris.graph.nodes import Node
from iris.graph.ops.base import Args, Attrs, Effect, InferContext, Locals, Op, PerRank, Types
from iris.graph.ops.rules import Dim, axes_of, group_size, operand_names, refuse, shape_dim
from iris.graph.types import Mesh, TensorType

REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
}
"""Reduce ops. ``avg`` divides the sum by the group's size; of integers it rounds toward zero."""


class Collective(Op):
    """Base of the ops over a group of ranks: what one group exchanges is what they differ in."""

    effects = frozenset({Effect.COMMUNICATES})

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        axes = group_axes(self.name, ctx, attrs)
        return (self.type_rule(ctx, args[0], axes, attrs, locals),)

    def type_rule(
        self, ctx: InferContext, x: TensorType, axes: tuple[str, ...], attrs: Attrs, locals: Locals
    ) -> TensorType:
        """Type of the result for operand ``x``."""
        raise NotImplementedError

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        exchange = partial(self.exchange, attrs=attrs, mesh=mesh)
        return [per_group(mesh, axes_of(attrs["axis"]), args[0], exchange)]

    def exchange(self, x: PerRank, attrs: Attrs, mesh: Mesh) -> PerRank:
        """Results of one group's ranks, in group order."""
        raise NotImplementedError


def coordinates(mesh: Mesh) -> list[dict[str, int]]:
    """The coordinate of every rank, in rank order (row-major over the mesh axes)."""
    places = itertools.product(*(range(size) for _, size in mesh.axes))
    return [dict(zip(mesh.names, place, strict=True)) for place in places]


def groups(mesh: Mesh, axes: Sequence[str]) -> list[tuple[int, ...]]:
    """Ranks of every group over ``axes``, each in group order (first axis slowest)."""
    table: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for rank, coord in enumerate(coordinates(mesh)):
        rest = tuple(coord[name] for name in mesh.names if name not in axes)
        table.setdefault(rest, []).append((tuple(coord[axis] for axis in axes), rank))
    return [tuple(rank for _, rank in sorted(members)) for members in table.values()]


def group_axes(op: str, ctx: InferContext, attrs: Attrs) -> tuple[str, ...]:
    """The checked ``axis`` argument of a collective."""
    axes = axes_of(attrs["axis"])
    unknown = [axis for axis in axes if axis not in ctx.mesh.names]
    if unknown or len(set(axes)) < len(axes):
        what = f"the mesh has no axis {unknown[0]!r}" if unknown else f"an axis twice in {axes}"
        refuse(ctx, [], f"{op}: {what}", help=f"axes of this mesh: {ctx.mesh}")
    return axes


def group_dim(op: str, ctx: InferContext, x: TensorType, attrs: Attrs, key: str) -> int:
    """The checked dim argument ``key`` of a collective, counted from the front."""
    dim, ndim = int(attrs[key]), len(x.shape)
    if not -ndim <= dim < ndim:
        help = f"{key} goes from {-ndim} to {ndim - 1}" if ndim else "give the value a dim first"
        refuse(ctx, [x], f"{op}: {key}={dim} of a value with {ndim} dims", help)
    return shape_dim(dim, ndim)


def reject_partial(op: str, ctx: InferContext, x: TensorType, axes: Sequence[str]) -> None:
    """Error where the parts of a sum would be moved instead of added."""
    due = [axis for axis in axes if axis in x.partial]
    if due:
        over = " and ".join(map(repr, due))
        name = operand_names(ctx, [x])[0]
        help = f"all_reduce or reduce_scatter {name} over {over} first"
        refuse(ctx, [x], f"{op}: {name} is a partial sum over {over}", help)


def without_axes(op: str, ctx: InferContext, x: TensorType, axes: Sequence[str]) -> TensorType:
    """``x`` with equal local shapes everywhere on ``axes``, which split and vary nothing any more.

    That is what an elementwise combination of shards gives. Error if shards differ in size.
    """
    dims: list[Dim] = []
    for dim, (n, names) in enumerate(zip(x.shape, x.spec, strict=True)):
        dropped = [axis for axis in names if axis in axes]
        if dropped and n % group_size(ctx.mesh, names):
            ranks = group_size(ctx.mesh, names)
            help = f"pad dim {dim} to a multiple of {ranks}, or gather it first"
            refuse(ctx, [x], f"{op}: shards differ in size along dim {dim}", help)
        kept = tuple(axis for axis in names if axis not in axes)
        dims.append((n // group_size(ctx.mesh, dropped), kept))
    return replace(
        x,
        shape=tuple(n for n, _ in dims),
        spec=tuple(names for _, names in dims),
        partial=tuple(axis for axis in x.partial if axis not in axes),
        varying=tuple(axis for axis in x.varying if axis not in axes),
    )


def reduced(op: str, ctx: InferContext, x: TensorType, axes: Sequence[str], how: str) -> TensorType:
    """Type of ``x`` after an elementwise reduction over ``axes``: the same on all their ranks."""
    if how not in REDUCTIONS:
        refuse(ctx, [x], f"{op}: no reduce op {how!r}", help=f"one of {', '.join(REDUCTIONS)}")
    if how == "sum":
        known = [axis for axis in axes if x.replicated_over(axis)]
        if known:
            name, over = operand_names(ctx, [x])[0], " and ".join(map(repr, known))
            refuse(
                ctx,
                [x],
                f"{op}: {name} is already the same on every rank of {over}",
                help=f"drop this {op}, or use op='avg'",
                why=f"its sum would be {group_size(ctx.mesh, known)} times too large",
            )
    elif how != "avg":
        reject_partial(op, ctx, x, axes)
    return without_axes(op, ctx, x, axes)


def reduce_arrays(arrays: Sequence[np.ndarray], how: str) -> np.ndarray:
    """The arrays reduced in rank order, in their own dtype."""
    total = np.asarray(reduce(REDUCTIONS[how], arrays), arrays[0].dtype)
    if how == "avg":
        total = np.trunc(total / len(arrays)) if total.dtype.kind in "iu" else total / len(arrays)
    return total.astype(arrays[0].dtype)


def per_group(
    mesh: Mesh, axes: Sequence[str], x: PerRank, fn: Callable[[PerRank], PerRank]
) -> PerRank:
    """``fn`` applied to the arrays of every group, its results handed back by rank."""
    out: PerRank = list(x)
    for ranks in groups(mesh, axes):
        for rank, array in zip(ranks, fn([x[r] for r in ranks]), strict=True):
            out[rank] = array
    return out


def cut(array: np.ndarray, sizes: Sequence[int], dim: int) -> PerRank:
    """``array`` cut along ``dim`` into pieces of these sizes."""
    return np.split(array, list(itertools.accumulate(sizes))[:-1], axis=dim)
