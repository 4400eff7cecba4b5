"""``iris.parallelize``: a transformers model whose weights are spread over ranks, in place."""

from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from iris.errors import SpecError, UnsupportedError
from iris.nn import Checkpoint, ParallelAttention, ParallelEmbedding, ParallelHead, ParallelMLP
from iris.nn.shards import LinearSource, Source, parameter
from iris.spmd.decorator import spmd
from iris.spmd.modules import partition
from iris.spmd.specs import P

M = TypeVar("M", bound=nn.Module)

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model.config.model_type`` that are known to be decoders of the Llama form."""


def parallelize(
    model: M,
    mesh: DeviceMesh | None = None,
    plan: str = "auto",
    *,
    axis: str = "tp",
    weights: Checkpoint | None = None,
) -> M:
    """Spread the weights of a causal language model over ranks, in place, and return it;
    collective.

    ``model.generate(...)`` then works as before, when every rank calls it with the same arguments:
    each forward is one program (see :func:`iris.spmd`), and all ranks get the same logits. Heads
    and words that do not divide are split unevenly.

    Args:
        model: a ``LlamaForCausalLM``, or one of the Mistral, Qwen2 or Qwen3 kind. It may be on the
            device "meta", with ``weights``.
        mesh: a mesh with the axis ``axis``; None is all ranks.
        plan: "auto" splits attention by groups of heads, feed-forward by hidden features, both
            ends by words.
        weights: where to read this rank's slices from; None cuts what the model holds.

    Raises SpecError for an unknown axis, UnsupportedError for a model of another form.

    >>> model = iris.parallelize(AutoModelForCausalLM.from_pretrained(path))      # doctest: +SKIP
    >>> model.generate(**tokenizer("Hello", return_tensors="pt"))                 # doctest: +SKIP
    """
    if plan != "auto":
        raise SpecError(f"plan {plan!r} is not known", help='the only plan is "auto"')
    _check(model)
    from iris.hf import decoder

    with torch.no_grad():
        _Cutter(model, axis, mesh, weights).run()
    layers: Any = model.get_submodule("model.layers")
    for layer in layers:
        layer.forward = MethodType(decoder.layer_forward, layer)
    past = P(None, None, None, axis)
    specs = {name: P() for name in ("ids", "cos", "sin", "mask", "keep")} | {"past": past}
    name = type(model).__name__
    program = spmd(mesh=mesh, in_specs=specs, out_specs=(P(), None), name=name)(decoder.decode)
    setattr(model, "spmd", program.__get__(model))  # noqa: B010
    setattr(model, "forward", MethodType(decoder.forward, model))  # noqa: B010
    return model


def _check(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in FAMILY or not hasattr(model, "lm_head"):
        raise UnsupportedError(
            f"iris.parallelize does not know the form of {type(model).__name__} ({kind})",
            help=f"it knows causal language models of {', '.join(FAMILY)}; others: iris.nn",
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "sliding_window", None) and kinds != {"full_attention"}:
        raise UnsupportedError(
            f"{type(model).__name__} has a sliding window of {config.sliding_window} rows",
            help="set config.sliding_window = None where contexts are shorter than that",
        )
    if hasattr(model, "spmd"):
        raise UnsupportedError(f"this {type(model).__name__} is parallelized already")


class _Cutter:
    """Replaces the layers of one model, one after the other, so that whole weights go as shards
    come.
    """

    def __init__(
        self, model: Any, axis: str, mesh: DeviceMesh | None, weights: Checkpoint | None
    ) -> None:
        self.model, self.config, self.weights = model, model.config, weights
        self.where: dict[str, Any] = {"axis": axis, "mesh": mesh}

    def run(self) -> None:
        model, decoder, config = self.model, self.model.model, self.config
        decoder.embed_tokens = ParallelEmbedding.from_weight(
            self.tensor("model.embed_tokens.weight"), **self.where
        )
        for index, layer in enumerate(decoder.layers):
            prefix = f"model.layers.{index}"
            self.attention(layer, f"{prefix}.self_attn")
            self.feed_forward(layer, f"{prefix}.mlp")
            for name in ("input_layernorm", "post_attention_layernorm"):
                self.norm(getattr(layer, name), f"{prefix}.{name}.weight")
        self.norm(decoder.norm, "model.norm.weight")
        embed = decoder.embed_tokens
        options: dict[str, Any] = {"gather_output": True, **self.where}
        if config.tie_word_embeddings:
            head = ParallelHead(embed.weight, None, out_features=embed.words, **options)
        else:
            head = ParallelHead.from_linear(self.linear("lm_head"), **options)
        model.lm_head = head
        if self.weights is not None:  # its buffers were never computed
            decoder.rotary_emb = type(decoder.rotary_emb)(config)

    def attention(self, layer: Any, prefix: str) -> None:
        old = layer.self_attn
        norms: dict[str, Any] = {}
        for name in ("q_norm", "k_norm"):
            if hasattr(old, name):
                norms[name] = self.norm(getattr(old, name), f"{prefix}.{name}.weight")
        q, k, v, o = (self.linear(f"{prefix}.{part}_proj") for part in "qkvo")
        layer.self_attn = ParallelAttention.from_linear(
            q,
            k,
            v,
            o,
            heads=self.config.num_attention_heads,
            kv_heads=self.config.num_key_value_heads,
            scale=old.scaling,
            **norms,
            **self.where,
        )

    def feed_forward(self, layer: Any, prefix: str) -> None:
        up, down, gate = (self.linear(f"{prefix}.{part}_proj") for part in ("up", "down", "gate"))
        activation = layer.mlp.act_fn
        layer.mlp = ParallelMLP.from_linear(up, down, gate, activation=activation, **self.where)

    def norm(self, norm: nn.Module, name: str) -> nn.Module:
        if self.weights is not None:
            norm.weight = parameter(self.weights[name][:].to(self.model.dtype))
        return partition(norm, P())

    def tensor(self, name: str) -> Source:
        if self.weights is not None:
            return self.weights[name]
        return self.model.get_parameter(name)  # type: ignore[no-any-return]

    def linear(self, prefix: str) -> LinearSource:
        if self.weights is not None:
            return self.weights.linear(prefix)
        return self.model.get_submodule(prefix)  # type: ignore[no-any-return]
