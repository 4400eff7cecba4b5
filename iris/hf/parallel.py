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
from iris.runtime.context import current
from iris.spmd.decorator import spmd
from iris.spmd.mesh import ProgramMesh
from iris.spmd.modules import partition
from iris.spmd.specs import P

M = TypeVar("M", bound=nn.Module)

FAMILY = (
    "llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "gemma", "gemma2", "gemma3_text",
    "granite", "olmo", "seed_oss",
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
        model: a ``LlamaForCausalLM``, or another model that docs/how-to/hugging-face.md lists. It
            may be on the device "meta", with ``weights``.
        mesh: a mesh with the axis ``axis``; None is all ranks. Along other axes the model is whole
            again, and each may be given prompts of its own.
        plan: how linear layers are split, ``{"layers.*.mlp.up_proj": "colwise"}``, as a
            ``tp_plan`` of transformers; "auto" is the model's own, or where it has none, what its
            form asks for. Attention goes by groups of heads, feed-forward by hidden features, both
            ends by words.
        weights: where to read this rank's slices from; None cuts what the model holds.

    ``state_dict()`` has this rank's shards, `iris.hf.whole_state_dict` and ``save_pretrained``,
    which is collective, have the whole weights under the names they had.

    Raises SpecError for an unknown axis or plan, UnsupportedError for a model of another form.

    >>> model = iris.parallelize(AutoModelForCausalLM.from_pretrained(path))      # doctest: +SKIP
    >>> model.generate(**tokenizer("Hello", return_tensors="pt"))                 # doctest: +SKIP
    """
    _check(model)
    _check_plan(model, plan)
    _check_parts(model, weights)
    from iris.hf import decoder

    kinds = decoder.Kinds.find(model)
    ranks = tuple(range(current().num_ranks))
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise SpecError(f"mesh is a {type(mesh).__name__}", help="use iris.mesh(shape, names)")
    if mesh is not None:
        ranks = ProgramMesh.of(mesh).ranks
        mesh = mesh[axis] if axis in (mesh.mesh_dim_names or ()) else mesh
    with torch.no_grad():
        _Cutter(model, axis, mesh, weights).run()
    _take_over(model, kinds, mesh, axis, ranks)
    return model


def _take_over(
    model: nn.Module, kinds: Any, mesh: DeviceMesh | None, axis: str, ranks: tuple[int, ...]
) -> None:
    """Give a model whose weights are cut the methods that go with them."""
    from iris.hf import decoder, saving

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
    own["save_pretrained"] = partial(saving.save_pretrained, model, ranks=ranks)
    own["supports_gradient_checkpointing"] = False
    vars(model).update(own)


def _check(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in FAMILY or "lm_head" not in model._modules:
        raise UnsupportedError(
            f"iris.parallelize does not know the form of {type(model).__name__} ({kind})",
            help=f"it knows causal language models of {', '.join(FAMILY)}; others: iris.nn",
        )
    if getattr(config, "clip_qkv", None) is not None:
        raise UnsupportedError(f"{type(model).__name__} clips queries, keys and values")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedError(f"{type(model).__name__} looks at rows that come after")
    if hasattr(model, "spmd"):
        raise UnsupportedError(f"this {type(model).__name__} is parallelized already")


def _check_plan(model: nn.Module, plan: str | Mapping[str, str]) -> None:
    """SpecError that lists every linear layer that the plan does not split as attention and
    feed-forward need it.
    """
    if not isinstance(plan, Mapping) and plan != "auto":
        raise SpecError(f"plan {plan!r} is not known", help='pass "auto" or a dict of styles')
    config: Any = model.config
    given: Any = getattr(config, "base_model_tp_plan", None) if plan == "auto" else plan
    if not given and plan == "auto":
        return
    wrong = []
    for name, _ in model.get_submodule("model").named_modules():
        wanted = STYLES.get(name.rpartition(".")[2])
        rules = (r for r in given if fnmatch(name, r) or fnmatch(f"model.{name}", r))
        rule = next(rules, None)
        if wanted and (rule is None or given[rule] != wanted):
            found = "not split" if rule is None else given[rule]
            wrong.append(f"{_anonymous(name)}: {found}, not {wanted}")
    if wrong:
        raise SpecError(
            f"the plan does not split {type(model).__name__} as it must be:\n  "
            + "\n  ".join(dict.fromkeys(wrong)),
            help='plan="auto" is the model\'s own',
        )


def _check_parts(model: nn.Module, weights: Checkpoint | None) -> None:
    """UnsupportedError that lists what cannot be cut, or would be lost with what it is of."""
    wrong = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        linear = last in STYLES or name == "lm_head"
        replaced = linear or last in ("self_attn", "mlp", "embed_tokens") or name == "model"
        if linear and not _is_plain(module):
            wrong.append(f"{_anonymous(name)} is no plain linear layer but a {_kind(module)}")
        if replaced and (module._forward_hooks or module._forward_pre_hooks):
            wrong.append(f"{_anonymous(name)} has hooks")
    if not [*model.get_submodule("model.layers").children()]:
        wrong.append("it has no layers")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        wrong.append("activations are to be computed again for gradients")
    if weights is None and any(parameter.is_meta for parameter in model.parameters()):
        wrong.append("it is on the device meta, and no weights are given")
    if wrong:
        raise UnsupportedError(
            f"this {type(model).__name__} cannot be cut:\n  " + "\n  ".join(dict.fromkeys(wrong)),
            help="merge adapters, do not quantise, and set hooks when the model is parallelized",
        )


def _is_plain(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    whole = type(weight) is nn.Parameter and weight.is_floating_point()
    return whole and type(module).forward is nn.Linear.forward


def _kind(module: nn.Module) -> str:
    """What a module is, or where it is a linear layer, what its weight is."""
    weight = module._parameters.get("weight")
    if type(module).forward is not nn.Linear.forward or weight is None:
        return type(module).__name__
    return f"{type(module).__name__} of {type(weight).__name__} {weight.dtype}"


def _anonymous(name: str) -> str:
    return re.sub("[0-9]+", "*", name)


def _wants(new: M, *old: nn.Module) -> M:
    """``new``, whose parameters want gradients if any of ``old``'s did."""
    return new.requires_grad_(any(p.requires_grad for one in old for p in one.parameters()))


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
        old, scale = decoder.embed_tokens, getattr(decoder, "embedding_multiplier", 1.0)
        decoder.embed_tokens = _wants(
            ParallelEmbedding.from_weight(
                self.tensor("model.embed_tokens.weight"),
                scale=getattr(old, "scalar_embed_scale", scale),
                **self.where,
            ),
            old,
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
            _wants(head, model.lm_head)
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
        held = _wants(layer.self_attn, old)
        if held.copies > 1:  # a key head's gradient would be the sum of several ranks'
            for weight in held.parameters(recurse=False):
                weight.requires_grad_(False)

    def feed_forward(self, layer: Any, prefix: str) -> None:
        up, down, gate = (self.linear(f"{prefix}.{part}_proj") for part in ("up", "down", "gate"))
        old, options = layer.mlp, {"activation": layer.mlp.act_fn, **self.where}
        layer.mlp = _wants(ParallelMLP.from_linear(up, down, gate, **options), old)

    def norm(self, norm: nn.Module, name: str) -> nn.Module:
        if self.weights is not None and norm._parameters:
            wanted = any(weight.requires_grad for weight in norm.parameters())
            norm.weight = parameter(self.weights[name][:].to(self.model.dtype))
            norm.requires_grad_(wanted)
        return partition(norm, P())

    def tensor(self, name: str) -> Source:
        if self.weights is not None:
            return self.weights[name]
        return self.model.get_parameter(name)  # type: ignore[no-any-return]

    def linear(self, prefix: str) -> LinearSource:
        if self.weights is not None:
            return self.weights.linear(prefix)
        return self.model.get_submodule(prefix)  # type: ignore[no-any-return]
