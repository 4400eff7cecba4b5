"""all_reduce: the sum over ranks, on all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from iris.graph.nodes import Node
from iris.graph.ops.base import Effect, InferContext, Local, Op, PerRank, TypedArg, register
from iris.graph.ops.groups import group_axes, per_group, reduce_arrays, reduced
from iris.graph.ops.rules import axes_of
from iris.graph.types import Mesh, TensorType


@register
class AllReduce(Op):
    """Reduce elementwise over ``axis``: ``f32[8, 4]+tp -> f32[8, 4]``.

    Of a split value it adds the shards up: ``f32[8/tp, 4] -> f32[2, 4]`` on four ranks.
    """

    name = "all_reduce"
    effects = frozenset({Effect.COMMUNICATES})

    def infer(
        self,
        ctx: InferContext,
        args: Sequence[TypedArg],
        attrs: Mapping[str, TypedArg],
        locals: Sequence[Local],
    ) -> tuple[TensorType, ...]:
        axes = group_axes(self.name, ctx, attrs)
        return (reduced(self.name, ctx, args[0], axes, attrs.get("op", "sum")),)

    def reference(
        self, node: Node, args: Sequence[Any], attrs: Mapping[str, Any], mesh: Mesh
    ) -> list[PerRank]:
        def total(parts: PerRank) -> PerRank:
            return [reduce_arrays(parts, attrs.get("op", "sum"))] * len(parts)

        return [per_group(mesh, axes_of(attrs["axis"]), args[0], total)]
