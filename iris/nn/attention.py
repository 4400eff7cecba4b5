"""Grouped-query attention, split over ranks by groups of heads, with rotary positions and a cache
of keys and values.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from iris.errors import SpecError
from iris.nn.linear import RowParallelLinear
from iris.nn.shards import LinearSource, Place, Source, linear_source, parameter
from iris.spmd.collectives import all_gather
from iris.spmd.modules import partition
from iris.spmd.specs import P

Norm = Callable[[Tensor], Tensor]


class ParallelAttention(nn.Module):
    """Causal attention ``[batch, rows, K] -> [batch, rows, K]``; each rank has whole groups, a key
    head and its queries.

    Groups that do not divide are split as torch.chunk does, so some ranks may have fewer, or none.
    Where there are more ranks than key heads and they divide, key heads are repeated, so that
    every rank has queries.

    ``qkv`` holds, for each group, the rows of its queries, its key and its value. An x of two dims
    is ``[batch * rows / axis, K]``, split by rows (sequence parallel), and so is y then.

    >>> layer = ParallelAttention.from_linear(q, k, v, o, heads=9, kv_heads=3)  # doctest: +SKIP
    """

    bias: Tensor | None

    def __init__(
        self,
        qkv: Tensor,
        bias: Tensor | None,
        out: RowParallelLinear,
        *,
        width: int,
        scale: float | None = None,
        softcap: float | None = None,
        rotary: bool = True,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        copies: int = 1,
    ) -> None:
        """Hold this rank's groups, ``[groups/axis, (queries + 2) * width, K]``; see `from_linear`
        to cut them.

        ``softcap`` bounds the scores, smoothly; without ``rotary``, positions are not used.
        ``copies`` groups after each other have the same key head.
        """
        super().__init__()
        self.qkv = parameter(qkv)
        self.register_parameter("bias", None if bias is None else parameter(bias))
        self.out, self.width, self.queries = out, width, qkv.shape[1] // width - 2
        self.scale = width**-0.5 if scale is None else scale
        self.softcap, self.rotary = softcap, rotary
        self.q_norm, self.k_norm, self.copies = q_norm, k_norm, copies
        partition(self, P(out.axis))

    @classmethod
    def from_linear(
        cls,
        q: LinearSource,
        k: LinearSource,
        v: LinearSource,
        o: LinearSource,
        *,
        heads: int,
        kv_heads: int,
        axis: str = "tp",
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> "ParallelAttention":
        """Cut the four projections of an unsharded attention; ``options`` are those of the class.

        SpecError where ``heads`` are no whole groups.
        """
        place = Place.of(axis, mesh)
        biases = [linear_source(one).bias is not None for one in (q, k, v, o)][:3]
        if len({*biases}) > 1:
            raise SpecError(
                "some of q, k and v have a bias, and some have none",
                help="give all three a bias, of zeros where there was none",
            )
        if heads % kv_heads or q.weight.shape[0] % heads:
            raise SpecError(
                f"{heads} query heads over {kv_heads} key heads, of {q.weight.shape[0]} rows, "
                "are no equal groups",
                help="heads must be a multiple of kv_heads, and the rows a multiple of heads",
            )
        queries, width = heads // kv_heads, q.weight.shape[0] // heads
        copies = place.size // kv_heads if place.size % kv_heads == 0 else 1
        copies = copies if copies and queries % copies == 0 else 1
        groups = range(*place.span(kv_heads * copies))
        rows = queries // copies * width

        def cut(part: Callable[[LinearSource], Source | None]) -> Tensor | None:
            whole = part(q)
            if whole is None:
                return None
            pieces = [_rows(whole, groups, rows)]
            for linear in (k, v):
                source = part(linear)
                assert source is not None
                pieces.append(_rows(source, [g // copies for g in groups], width))
            return torch.cat(pieces, 1)

        qkv, bias = cut(lambda linear: linear.weight), cut(lambda linear: linear.bias)
        assert qkv is not None
        out = RowParallelLinear(
            place.take(o.weight, 1, rows).unflatten(1, (len(groups), rows)),
            None if o.bias is None else o.bias[:].detach().clone(),
            axis=axis,
            mesh=mesh,
        )
        return cls(qkv, bias, out, width=width, copies=copies, **options)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        past: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return y, and this call's keys and values ``[2, batch, groups/axis, rows, width]`` for a
        `KVCache`.

        Args:
            cos, sin: rotary embedding of the positions, ``[batch, rows, width]``.
            past: a layer's keys and values so far, ``[2, batch, groups/axis, capacity, width]``.
            mask: what is added to the scores, ``[batch, 1, rows, capacity + rows]``, needed with
                ``past`` or a softcap; None is causal.
        """
        (batch, rows), spread = cos.shape[:2], x.dim() == 2
        if spread:
            x = all_gather(x, self.out.axis, 0, size=batch * rows, mesh=self.out.mesh)
        bias = None if self.bias is None else self.bias.flatten()
        qkv = F.linear(x, self.qkv.flatten(0, 1), bias)
        groups = self.qkv.shape[0]
        qkv = qkv.view(batch, rows, groups, self.queries + 2, self.width).permute(0, 2, 3, 1, 4)
        turned = self._normed(qkv[:, :, :-1])
        if self.rotary:
            turned = rotate(turned, cos, sin)
        q, k, v = turned[:, :, :-1], turned[:, :, -1], qkv[:, :, -1]
        found = attend(q, k, v, self.scale, past, mask, self.softcap)
        columns = groups * self.queries * self.width
        joined = found.permute(0, 3, 1, 2, 4).reshape(batch * rows, columns)
        y = F.linear(joined, self.out.weight.flatten(1)).view(*x.shape[:-1], -1)
        return self.out.summed(y, spread), torch.stack((k, v))

    def _normed(self, qk: Tensor) -> Tensor:
        """Queries and keys ``[batch, groups, queries + 1, rows, width]`` after the norms of their
        heads.
        """
        if self.q_norm is None or self.k_norm is None:
            return qk
        return torch.cat((self.q_norm(qk[:, :, :-1]), self.k_norm(qk[:, :, -1:])), 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: ``x [batch, groups, heads, rows, width]`` turned by angles ``[batch, rows,
    width]``.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    left, right = sin.chunk(2, -1)
    signed = torch.cat((-left, right), -1)[:, None, None]  # once for all layers of a program
    return torch.addcmul(x * cos[:, None, None], x.roll(x.shape[-1] // 2, -1), signed)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    past: Tensor | None,
    mask: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of ``q [batch, groups, queries, rows, width]`` over the past and these rows.

    The past is read where it lies: scores over it and over the new rows are joined, not the keys.
    """
    if not q.numel():  # a rank without groups
        return q
    if past is None and softcap is None:
        own, values = (t.unsqueeze(2).expand(q.shape).flatten(1, 2) for t in (k, v))
        found = F.scaled_dot_product_attention(
            q.flatten(1, 2), own, values, mask, is_causal=mask is None, scale=scale
        )
        return found.view(q.shape)
    assert mask is not None
    flat = q.flatten(2, 3) * scale
    keys = (k,) if past is None else (past[0], k)
    scores = torch.cat([flat @ part.mT for part in keys], -1).float()
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.view(*q.shape[:4], -1)
    weights = (scores + mask.unsqueeze(2)).softmax(-1).to(q.dtype).flatten(2, 3)
    found = weights[..., -k.shape[-2] :] @ v
    if past is not None:
        found = weights[..., : past.shape[-2]] @ past[1] + found
    return found.view(q.shape)


def _rows(source: Source, heads: Iterable[int], rows: int) -> Tensor:
    """Blocks of ``rows`` rows of ``source``, one for each of ``heads``: ``[heads, rows, ...]``."""
    parts = [source[head * rows : (head + 1) * rows].detach() for head in heads]
    return torch.stack(parts) if parts else torch.stack([source[:rows].detach()]).narrow(0, 0, 0)


class KVCache:
    """Keys and values of all layers so far: ``tensor [layers, 2, batch, groups/axis, capacity,
    width]``.

    ``length`` rows are in use. The capacity doubles when it is spent, so programs see few shapes.
    """

    FIRST = 64

    def __init__(self, like: Tensor, capacity: int = 0) -> None:
        """An empty cache of ``capacity`` rows, for keys and values of the layout of ``like``."""
        self.length = 0
        self.tensor = like.new_zeros(*like.shape[:-2], capacity, like.shape[-1])

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return self.tensor.shape[-2]

    def append(self, new: Tensor, rows: int) -> None:
        """Add the first ``rows`` rows of ``new [layers, 2, batch, groups/axis, rows or more,
        width]``.
        """
        stop = self.length + rows
        if stop > self.capacity:
            capacity = max(self.FIRST, 1 << (stop - 1).bit_length())
            grown = new.new_zeros(*new.shape[:-2], capacity, new.shape[-1])
            grown[..., : self.length, :] = self.tensor[..., : self.length, :]
            self.tensor = grown
        self.tensor[..., self.length : stop, :] = new[..., :rows, :]
        self.length = stop
