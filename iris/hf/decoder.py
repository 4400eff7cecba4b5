"""The forward pass of a decoder of the Llama family as one program over all ranks, and what
`generate` calls.
"""

import inspect
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from iris.errors import SpecError, UnsupportedError
from iris.hf.cache import CACHE, HeldLayer, held_layer
from iris.runtime.context import current
from iris.spmd.binding import tensor_key
from iris.spmd.collectives import all_gather
from iris.spmd.decorator import spmd
from iris.spmd.mesh import ProgramMesh
from iris.spmd.statics import SIMPLE, static_key, submodules

SPREAD = 256  # from so many rows on, a prefill's rows are split over ranks between matmuls
SHORTEST = 16  # rows of a prefill are padded to this or a larger power of two: few shapes


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
        share = getattr(self, "residual_multiplier", None)  # Granite
        x = x + (attended if share is None else attended * share)
        y = self.mlp(self.post_attention_layernorm(x), rows)
        return x + (y if share is None else y * share), new
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
    if (scaling := getattr(model.config, "logits_scaling", None)) is not None:
        logits = logits / scaling
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
    *,
    past_key_values: Cache | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    labels: Tensor | None = None,
    num_items_in_batch: Tensor | None = None,
    **others: Any,
) -> CausalLMOutputWithPast:
    """Logits of the next tokens, and with ``labels`` their loss, as transformers' own ``forward``;
    the same on every rank.

    ``attention_mask [batch, past + rows]`` is 0 where a batch entry is padding. Any other argument
    is refused, unless it is None or False.
    """
    cache = past_key_values if cache is None else cache
    kept = self.config.use_cache if use_cache is None else use_cache
    if cache is None and kept:
        cache = DynamicCache()
    known = HeldLayer() if cache is None else held_layer(cache)
    start = known.get_seq_length()
    ids = _checked(self, input_ids, attention_mask, start, others)
    batch, rows = ids.shape
    _check_past(self, known, batch)
    if start == 0 or ids.device.type == "cpu":  # on a GPU a step must not wait for the host
        _agree(self, ids)
    padded = rows if rows == 1 else max(SHORTEST, 1 << (rows - 1).bit_length())
    extra = (0, padded - rows)
    given = position_ids
    if position_ids is None:
        position_ids = torch.arange(start, start + rows, device=ids.device)
    position_ids = position_ids.expand(batch, rows)
    alone = attention_mask is None and cache is None and given is not None
    sequences = _sequences(position_ids, padded) if alone else None
    masks = _masks(self, attention_mask, sequences, known, ids, padded)
    like = torch.empty(0, dtype=self.dtype, device=ids.device)
    pad = torch.nn.functional.pad
    cos, sin = self.kinds.angles(self.model.rotary_emb, like, pad(position_ids, extra))
    past = (known.held.tensor,) if known.held is not None and start else ()
    keep = _kept(logits_to_keep, rows, padded).to(ids.device)
    logits, new = self.spmd(pad(ids, extra), cos, sin, masks, past, keep)
    if cache is not None:
        known.append(new, rows)
    logits, loss = logits[:, :rows].contiguous(), None
    if labels is not None:
        options = {"vocab_size": self.config.vocab_size, "num_items_in_batch": num_items_in_batch}
        loss = self.loss_function(logits=logits, labels=labels, **options)
    filled: Any = {CACHE: cache}
    return CausalLMOutputWithPast(loss=loss, logits=logits, **filled)


def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """What the decoder of a parallelized model does when it is called by itself."""
    del args, kwargs
    raise UnsupportedError(
        f"{type(self).__name__} runs as a part of a parallelized model only",
        help="call the model, which gives logits",
    )


def prepare_cache(
    self: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
) -> None:
    """As transformers' own; what `generate` asks the cache about, the parallelized one answers."""
    type(self)._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)
    if model_kwargs.get(CACHE) is not None:
        held_layer(model_kwargs[CACHE])


def _checked(
    model: Any, ids: Tensor | None, mask: Any, start: int, others: Mapping[str, Any]
) -> Tensor:
    """``ids``, if a parallelized model can do what was asked."""
    asked = {name for name, value in others.items() if value is not None and value is not False}
    asked -= {"return_dict", "cache_position"}
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(model.config, name, False):
            asked.add(name)
    if ids is None or asked:
        raise UnsupportedError(
            f"a parallelized model does not take {', '.join(sorted(asked)) or 'no input_ids'}",
            help="it takes input_ids, attention_mask, position_ids, labels, logits_to_keep and "
            f"{CACHE}",
        )
    if ids.dim() != 2 or not ids.numel():
        raise SpecError(f"input_ids are {[*ids.shape]}, not [batch, rows] of one or more")
    wanted = [ids.shape[0], start + ids.shape[1]]
    if mask is not None:
        shape = [*mask.shape] if isinstance(mask, Tensor) else []
        if len(shape) != 2 or shape[0] != wanted[0] or shape[1] < wanted[1]:
            found = shape or f"a {type(mask).__name__}"
            raise SpecError(
                f"attention_mask is {found}, where [batch, past + rows] is {wanted}",
                help="it is 1 for tokens and 0 for padding, of the past too",
            )
    _check_state(model)
    return ids


def _check_state(model: Any) -> None:
    """UnsupportedError for what was asked of the model itself, not of a call."""
    for name in ("attention_dropout", "residual_dropout"):
        if model.training and getattr(model.config, name, 0):
            raise UnsupportedError(
                "a parallelized model has no dropout", help=f"set config.{name} = 0"
            )
    one = model.model.layers[0].self_attn
    learns = torch.is_grad_enabled() and (model.training or one.qkv.requires_grad)
    if learns and one.copies > 1:
        raise UnsupportedError(
            "there are no gradients where key heads are repeated over ranks",
            help="train on ranks that divide the key heads, or call model.eval()",
        )
    if model.model._forward_hooks or model.model._forward_pre_hooks:
        raise UnsupportedError(
            f"hooks of {type(model.model).__name__} would not be called in a parallelized model",
            help="set them on the model or on layers",
        )


def _check_past(model: Any, known: HeldLayer, batch: int) -> None:
    """SpecError where a cache was filled by another batch or model."""
    if known.held is not None and known.get_seq_length():
        found, wanted = known.held.tensor.shape, (len(model.model.layers), batch)
        if (found[0], found[2]) != wanted:
            raise SpecError(
                f"the cache holds {found[0]} layers of a batch of {found[2]}, this call has "
                f"{wanted[0]} of a batch of {wanted[1]}"
            )


def _agree(model: Any, ids: Tensor) -> None:
    """CollectiveMismatchError on all ranks where they were not given the same tokens; SpecError
    where there is no such token.
    """
    embed, tokens = model.model.embed_tokens, ids.tolist()
    where = ProgramMesh.world(embed.axis) if embed.mesh is None else ProgramMesh.of(embed.mesh)
    group = current().group(where.members((embed.axis,)))
    if group.size > 1:
        number, shown = zlib.crc32(str(tokens).encode()), str(tokens[0][-8:])
        what = f"{type(model).__name__} on {ids.shape[0]}x{ids.shape[1]} tokens ending in {shown}"
        group.sync(f"{what} ({number:08x})")
    unknown = next((token for row in tokens for token in row if not 0 <= token < embed.words), None)
    if unknown is not None:
        raise SpecError(f"token {unknown} is not one of the {embed.words} words of the model")


def _kept(logits_to_keep: int | Tensor, rows: int, padded: int) -> Tensor:
    """Indices of the rows whose logits are wanted: all (0), the last n, or those of a tensor."""
    if isinstance(logits_to_keep, Tensor):
        return logits_to_keep % rows
    return torch.arange(rows - logits_to_keep, rows) if logits_to_keep else torch.arange(padded)


def _sequences(position_ids: Tensor, padded: int) -> Tensor | None:
    """Which rows are of one sequence, ``[batch, rows, rows]``, where positions start again within
    rows: without mask and cache, that means packed sequences to transformers.
    """
    jumps = torch.nn.functional.pad(
        position_ids.diff(dim=1) != 1, (1, padded - position_ids.shape[1])
    )
    if not jumps.any():
        return None
    number = jumps.cumsum(1)
    return number.unsqueeze(2) == number.unsqueeze(1)


def _masks(
    model: Any,
    attention_mask: Tensor | None,
    sequences: Tensor | None,
    known: HeldLayer,
    ids: Tensor,
    padded: int,
) -> tuple[Tensor | None, ...]:
    """What each kind of layer adds to its scores: ``[batch, 1, rows, capacity + rows]``; None is
    plain causal, with no past.
    """
    (batch, rows), start, device = ids.shape, known.get_seq_length(), ids.device
    capacity = known.held.capacity if known.held is not None and start else 0
    everything = attention_mask is None or bool(attention_mask.all())
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    row = torch.arange(padded, device=device)
    seen = torch.zeros(batch, padded, capacity + padded, dtype=torch.bool, device=device)
    seen[:, :, :start] = True
    seen[:, :, capacity:] = row[:, None] >= row
    if sequences is not None:
        seen &= sequences
    if attention_mask is not None and not everything:
        there = attention_mask[:, None, : start + rows].bool()
        seen[:, :, :start] &= there[..., :start]
        seen[:, :, capacity : capacity + rows] &= there[..., start:]
    key = torch.cat((torch.arange(capacity, device=device), start + row))
    zero = torch.zeros((), dtype=model.dtype, device=device)
    masks: list[Tensor | None] = []
    for kind in model.kinds.all:
        narrow = kind.window is not None and start + padded > kind.window
        if not (start or narrow or capped) and everything and sequences is None:
            masks.append(None)
            continue
        near = seen & (key > start + row[:, None] - kind.window) if narrow else seen
        masks.append(zero.where(near, torch.finfo(model.dtype).min).unsqueeze(1))
    return tuple(masks)
