"""reduce_scatter: the sum over ranks, each rank keeping its share."""

from iris.graph.ops.base import Attrs, InferContext, Locals, PerRank, register
from iris.graph.ops.groups import Collective, cut, group_dim, reduce_arrays, reduced
from iris.graph.ops.rules import axes_of, shard_sizes
from iris.graph.types import Mesh, TensorType


@register
class ReduceScatter(Collective):
    """Reduce over ``axis`` and split ``dim`` over it: ``f32[8, 4]+tp -> f32[8/tp, 4]``.

    Uneven splits follow torch.chunk. Split or varying values are reduced elementwise, shard by
    shard.
    """

    name = "reduce_scatter"

    def type_rule(
        self, ctx: InferContext, x: TensorType, axes: tuple[str, ...], attrs: Attrs, locals: Locals
    ) -> TensorType:
        dim = group_dim(self.name, ctx, x, attrs, "dim")
        total = reduced(self.name, ctx, x, axes, attrs.get("op", "sum"))
        return total.with_dim(dim, total.shape[dim], (*total.spec[dim], *axes))

    def exchange(self, x: PerRank, attrs: Attrs, mesh: Mesh) -> PerRank:
        dim, total = attrs["dim"], reduce_arrays(x, attrs.get("op", "sum"))
        return cut(total, shard_sizes(total.shape[dim], mesh, axes_of(attrs["axis"])), dim)
