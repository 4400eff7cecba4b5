"""``iris.parallelize``: a transformers model whose weights are spread over ranks, in place."""

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import partial
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

FAMILY = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "gemma2", "gemma3_text",
)  # fmt: skip
"""Values of ``model.config.model_type`` that are known to be decoders of the Llama form."""

STYLES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise"),
    **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
}
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def parallelize(
    model: M,
    mesh: DeviceMesh | None = None,
    plan: str | Mapping[str, str] = "auto",
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
        model: a ``LlamaForCausalLM``, or one of the Mistral, Qwen2, Qwen3, SmolLM3 or Gemma kind.
            It may be on the device "meta", with ``weights``.
        mesh: a mesh with the axis ``axis``; None is all ranks. Along other axes the model is whole
            again, and each may be given prompts of its own.
        plan: how linear layers are split, ``{"layers.*.mlp.up_proj": "colwise"}``, as a
            ``tp_plan`` of transformers; "auto" is the model's own, or where it has none, what its
            form asks for. Attention goes by groups of heads, feed-forward by hidden features, both
            ends by words.
        weights: where to read this rank's slices from; None cuts what the model holds.

    Raises SpecError for an unknown axis or plan, UnsupportedError for a model of another form.

    >>> model = iris.parallelize(AutoModelForCausalLM.from_pretrained(path))      # doctest: +SKIP
    >>> model.generate(**tokenizer("Hello", return_tensors="pt"))                 # doctest: +SKIP
    """
    _check(model)
    _check_plan(model, plan)
    from iris.hf import decoder

    kinds = decoder.Kinds.find(model)
    if mesh is not None and axis in (mesh.mesh_dim_names or ()):
        mesh = mesh[axis]
    with torch.no_grad():
        _Cutter(model, axis, mesh, weights).run()
    body: Any = model.get_submodule("model")
    for layer in body.layers:
        layer.forward = partial(decoder.layer_forward, layer)
    body.forward = partial(decoder.refuse, body)
    past = P(None, None, None, axis)
    specs = {name: P() for name in ("ids", "cos", "sin", "masks", "keep")} | {"past": past}
    name = type(model).__name__
    program = spmd(mesh=mesh, in_specs=specs, out_specs=(P(), None), name=name)(decoder.decode)
    own: dict[str, Any] = {"kinds": kinds, "spmd": program.__get__(model)}
    own["forward"] = partial(decoder.forward, model)
    own["_prepare_cache_for_generation"] = partial(decoder.prepare_cache, model)
    vars(model).update(own)
    return model


def _check(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in FAMILY or not hasattr(model, "lm_head"):
        raise UnsupportedError(
            f"iris.parallelize does not know the form of {type(model).__name__} ({kind})",
            help=f"it knows causal language models of {', '.join(FAMILY)}; others: iris.nn",
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedError(f"{type(model).__name__} looks at rows that come after")
    if hasattr(model, "spmd"):
        raise UnsupportedError(f"this {type(model).__name__} is parallelized already")


def _check_plan(model: nn.Module, plan: str | Mapping[str, str]) -> None:
    """SpecError that lists every linear layer that the plan does not split as attention and
    feed-forward need it.
    """
    if isinstance(plan, str) and plan != "auto":
        raise SpecError(f"plan {plan!r} is not known", help='pass "auto" or a dict of styles')
    config: Any = model.config
    given: Any = getattr(config, "base_model_tp_plan", None) if plan == "auto" else plan
    if not given:
        return
    wrong = []
    for name, _ in model.get_submodule("model").named_modules():
        wanted = STYLES.get(name.rpartition(".")[2])
        rule = next((rule for rule in given if fnmatch(name, rule)), None)
        if wanted and (rule is None or given[rule] != wanted):
            found = "not split" if rule is None else given[rule]
            wrong.append(f"{re.sub('[0-9]+', '*', name)}: {found}, not {wanted}")
    if wrong:
        raise SpecError(
            f"the plan does not split {type(model).__name__} as it must be:\n  "
            + "\n  ".join(dict.fromkeys(wrong)),
            help='plan="auto" is the model\'s own',
        )


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
            self.tensor("model.embed_tokens.weight"),
            scale=getattr(decoder.embed_tokens, "scalar_embed_scale", 1.0),
            **self.where,
        )
        for index, layer in enumerate(decoder.layers):
            prefix = f"model.layers.{index}"
            self.attention(layer, f"{prefix}.self_attn")
            self.feed_forward(layer, f"{prefix}.mlp")
            for name in NORMS:
                if hasattr(layer, name):
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
            softcap=getattr(self.config, "attn_logit_softcapping", None),
            rotary=bool(getattr(old, "use_rope", True)),
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
