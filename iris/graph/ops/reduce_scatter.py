"""reduce_scatter: the sum over ranks, each rank keeping its share."""

from collections.abc import Mapping, Sequence
from typing import Any

from iris.graph.nodes import Node
from iris.graph.ops.base import Effect, InferContext, Local, Op, PerRank, TypedArg, register
from iris.graph.ops.groups import cut, group_axes, group_dim, per_group, reduce_arrays, reduced
from iris.graph.ops.rules import axes_of, shard_sizes
from iris.graph.types import Mesh, TensorType


@register
class ReduceScatter(Op):
    """Reduce over ``axis`` and split ``dim`` over it: ``f32[8, 4]+tp -> f32[8/tp, 4]``.

    Uneven splits follow torch.chunk. Split or varying values are reduced elementwise, shard by
    shard.
    """

    name = "reduce_scatter"
    effects = frozenset({Effect.COMMUNICATES})

    def infer(
        self,
        ctx: InferContext,
        args: Sequence[TypedArg],
        attrs: Mapping[str, TypedArg],
        locals: Sequence[Local],
    ) -> tuple[TensorType, ...]:
        x, axes = args[0], group_axes(self.name, ctx, attrs)
        dim = group_dim(self.name, ctx, x, attrs, "dim")
        total = reduced(self.name, ctx, x, axes, attrs.get("op", "sum"))
        return (total.with_dim(dim, total.shape[dim], (*total.spec[dim], *axes)),)

    def reference(
        self, node: Node, args: Sequence[Any], attrs: Mapping[str, Any], mesh: Mesh
    ) -> list[PerRank]:
        axes, dim = axes_of(attrs["axis"]), attrs["dim"]

        def scatter(parts: PerRank) -> PerRank:
            total = reduce_arrays(parts, attrs.get("op", "sum"))
            return cut(total, shard_sizes(total.shape[dim], mesh, axes), dim)

        return [per_group(mesh, axes, args[0], scatter)]
