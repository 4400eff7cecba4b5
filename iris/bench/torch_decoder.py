"""The weights of a decoder, or of one layer, in plain torch: what iris is measured against."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import iris
from iris.bench.decoder import Decoder, Place
from iris.bench.peers import OPS, WAIT, group_name, symmetric
from iris.nn.attention import attend, rotate

# How the ranks' parts come together where every rank has all rows, and where rows are split
# between products.
WHOLE = ("one-shot", "two-shot")
SPLIT = ("fused", "low contention")
FEW = 512  # with more rows, a one-shot sum is left out: it moves W times as much


def ways(rows: int, world: int) -> list[str]:
    """The ways of torch for so many rows."""
    few = WHOLE if rows <= FEW else WHOLE[1:]
    return [*few, *(SPLIT if rows % world == 0 else ())]


class Peer:
    """The same modules' weights in plain torch.

    ``how`` is one of `WHOLE` (cuBLAS, then an all-reduce of torch's symmetric memory), or of
    `SPLIT` (torch's products fused with collectives, or cuBLAS with its collectives by copies),
    or "alone" (nobody to sum with), or "exact" or "exact, split" (all in fp32: what the others are
    compared with).
    """

    def __init__(self, module: nn.Module, place: Place, how: str, rows: int, hidden: int) -> None:
        self.module, self.place, self.how = module, place, how
        self.exact, self.split = how.startswith("exact"), how in (*SPLIT, "exact, split")
        if how in WHOLE + SPLIT:
            self.shared = symmetric(rows, hidden, dtype=place.dtype)[0]

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Decoder.forward` and :meth:`Block.forward`; x has all rows, and so has a
        layer's y, but this rank's rows where they are split.
        """
        cos, sin = self._own(cos), self._own(sin)
        if not isinstance(self.module, Decoder):
            size = x.shape
            x, new = self._block(self.module, self._mine(self._own(x)), cos, sin, past, mask)
            return x if self.split else x.view(size), new
        model, held = self.module, []
        x = self._embedded(model.embed, x.flatten())
        for index, block in enumerate(model.blocks):
            x, new = self._block(block, x, cos, sin, None if past is None else past[index], mask)
            held.append(new)
        last = self._gathered(x).view(*cos.shape[:2], -1)[:, -1]
        head = self._own(model.head.weight)
        return F.linear(self._norm(model.norm, last), head), torch.stack(held)

    def _own(self, weight: Tensor) -> Tensor:
        return weight.float() if self.exact else weight

    def _mine(self, x: Tensor) -> Tensor:
        """``x [batch, rows, K]`` as one row of rows, those of this rank where they are split."""
        flat = x.flatten(0, 1)
        return flat.chunk(self.place.size)[self.place.rank] if self.split else flat

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, norm.normalized_shape, self._own(norm.weight), norm.eps)

    def _embedded(self, embed: Any, ids: Tensor) -> Tensor:
        here = ids - self.place.rank * len(embed.weight)
        known = (here >= 0) & (here < len(embed.weight))
        found = F.embedding(here.clamp(0, len(embed.weight) - 1), embed.weight)
        part = self._own(torch.where(known.unsqueeze(-1), found, 0.0))
        if not hasattr(self, "shared"):
            return self._summed(part)
        return self._summed(self.shared.copy_(part)).clone()  # it may lie where the next sum will

    def _block(
        self, block: Any, x: Tensor, cos: Tensor, sin: Tensor, past: Any, mask: Any
    ) -> tuple[Tensor, Tensor]:
        part, mlp = block.attention, block.mlp
        batch, rows, groups = *cos.shape[:2], len(part.qkv)
        (qkv,) = self._columns(self._norm(block.norm, x), part.qkv.flatten(0, 1))
        qkv = qkv.view(batch, rows, groups, -1, part.width).permute(0, 2, 3, 1, 4)
        turned = rotate(qkv[:, :, :-1], cos, sin)
        q, k, v = turned[:, :, :-1], turned[:, :, -1], qkv[:, :, -1]
        before = None if past is None else self._own(past)
        found = attend(q, k, v, part.scale, before, mask)
        joined = found.permute(0, 3, 1, 2, 4).reshape(batch * rows, -1)
        x = x + self._product(joined, part.out.weight.flatten(1))
        gate, up = self._columns(self._norm(block.norm_2, x), mlp.gate.weight, mlp.up.weight)
        return x + self._product(F.silu(gate) * up, mlp.down.weight), torch.stack((k, v))

    def _columns(self, x: Tensor, *weights: Tensor) -> Sequence[Tensor]:
        """Products of all rows with weights whose columns are split."""
        if self.how == "fused":
            turned = [w.t() for w in weights]
            gather = OPS.fused_all_gather_matmul
            found: list[Tensor] = gather(x, turned, 0, group_name(), return_A=False)[1]
            return found
        x = self._gathered(x)
        return [F.linear(x, self._own(w)) for w in weights]

    def _gathered(self, x: Tensor) -> Tensor:
        """All rows."""
        if not self.split:
            return x
        if self.exact:
            return iris.all_gather(x, dim=0)
        gathered: Tensor = WAIT(OPS._low_contention_all_gather(x, group_name()))
        return gathered

    def _product(self, x: Tensor, w: Tensor) -> Tensor:
        """The sum of products with a weight whose rows are split."""
        w = self._own(w).t()
        if self.how == "fused":
            found: Tensor = OPS.fused_matmul_reduce_scatter(x, w, "sum", 0, group_name())
            return found
        return self._summed(torch.mm(x, w, out=getattr(self, "shared", None)))

    def _summed(self, part: Tensor) -> Tensor:
        """The sum of the ranks' parts, which lie in torch's symmetric memory where that sums them:
        all of it, which may lie there too, or this rank's rows.
        """
        if self.how == "alone":
            return part
        if self.exact:
            return iris.reduce_scatter(part, dim=0) if self.split else iris.all_reduce(part)
        total: Tensor
        if self.split:
            total = WAIT(OPS._low_contention_reduce_scatter(part, "sum", group_name()))
            return total
        one_shot, two_shot = OPS.one_shot_all_reduce, OPS.two_shot_all_reduce_
        total = (one_shot if self.how == "one-shot" else two_shot)(
            part.view(-1), "sum", group_name()
        )
        return total.view(part.shape)


def is_close(found: Tensor, want: Tensor) -> bool:
    """Within what bf16 operands cost over some layers, in the 2-norm."""
    error = (found.float() - want.float()).norm() / want.float().norm()
    return bool(error < 3e-2)
