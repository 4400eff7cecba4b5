"""Scaled dot-product attention, whichever of ATen's kernels was traced."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from iris.graph.nodes import Node
from iris.graph.ops.base import Args, Attrs, Effect, InferContext, Locals, Op, PerRank, Types
from iris.graph.ops.rules import Link, own_numbers, propagate, tensors
from iris.graph.types import Mesh, TensorType


class Attention(Op):
    """Attention over ``[batch, heads, rows, width]``: ``f32[2, 8/tp, 5, 4] -> f32[2, 8/tp, 5, 4]``.

    Batch and heads keep their split, rows that of q. Split keys or widths give a varying value, and
    so does dropout.
    """

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        q, k, v, *others = tensors(args, attrs)
        if _split_alike(q, k, v):
            heads: tuple[Link, ...] = (0, 1)
        else:
            heads = (None, None)
        types = []
        for local in locals:
            links: list[Sequence[Link]] = [[None] * len(t.shape) for t in (q, k, v, *others)]
            if len(local.shape) >= 3:
                links[0] = (*heads, 2, None)
                last: Link = None if len(local.shape) == 3 else 3
                links[2] = (None, None, None, last)
            types.append(propagate(self.name, ctx, [q, k, v, *others], links, local))
        return tuple(own_numbers(ctx, t) for t in types) if _drops(args, attrs) else tuple(types)

    def effects_of(self, node: Node) -> frozenset[Effect]:
        return frozenset({Effect.RANDOM}) if _drops(node.args, node.kwargs) else self.effects

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        causal = attrs.get("is_causal", next((a for a in args[3:] if isinstance(a, bool)), False))
        mask = attrs.get("attn_mask")
        out: PerRank = []
        lse: PerRank = []
        for rank, (q, k, v) in enumerate(zip(*args[:3], strict=True)):
            scale = attrs.get("scale") or q.shape[-1] ** -0.5
            scores = (q * scale) @ np.repeat(k, q.shape[1] // k.shape[1], 1).swapaxes(-1, -2)
            if mask is not None:
                scores = (
                    np.where(mask[rank], scores, -np.inf)
                    if mask[rank].dtype == bool
                    else scores + mask[rank]
                )
            if causal:
                scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -np.inf)
            top = scores.max(-1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(-1, keepdims=True)
            out.append(
                ((weights / total) @ np.repeat(v, q.shape[1] // v.shape[1], 1)).astype(q.dtype)
            )
            lse.append((np.log(total) + top)[..., 0].astype(q.dtype))
        return [out, lse][: len(node.outputs)]


def _drops(args: Sequence[Any], attrs: Mapping[str, Any]) -> bool:
    """Whether the call has a dropout probability: the first float after q, k and v."""
    floats = (arg for arg in args[3:] if isinstance(arg, float))
    return bool(attrs.get("dropout_p", next(floats, 0.0)))


def _split_alike(q: TensorType, k: TensorType, v: TensorType) -> bool:
    """Whether queries, keys and values of the same batch entries and heads are on the same rank."""
    return q.spec[:2] == k.spec[:2] == v.spec[:2]


ATTENTION: dict[str, Op] = {
    name: Attention(name)
    for name in (
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
    )
}
"""Every attention op by ATen name."""
