"""all_gather: every rank gets all shards."""

import numpy as np

from iris.graph.ops.base import Attrs, InferContext, Local, Locals, PerRank, register
from iris.graph.ops.groups import Collective, group_dim, reject_partial
from iris.graph.ops.rules import group_size, refuse, settle, shard_sizes
from iris.graph.types import Mesh, TensorType


@register
class AllGather(Collective):
    """Give every rank of ``axis`` the whole of ``dim``: ``f32[8/tp, 4] -> f32[8, 4]``.

    A varying value is stacked as it is: ``f32[2, 4]~tp -> f32[8, 4]`` on four ranks; or, where the
    program said how many rows there are and this rank has its shard of them, to just those rows.
    """

    name = "all_gather"

    def type_rule(
        self, ctx: InferContext, x: TensorType, axes: tuple[str, ...], attrs: Attrs, locals: Locals
    ) -> TensorType:
        dim = group_dim(self.name, ctx, x, attrs, "dim")
        reject_partial(self.name, ctx, x, axes)
        inner = x.spec[dim][len(x.spec[dim]) - len(axes) :]
        if inner == axes:
            return x.with_dim(dim, x.shape[dim], x.spec[dim][: -len(axes)])
        self._check_varying(ctx, x, axes, dim)
        size, shape = group_size(ctx.mesh, axes), ctx.local(x)
        rows = self._rows(ctx, axes, shape[dim], locals[0].shape[dim] if locals else None)
        stacked = (*shape[:dim], rows, *shape[dim + 1 :])
        dims = [*zip(x.shape, x.spec, strict=True)]
        dims[dim] = (rows if rows != shape[dim] * size else x.shape[dim] * size, x.spec[dim])
        lost = set(x.varying) - set(axes)
        return settle(ctx, dims, Local(x.dtype, stacked), x.partial, lost)

    def _rows(self, ctx: InferContext, axes: tuple[str, ...], held: int, told: int | None) -> int:
        """Rows after a gather: ``told``, if of those this rank's shard is what it held."""
        if told is not None and told != held * group_size(ctx.mesh, axes):
            index = 0
            for axis in axes:
                index = index * ctx.mesh.size(axis) + ctx.coord[axis]
            if shard_sizes(told, ctx.mesh, axes)[index] == held:
                return told
        return held * group_size(ctx.mesh, axes)

    def _check_varying(
        self, ctx: InferContext, x: TensorType, axes: tuple[str, ...], dim: int
    ) -> None:
        """The value must differ over ``axes`` in a way that gathering ``dim`` undoes."""
        if set(axes) <= set(x.varying):
            return
        over = " and ".join(map(repr, axes))
        if set(axes) <= {*x.spec[dim], *x.varying}:
            refuse(
                ctx,
                [x],
                f"all_gather: dim {dim} of {x} is split over more than {over}, and not innermost",
                help=f"gather over {x.spec[dim]} in one call, or over the last of them first",
            )
        refuse(
            ctx,
            [x],
            f"all_gather: dim {dim} of {x} is not split over {over}",
            help="drop this all_gather, or gather a dim written `n/axis` in the type",
        )

    def exchange(self, x: PerRank, attrs: Attrs, mesh: Mesh) -> PerRank:
        return [np.concatenate(x, axis=attrs["dim"])] * len(x)
