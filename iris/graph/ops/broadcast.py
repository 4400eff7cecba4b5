"""broadcast: one rank's value for all."""

from collections.abc import Mapping, Sequence
from typing import Any

from iris.graph.nodes import Node
from iris.graph.ops.base import Effect, InferContext, Local, Op, PerRank, TypedArg, register
from iris.graph.ops.groups import group_axes, per_group, reject_partial, without_axes
from iris.graph.ops.rules import axes_of, group_size, refuse
from iris.graph.types import Mesh, TensorType


@register
class Broadcast(Op):
    """Give every rank of ``axis`` what rank ``src`` of it holds: ``f32[8, 4]~tp -> f32[8, 4]``."""

    name = "broadcast"
    effects = frozenset({Effect.COMMUNICATES})

    def infer(
        self,
        ctx: InferContext,
        args: Sequence[TypedArg],
        attrs: Mapping[str, TypedArg],
        locals: Sequence[Local],
    ) -> tuple[TensorType, ...]:
        x, axes, src = args[0], group_axes(self.name, ctx, attrs), attrs.get("src", 0)
        size = group_size(ctx.mesh, axes)
        if not 0 <= src < size:
            refuse(
                ctx,
                [x],
                f"broadcast: src={src} in a group of {size} ranks",
                help=f"src counts ranks of the group, from 0 to {size - 1}",
            )
        reject_partial(self.name, ctx, x, axes)
        return (without_axes(self.name, ctx, x, axes),)

    def reference(
        self, node: Node, args: Sequence[Any], attrs: Mapping[str, Any], mesh: Mesh
    ) -> list[PerRank]:
        def spread(x: PerRank) -> PerRank:
            return [x[attrs.get("src", 0)]] * len(x)

        return [per_group(mesh, axes_of(attrs["axis"]), args[0], spread)]
