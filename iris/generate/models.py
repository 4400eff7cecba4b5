"""What a rank needs to build its part of a model and to speak for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from iris.errors import UnsupportedError
from iris.nn import Checkpoint

HELP = "pip install 'iris-spmd[hf]'"


@dataclass(frozen=True)
class Model:
    """A model that is not built yet; it can be sent to ranks.

    ``config`` is transformers'; ``weights`` are read slice by slice, from a folder where it is a
    path; ``decode`` turns tokens into text.
    """

    config: Any
    weights: Checkpoint | Path
    decode: Callable[[Sequence[int]], str]

    def build(self) -> Any:
        """The model with this rank's slices of the weights. Collective."""
        from transformers import AutoModelForCausalLM

        from iris.hf import parallelize

        held = self.weights
        weights = Checkpoint.open(held) if isinstance(held, Path) else held
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            model = make(self.config, dtype=self.config.dtype)
        return parallelize(model.eval(), weights=weights)


@dataclass(frozen=True)
class Decoder:
    """Tokens to text, by a tokenizer of transformers."""

    tokenizer: Any

    def __call__(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(tokens)
        return text


def load(name: str) -> tuple[Model, Callable[[str, bool], list[int]]]:
    """A model by name ("smollm2") or folder of safetensors, and what turns a prompt into its
    tokens: by its chat template, or as it is.

    Raises UnsupportedError where a package is missing, or there is no such model.
    """
    try:
        import transformers
    except ImportError:
        raise UnsupportedError("python -m iris.generate needs transformers", help=HELP) from None
    if name == "smollm2":
        from iris.generate import smollm2

        return smollm2.load()
    path = Path(name)
    if not (path / "config.json").is_file():
        raise UnsupportedError(
            f"there is no model at {name}",
            help='give "smollm2", or a folder with config.json, a tokenizer and safetensors files',
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def encode(prompt: str, chat: bool = True) -> list[int]:
        if tokenizer.chat_template is None or not chat:
            return list(tokenizer(prompt).input_ids)
        turn = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    return Model(transformers.AutoConfig.from_pretrained(path), path, Decoder(tokenizer)), encode
