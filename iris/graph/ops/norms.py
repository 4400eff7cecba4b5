"""Normalisations over the last dims."""

from collections.abc import Sequence

import numpy as np

from iris.graph.nodes import Node
from iris.graph.ops.base import Args, Attrs, InferContext, Locals, Op, PerRank, Types
from iris.graph.ops.rules import Link, at, propagate
from iris.graph.types import Mesh, TensorType


class LastDimsNorm(Op):
    """Layer and RMS norms: ``f32[8/tp, 4], (4,), f32[4] -> f32[8/tp, 4], f32[8/tp, 1]``.

    Outer dims keep their split. A split normalised dim gives a varying value: each rank would norm
    its own shard.
    """

    def __init__(self, name: str, centred: bool) -> None:
        super().__init__(name)
        self.centred = centred

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        x, shape = args[:2]
        outer = len(x.shape) - len(shape)
        weights = [arg for arg in args[2:] if isinstance(arg, TensorType)]
        links: list[Sequence[Link]] = [
            [d if d < outer else None for d in range(len(x.shape))],
            *([None] * len(t.shape) for t in weights),
        ]
        return tuple(propagate(self.name, ctx, [x, *weights], links, local) for local in locals)

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        axes = tuple(range(-len(args[1]), 0))
        weight, bias = at(args, 2), at(args, 3) if self.centred else None
        eps = at(args, 4 if self.centred else 3)
        outs: list[PerRank] = [[] for _ in node.outputs]
        for rank, array in enumerate(args[0]):
            x = array.astype(np.float64)
            mean = x.mean(axes, keepdims=True) if self.centred else np.zeros(())
            power = ((x - mean) ** 2).mean(axes, keepdims=True)
            rstd = 1 / np.sqrt(power + (np.finfo(array.dtype).eps if eps is None else eps))
            y = (x - mean) * rstd
            y = y if weight is None else y * weight[rank]
            y = y if bias is None else y + bias[rank]
            results = (y, mean, rstd) if self.centred else (y, rstd)
            for out, result in zip(outs, results, strict=True):
                out.append(result.astype(array.dtype))
        return outs


NORMS: dict[str, Op] = {
    "native_layer_norm": LastDimsNorm("native_layer_norm", centred=True),
    "_fused_rms_norm": LastDimsNorm("_fused_rms_norm", centred=False),
}
"""Every norm by ATen name."""
