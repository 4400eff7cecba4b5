"""axis_index: where a rank stands."""

import numpy as np

from iris.graph.nodes import Node
from iris.graph.ops.base import Args, Attrs, InferContext, Locals, Op, PerRank, Types, register
from iris.graph.ops.groups import group_axes, groups
from iris.graph.ops.rules import axes_of
from iris.graph.types import Mesh, TensorType


@register
class AxisIndex(Op):
    """This rank's index along ``axis``, a scalar: ``-> i64[]~tp``."""

    name = "axis_index"

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        return (TensorType("i64", (), varying=group_axes(self.name, ctx, attrs)),)

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        index = {
            rank: np.asarray(place, np.int64)
            for ranks in groups(mesh, axes_of(attrs["axis"]))
            for place, rank in enumerate(ranks)
        }
        return [[index[rank] for rank in sorted(index)]]
