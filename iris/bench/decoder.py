"""A decoder of the Llama form with random weights, by iris and by its peers: the same shards."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import iris
from iris import P
from iris.bench.peers import OPS, group_name, symmetric
from iris.nn import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelEmbedding,
    ParallelHead,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
)
from iris.nn.attention import attend, rotate

SPREAD = 256  # from so many rows on, rows are split over ranks between matmuls
EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    hidden: int
    inner: int
    heads: int
    layers: int
    kv_heads: int = 8
    width: int = 128
    words: int = 128256


SHAPES = {
    "8B": Shape(4096, 14336, 32, 4),
    "70B": Shape(8192, 28672, 64, 2),
    "32B": Shape(5120, 25600, 64, 2, words=151936),
}


@dataclass(frozen=True)
class Place:
    """This rank among those that share a model; where and of which kind its weights are."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def here(cls, dtype: torch.dtype = torch.bfloat16) -> "Place":
        """All ranks of the context share one model."""
        ctx = iris.current()
        return cls(ctx.cur_rank, ctx.num_ranks, ctx.device, dtype)

    def weight(self, *shape: int, fan_in: int, seed: int) -> Tensor:
        """Normal values that differ by rank and seed, scaled to keep activations near one."""
        number = 1000 * seed + self.rank
        generator = torch.Generator(device=self.device).manual_seed(number)
        made = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        return made.mul_(1 / math.sqrt(fan_in))


class Block(nn.Module):
    """One whole layer: attention and feed-forward, each after its norm."""

    def __init__(self, shape: Shape, place: Place, seed: int) -> None:
        super().__init__()
        K, inner, groups = shape.hidden, shape.inner // place.size, shape.kv_heads // place.size
        queries, width = shape.heads // shape.kv_heads, shape.width

        def column(number: int) -> ColumnParallelLinear:
            weight = place.weight(inner, K, fan_in=K, seed=seed + number)
            return ColumnParallelLinear(weight, None, out_features=shape.inner)

        ones = torch.ones(K, device=place.device, dtype=place.dtype)
        self.norm, self.norm_2 = (RMSNorm.from_weight(ones, EPSILON) for _ in range(2))
        qkv = place.weight(groups, (queries + 2) * width, K, fan_in=K, seed=seed)
        rows = queries * width
        out = place.weight(K, groups, rows, fan_in=shape.heads * width, seed=seed + 1)
        self.attention = ParallelAttention(qkv, None, RowParallelLinear(out, None), width=width)
        down = place.weight(K, inner, fan_in=shape.inner, seed=seed + 2)
        self.mlp = ParallelMLP(column(3), RowParallelLinear(down, None), column(4))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x: ``[batch, rows, K]``, or this rank's rows ``[batch * rows / tp, K]``."""
        rows = math.prod(cos.shape[:2]) if x.dim() == 2 else None
        found, new = self.attention(self.norm(x), cos, sin, past, mask)
        x = x + found
        return x + self.mlp(self.norm_2(x), rows), new


class Decoder(nn.Module):
    """Layers, and the two ends split by words."""

    def __init__(self, shape: Shape, place: Place) -> None:
        super().__init__()
        words, K = shape.words // place.size, shape.hidden
        table = place.weight(words, K, fan_in=1, seed=1)
        self.embed = ParallelEmbedding(table, words=shape.words)
        blocks = (Block(shape, place, 10 * n + 2) for n in range(shape.layers))
        self.blocks = nn.ModuleList(blocks)
        ones = torch.ones(K, device=place.device, dtype=place.dtype)
        self.norm = RMSNorm.from_weight(ones, EPSILON)
        head = place.weight(words, K, fan_in=K, seed=9)
        self.head = ParallelHead(head, None, out_features=shape.words)

    def forward(
        self, ids: Tensor, cos: Tensor, sin: Tensor, past: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """This rank's words of the last row's logits, and the new keys and values."""
        (batch, rows), held = ids.shape, []
        spread = batch * rows >= SPREAD
        x = self.embed(ids.flatten() if spread else ids, spread)
        for index, block in enumerate(self.blocks):
            x, new = block(x, cos, sin, None if past is None else past[index], mask)
            held.append(new)
        if spread:
            x = iris.all_gather(x, "tp", 0, size=batch * rows).view(batch, rows, -1)
        return self.head(self.norm(x[:, -1])), torch.stack(held)


@dataclass(frozen=True)
class Inputs:
    """What one step is called with: ``x`` are tokens, or activations of one layer."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    past: Tensor | None
    mask: Tensor | None

    @classmethod
    def of(
        cls, shape: Shape, place: Place, batch: int, rows: int, held: int, layers: int
    ) -> "Inputs":
        """A step of ``rows`` rows after ``held`` earlier ones, in a cache of twice as many;
        ``layers`` is 0 for one layer alone. The same on every rank but for the cache.
        """
        device, dtype = place.device, place.dtype
        generator = torch.Generator(device=device).manual_seed(7)
        if layers:
            size = (batch, rows)
            x = torch.randint(0, shape.words, size, generator=generator, device=device)
        else:
            x = torch.randn(batch, rows, shape.hidden, generator=generator, device=device).to(dtype)
        places = torch.arange(held, held + rows, device=device)[:, None].float()
        steps = torch.arange(0, shape.width, 2, device=device).float() / shape.width
        angles = torch.cat(2 * [places * 500000.0**-steps], -1).expand(batch, -1, -1)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        if not held:
            return cls(x, cos, sin, None, None)
        groups = shape.kv_heads // place.size
        cache = place.weight(
            *(max(layers, 1), 2, batch, groups, 2 * held, shape.width), fan_in=1, seed=8
        )
        mask = torch.zeros(batch, 1, rows, 2 * held + rows, device=device, dtype=dtype)
        mask[..., held : 2 * held] = torch.finfo(dtype).min
        return cls(x, cos, sin, cache if layers else cache[0], mask)

    @property
    def args(self) -> tuple[Any, ...]:
        return self.x, self.cos, self.sin, self.past, self.mask


def program(module: nn.Module, inputs: Inputs, by_rows: bool = False) -> Callable[..., Any]:
    """``module`` as one program of such inputs; ``by_rows``: x is this rank's rows."""
    layer = isinstance(module, Block)
    specs: dict[str, Any] = {name: P() for name in ("cos", "sin", "mask")}
    specs["x" if layer else "ids"] = P("tp", None) if by_rows else P()
    if inputs.past is not None:
        specs["past"] = P(*(None,) * (2 if layer else 3), "tp")
    decorated = iris.spmd(in_specs=specs, outputs="reuse", name=type(module).__name__)
    bound: Callable[..., Any] = decorated(type(module).forward).__get__(module)
    return bound


class Peer:
    """The same modules' weights in plain torch; sums by ``how``.

    ``how``: "one-shot" or "two-shot" (torch's symmetric memory), "alone" (nobody to sum with), or
    "exact" (all in fp32: what the others are compared with).
    """

    def __init__(self, module: nn.Module, place: Place, how: str, rows: int, hidden: int) -> None:
        self.module, self.place, self.how = module, place, how
        if how in ("one-shot", "two-shot"):
            self.shared = symmetric(rows, hidden, dtype=place.dtype)[0]

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Decoder.forward` and :meth:`Block.forward`; rows are never split."""
        cos, sin = self._own(cos), self._own(sin)
        if not isinstance(self.module, Decoder):
            return self._block(self.module, self._own(x), cos, sin, past, mask)
        model, held = self.module, []
        x = self._embedded(model.embed, x)
        for index, block in enumerate(model.blocks):
            x, new = self._block(block, x, cos, sin, None if past is None else past[index], mask)
            held.append(new)
        return F.linear(self._norm(model.norm, x[:, -1]), self._own(model.head.weight)), (
            torch.stack(held)
        )

    def _own(self, weight: Tensor) -> Tensor:
        return weight.float() if self.how == "exact" else weight

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, norm.normalized_shape, self._own(norm.weight), norm.eps)

    def _embedded(self, embed: Any, ids: Tensor) -> Tensor:
        here = ids - self.place.rank * len(embed.weight)
        known = (here >= 0) & (here < len(embed.weight))
        found = F.embedding(here.clamp(0, len(embed.weight) - 1), embed.weight)
        return self._sum(self._own(torch.where(known.unsqueeze(-1), found, 0.0)))

    def _block(
        self, block: Any, x: Tensor, cos: Tensor, sin: Tensor, past: Any, mask: Any
    ) -> tuple[Tensor, Tensor]:
        part = block.attention
        batch, rows, groups = *x.shape[:2], len(part.qkv)
        qkv = F.linear(self._norm(block.norm, x), self._own(part.qkv.flatten(0, 1)))
        qkv = qkv.view(batch, rows, groups, -1, part.width).permute(0, 2, 3, 1, 4)
        turned = rotate(qkv[:, :, :-1], cos, sin)
        q, k, v = turned[:, :, :-1], turned[:, :, -1], qkv[:, :, -1]
        before = None if past is None else self._own(past)
        found = attend(q, k, v, part.scale, before, mask)
        joined = found.permute(0, 3, 1, 2, 4).reshape(batch, rows, -1)
        x = x + self._product(joined, self._own(part.out.weight.flatten(1)))
        h, mlp = self._norm(block.norm_2, x), block.mlp
        h = F.silu(F.linear(h, self._own(mlp.gate.weight))) * F.linear(h, self._own(mlp.up.weight))
        return x + self._product(h, self._own(mlp.down.weight)), torch.stack((k, v))

    def _product(self, x: Tensor, w: Tensor) -> Tensor:
        if not hasattr(self, "shared"):
            return self._sum(F.linear(x, w))
        torch.mm(x.flatten(0, 1), w.t(), out=self.shared)
        return self._summed().view(*x.shape[:-1], -1)

    def _sum(self, part: Tensor) -> Tensor:
        if self.how == "alone" or self.place.size == 1:
            return part
        if self.how == "exact":
            return iris.all_reduce(part.contiguous())
        self.shared.copy_(part.flatten(0, 1))
        return self._summed().view(part.shape).clone()

    def _summed(self) -> Tensor:
        """The sum of what is in symmetric memory; it may lie there itself."""
        flat = self.shared.view(-1)
        one_shot, two_shot = OPS.one_shot_all_reduce, OPS.two_shot_all_reduce_
        total: Tensor = (one_shot if self.how == "one-shot" else two_shot)(
            flat, "sum", group_name()
        )
        return total


def is_close(found: Tensor, want: Tensor) -> bool:
    """Within what bf16 operands cost over some layers, in the 2-norm."""
    error = (found.float() - want.float()).norm() / want.float().norm()
    return bool(error < 3e-2)


def nbytes(module: nn.Module) -> int:
    """Bytes of this rank's weights."""
    return sum(weight.nbytes for weight in module.parameters())


def rows_of(x: Tensor, place: Place) -> Tensor:
    """This rank's rows of an activation ``[batch, rows, K]``."""
    return x.flatten(0, 1).chunk(place.size)[place.rank].contiguous()
