"""all_to_all: rank i's chunk j goes to rank j."""

from dataclasses import replace

import numpy as np

from iris.graph.ops.base import Attrs, InferContext, Locals, PerRank, register
from iris.graph.ops.groups import Collective, cut, group_dim, without_axes
from iris.graph.ops.rules import axes_of, group_size, refuse, shard_sizes
from iris.graph.types import Mesh, TensorType


@register
class AllToAll(Collective):
    """Move a split from one dim to another: ``f32[8/tp, 4] -> f32[8, 4/tp]``.

    That is ``split_dim=1, concat_dim=0``. On any other value each rank sends chunk j of
    ``split_dim`` to rank j and stacks what it gets along ``concat_dim``; where the two are one dim
    the result varies, and it must divide.
    """

    name = "all_to_all"

    def type_rule(
        self, ctx: InferContext, x: TensorType, axes: tuple[str, ...], attrs: Attrs, locals: Locals
    ) -> TensorType:
        split = group_dim(self.name, ctx, x, attrs, "split_dim")
        concat = group_dim(self.name, ctx, x, attrs, "concat_dim")
        inner = x.spec[concat][len(x.spec[concat]) - len(axes) :]
        if inner == axes and split != concat and not x.spec[split]:
            x = x.with_dim(concat, x.shape[concat], x.spec[concat][: -len(axes)])
            return x.with_dim(split, x.shape[split], axes)
        local, size = without_axes(self.name, ctx, x, axes), group_size(ctx.mesh, axes)
        if split != concat and not local.spec[split]:
            local = local.with_dim(concat, local.shape[concat] * size, local.spec[concat])
            return local.with_dim(split, local.shape[split], axes)
        if local.spec[split] or local.shape[split] % size:
            refuse(
                ctx,
                [x],
                f"all_to_all: dim {split} does not divide into {size} equal chunks",
                help=f"pad dim {split} to a multiple of {size}, or choose another split_dim",
            )
        local = local.with_dim(split, local.shape[split] // size, ())
        local = local.with_dim(concat, local.shape[concat] * size, local.spec[concat])
        varying = (*local.varying, *axes)
        return replace(local, varying=varying)

    def exchange(self, x: PerRank, attrs: Attrs, mesh: Mesh) -> PerRank:
        split, concat = attrs["split_dim"], attrs["concat_dim"]
        axes = axes_of(attrs["axis"])
        chunks = [cut(a, shard_sizes(a.shape[split], mesh, axes), split) for a in x]
        return [np.concatenate([row[j] for row in chunks], concat) for j in range(len(x))]
