"""all_reduce: the sum over ranks, on all of them."""

from iris.graph.ops.base import Attrs, InferContext, Locals, PerRank, register
from iris.graph.ops.groups import Collective, reduce_arrays, reduced
from iris.graph.types import Mesh, TensorType


@register
class AllReduce(Collective):
    """Reduce elementwise over ``axis``: ``f32[8, 4]+tp -> f32[8, 4]``.

    Of a split value it adds the shards up: ``f32[8/tp, 4] -> f32[2, 4]`` on four ranks.
    """

    name = "all_reduce"

    def type_rule(
        self, ctx: InferContext, x: TensorType, axes: tuple[str, ...], attrs: Attrs, locals: Locals
    ) -> TensorType:
        return reduced(self.name, ctx, x, axes, attrs.get("op", "sum"))

    def exchange(self, x: PerRank, attrs: Attrs, mesh: Mesh) -> PerRank:
        return [reduce_arrays(x, attrs.get("op", "sum"))] * len(x)
