"""broadcast: one rank's value for all."""

from iris.graph.ops.base import Attrs, InferContext, Locals, PerRank, register
from iris.graph.ops.groups import Collective, reject_partial, without_axes
from iris.graph.ops.rules import group_size, refuse
from iris.graph.types import Mesh, TensorType


@register
class Broadcast(Collective):
    """Give every rank of ``axis`` what rank ``src`` of it holds: ``f32[8, 4]~tp -> f32[8, 4]``."""

    name = "broadcast"

    def type_rule(
        self, ctx: InferContext, x: TensorType, axes: tuple[str, ...], attrs: Attrs, locals: Locals
    ) -> TensorType:
        src, size = attrs.get("src", 0), group_size(ctx.mesh, axes)
        if not 0 <= src < size:
            refuse(
                ctx,
                [x],
                f"broadcast: src={src} in a group of {size} ranks",
                help=f"src counts ranks of the group, from 0 to {size - 1}",
            )
        reject_partial(self.name, ctx, x, axes)
        return without_axes(self.name, ctx, x, axes)

    def exchange(self, x: PerRank, attrs: Attrs, mesh: Mesh) -> PerRank:
        return [x[attrs.get("src", 0)]] * len(x)
