"""ppermute: values move between ranks along given pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from iris.graph.nodes import Node
from iris.graph.ops.base import Effect, InferContext, Local, Op, PerRank, TypedArg, register
from iris.graph.ops.groups import group_axes, per_group, reject_partial, without_axes
from iris.graph.ops.rules import axes_of, group_size, refuse
from iris.graph.types import Mesh, TensorType


@register
class Ppermute(Op):
    """Send the value of rank src to rank dst for every pair: ``f32[8/tp] -> f32[8/tp]``.

    A rank that is no pair's destination gets zeros. A source may occur twice, a destination only
    once. A permutation of all ranks keeps a sum that is due over just these ranks.
    """

    name = "ppermute"
    effects = frozenset({Effect.COMMUNICATES})

    def infer(
        self,
        ctx: InferContext,
        args: Sequence[TypedArg],
        attrs: Mapping[str, TypedArg],
        locals: Sequence[Local],
    ) -> tuple[TensorType, ...]:
        x, axes, perm = args[0], group_axes(self.name, ctx, attrs), attrs["perm"]
        size = group_size(ctx.mesh, axes)
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
            return (x,)
        reject_partial(self.name, ctx, x, axes)
        lost = (axis for axis in axes if axis not in x.split_axes)
        return (replace(x, varying=(*x.varying, *lost)),)

    def reference(
        self, node: Node, args: Sequence[Any], attrs: Mapping[str, Any], mesh: Mesh
    ) -> list[PerRank]:
        def permute(x: PerRank) -> PerRank:
            out = [np.zeros_like(array) for array in x]
            for src, dst in attrs["perm"]:
                out[dst] = x[src]
            return out

        return [per_group(mesh, axes_of(attrs["axis"]), args[0], permute)]
