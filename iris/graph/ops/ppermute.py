"""ppermute: values move between ranks along given pairs."""

from dataclasses import replace

import numpy as np

from iris.graph.ops.base import Attrs, InferContext, Locals, PerRank, register
from iris.graph.ops.groups import Collective, reject_partial, without_axes
from iris.graph.ops.rules import group_size, refuse
from iris.graph.types import Mesh, TensorType


@register
class Ppermute(Collective):
    """Send the value of rank src to rank dst for every pair: ``f32[8/tp] -> f32[8/tp]``.

    A rank that is no pair's destination gets zeros. A source may occur twice, a destination only
    once. A permutation of all ranks keeps a sum that is due over just these ranks.
    """

    name = "ppermute"

    def type_rule(
        self, ctx: InferContext, x: TensorType, axes: tuple[str, ...], attrs: Attrs, locals: Locals
    ) -> TensorType:
        perm, size = attrs["perm"], group_size(ctx.mesh, axes)
        targets = [dst for _, dst in perm]
        if len(set(targets)) < len(targets) or not all(0 <= r < size for p in perm for r in p):
            refuse(
                ctx,
                [x],
                f"ppermute: perm={perm} does not pair ranks of a group of {size}",
                help=f"pairs (src, dst) of ranks from 0 to {size - 1}, every dst once",
            )
        without_axes(self.name, ctx, x, axes)  # shards must be of one size
        full = len(targets) == size and len({src for src, _ in perm}) == size
        alike = all(map(x.replicated_over, axes)) or set(axes) <= set(x.partial)
        if full and alike:
            return x
        reject_partial(self.name, ctx, x, axes)
        lost = (axis for axis in axes if axis not in x.split_axes)
        return replace(x, varying=(*x.varying, *lost))

    def exchange(self, x: PerRank, attrs: Attrs, mesh: Mesh) -> PerRank:
        out = [np.zeros_like(array) for array in x]
        for src, dst in attrs["perm"]:
            out[dst] = x[src]
        return out
