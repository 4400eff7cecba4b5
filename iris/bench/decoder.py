"""A decoder of the Llama form with random weights, as a program of iris."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import iris
from iris import P
from iris.nn import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelEmbedding,
    ParallelHead,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
)

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
        """Those of a model, of a layer and of their peers."""
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


def nbytes(module: nn.Module) -> int:
    """Bytes of this rank's weights."""
    return sum(weight.nbytes for weight in module.parameters())


def rows_of(x: Tensor, place: Place) -> Tensor:
    """This rank's rows of an activation ``[batch, rows, K]``."""
    return x.flatten(0, 1).chunk(place.size)[place.rank].contiguous()
