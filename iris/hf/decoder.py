"""The forward pass of a decoder of the Llama family as one program over all ranks, and what
`generate` calls.
"""

import inspect
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from iris.errors import UnsupportedError
from iris.nn.attention import KVCache
from iris.runtime.context import current
from iris.spmd.binding import tensor_key
from iris.spmd.collectives import all_gather
from iris.spmd.decorator import spmd
from iris.spmd.mesh import ProgramMesh
from iris.spmd.statics import SIMPLE, static_key, submodules

# How this version of transformers calls the cache, among arguments and results.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
SPREAD = 256  # from so many rows on, a prefill's rows are split over ranks between matmuls
SHORTEST = 16  # rows of a prefill are padded to this or a larger power of two: few shapes


class HeldCache(Cache):
    """A cache of transformers whose keys and values, this rank's heads of all layers, are one
    `KVCache`.
    """

    def __init__(self, capacity: int = 0) -> None:
        """An empty cache; ``capacity`` rows are kept for it from the start, more as they are
        needed.
        """
        super().__init__(layers=[])
        self.first = capacity
        self.held: KVCache | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows in use."""
        del layer_idx
        return 0 if self.held is None else self.held.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` rows."""
        if self.held is not None:
            self.held.length += tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the batch entries ``beam_idx``, as beam search asks."""
        if self.held is not None:
            self.held.tensor = self.held.tensor.index_select(2, beam_idx)

    def append(self, new: Tensor, rows: int) -> None:
        """See :meth:`KVCache.append`."""
        if self.held is None:
            self.held = KVCache(new, self.first)
        self.held.append(new, rows)


@spmd(static_argnames=("layer",))
def block(layer: nn.Module, weights: dict[str, Tensor], *args: Tensor | None) -> Any:
    """``layer`` with other weights: layers of one form are traced once."""
    return functional_call(layer, weights, args)


def form(module: nn.Module) -> object:
    """Equal for modules that differ in the values of their weights only."""
    return tuple(
        (
            type(child),
            tuple(child._modules),
            static_key({k: v for k, v in vars(child).items() if type(v) in SIMPLE}),
            tuple((name, t is not None and tensor_key(t)) for name, t in child._parameters.items()),
            tuple(map(id, (*child._forward_hooks.values(), *child._forward_pre_hooks.values()))),
            any(buffer is not None for buffer in child._buffers.values()) and id(child),
        )
        for child in submodules(module)
    )


def layer_forward(
    self: Any, x: Tensor, cos: Tensor, sin: Tensor, past: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One layer of the decoder: its output, and its new keys and values. See
    :meth:`ParallelAttention.forward`.
    """
    rows = cos.shape[0] * cos.shape[1] if x.dim() == 2 else None
    attended, new = self.self_attn(self.input_layernorm(x), cos, sin, past, mask)
    if not hasattr(self, "pre_feedforward_layernorm"):
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x), rows), new
    x = x + self.post_attention_layernorm(attended)  # Gemma 2 and 3: norms on both sides
    y = self.mlp(self.pre_feedforward_layernorm(x), rows)
    return x + self.post_feedforward_layernorm(y), new


def decode(
    model: Any,
    ids: Tensor,
    cos: tuple[Tensor, ...],
    sin: tuple[Tensor, ...],
    masks: tuple[Tensor | None, ...],
    past: tuple[Tensor, ...],
    keep: Tensor,
) -> tuple[Tensor, Tensor]:
    """Logits ``[batch, kept, words]``, and the new keys and values ``[layers, 2, batch,
    groups/axis, rows, width]``.

    Args:
        ids: ``[batch, rows]``.
        cos, sin, masks: one for each `Kind` of layer; see :meth:`ParallelAttention.forward`.
        past: nothing, or the tensor of a `KVCache`.
        keep: the rows whose logits are wanted.
    """
    decoder, held = model.model, []
    alike: dict[object, nn.Module] = {}
    embed, (batch, rows) = decoder.embed_tokens, ids.shape
    spread = batch * rows >= SPREAD
    x = embed(ids.flatten() if spread else ids, spread)
    for index, (layer, kind) in enumerate(zip(decoder.layers, model.kinds.of_layers, strict=True)):
        own = cos[kind], sin[kind], past[0][index] if past else None, masks[kind]
        weights = dict(layer.named_parameters())
        x, new = block(alike.setdefault(form(layer), layer), weights, x, *own)
        held.append(new)
    if spread:
        x = all_gather(x, embed.axis, 0, size=batch * rows).view(batch, rows, -1)
    logits = model.lm_head(decoder.norm(x.index_select(1, keep)))
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else (logits / cap).tanh() * cap, torch.stack(held)


@dataclass(frozen=True)
class Kind:
    """What layers may differ in beyond their weights: rows that they look back at (None is all),
    and whose rotary angles they take, where a model has several.
    """

    window: int | None
    rotary: str | None


@dataclass(frozen=True)
class Kinds:
    """The kinds of a model, and the number of each layer's."""

    all: tuple[Kind, ...]
    of_layers: tuple[int, ...]

    @classmethod
    def find(cls, model: Any) -> "Kinds":
        """Those of a model of transformers that is still whole."""
        decoder, config = model.model, model.config
        several = "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters
        types = getattr(config, "layer_types", None) or [None] * len(decoder.layers)
        found = []
        for layer, name in zip(decoder.layers, types, strict=True):
            window = getattr(layer.self_attn, "sliding_window", None)
            if name is None:  # a model whose layers are all alike
                window = getattr(config, "sliding_window", None)
            found.append(Kind(window, name if several else None))
        kinds = tuple(dict.fromkeys(found))
        return cls(kinds, tuple(map(kinds.index, found)))

    def angles(self, rotary: Any, like: Tensor, places: Tensor) -> Any:
        """Cosines and sines for each kind."""
        pairs = [rotary(like, places, *([kind.rotary] if kind.rotary else [])) for kind in self.all]
        return tuple(zip(*pairs, strict=True))


def forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: Cache | None = None,
    past_key_values: Cache | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **others: Any,
) -> CausalLMOutputWithPast:
    """Logits of the next tokens, as transformers' own ``forward``; the same on every rank.

    ``attention_mask [batch, past + rows]`` is 0 where a batch entry is padding. Any other argument
    is refused, unless it is None or False. The cache that comes back must be passed on: it is the
    one that holds the keys.
    """
    asked = sorted(
        name for name, value in others.items() if value is not None and value is not False
    )
    refused = [name for name in asked if name not in ("return_dict", "cache_position")]
    if input_ids is None or refused:
        raise UnsupportedError(
            f"a parallelized model does not take {', '.join(refused) or 'no input_ids'}",
            help="it takes input_ids, attention_mask, position_ids, cache, logits_to_keep",
        )
    known = _own_cache(past_key_values if cache is None else cache)
    batch, rows = input_ids.shape
    start = known.get_seq_length()
    if start == 0 or input_ids.device.type == "cpu":  # on a GPU a step must not wait for the host
        _agree(self, input_ids)
    padded = rows if rows == 1 else max(SHORTEST, 1 << (rows - 1).bit_length())
    if position_ids is None:
        position_ids = torch.arange(start, start + rows, device=input_ids.device)
    position_ids = position_ids.expand(batch, rows)
    extra = (0, padded - rows)
    pad = torch.nn.functional.pad
    masks = _masks(self, attention_mask, batch, start, rows, padded, known)
    like = torch.empty(0, dtype=self.dtype, device=input_ids.device)
    cos, sin = self.kinds.angles(self.model.rotary_emb, like, pad(position_ids, extra))
    past = (known.held.tensor,) if known.held is not None and start else ()
    keep = _kept(logits_to_keep, rows, padded).to(input_ids.device)
    logits, new = self.spmd(pad(input_ids, extra), cos, sin, masks, past, keep)
    if use_cache is not False:
        known.append(new, rows)
    given: Any = {CACHE: None if use_cache is False else known}
    return CausalLMOutputWithPast(logits=logits[:, :rows], **given)


def _agree(model: Any, ids: Tensor) -> None:
    """CollectiveMismatchError on all ranks where they were not given the same tokens."""
    embed = model.model.embed_tokens
    where = ProgramMesh.world(embed.axis) if embed.mesh is None else ProgramMesh.of(embed.mesh)
    group = current().group(where.members((embed.axis,)))
    if group.size > 1:
        tokens = ids.tolist()
        number, shown = zlib.crc32(str(tokens).encode()), str(tokens[0][-8:])
        what = f"{type(model).__name__} on {ids.shape[0]}x{ids.shape[1]} tokens ending in {shown}"
        group.sync(f"{what} ({number:08x})")


def _own_cache(cache: Cache | None) -> HeldCache:
    """``cache`` if it is one of ours; a new one for None or an empty one that `generate` made."""
    if isinstance(cache, HeldCache):
        return cache
    if cache is not None and cache.get_seq_length():
        raise UnsupportedError(
            f"a {type(cache).__name__} that holds keys of whole heads cannot be split over ranks",
            help="pass no cache at first, then the one that came back",
        )
    return HeldCache()


def _kept(logits_to_keep: int | Tensor, rows: int, padded: int) -> Tensor:
    """Indices of the rows whose logits are wanted: all (0), the last n, or those of a tensor."""
    if isinstance(logits_to_keep, Tensor):
        return logits_to_keep % rows
    return torch.arange(rows - logits_to_keep, rows) if logits_to_keep else torch.arange(padded)


def _masks(
    model: Any,
    attention_mask: Tensor | None,
    batch: int,
    start: int,
    rows: int,
    padded: int,
    cache: HeldCache,
) -> tuple[Tensor | None, ...]:
    """What each kind of layer adds to its scores: ``[batch, 1, rows, capacity + rows]``; None is
    plain causal, with no past.
    """
    everything = attention_mask is None or bool(attention_mask.all())
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    capacity = cache.held.capacity if cache.held is not None and start else 0
    device, lowest = model.device, torch.finfo(model.dtype).min
    row = torch.arange(padded, device=device)
    seen = torch.zeros(batch, padded, capacity + padded, dtype=torch.bool, device=device)
    seen[:, :, :start] = True
    seen[:, :, capacity:] = row[:, None] >= row
    if attention_mask is not None and not everything:
        seen[:, :, :start] &= attention_mask[:, None, :start].bool()
        seen[:, :, capacity : capacity + rows] &= attention_mask[:, None, start:].bool()
    key = torch.cat((torch.arange(capacity, device=device), start + row))
    zero = torch.zeros((), dtype=model.dtype, device=device)
    masks: list[Tensor | None] = []
    for kind in model.kinds.all:
        narrow = kind.window is not None and start + padded > kind.window
        if not (start or narrow or capped) and everything:
            masks.append(None)
            continue
        near = seen & (key > start + row[:, None] - kind.window) if narrow else seen
        masks.append(zero.where(near, lowest).unsqueeze(1))
    return tuple(masks)
