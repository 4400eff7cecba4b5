"""Byte-level BPE: text to token ids and back, with the vocabulary of a GGUF file.

The algorithm is that of GPT-2 (Radford et al., 2019), with the pre-tokenisation that SmolLM2 was
trained with: every digit stands alone.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import regex

# Contractions, words, single digits, punctuation, white space; one leading space joins a word.
_PIECE = regex.compile(
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
)


def _byte_symbols() -> tuple[str, ...]:
    """The printable character that stands for each byte in the vocabulary."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(spare)) for byte in range(256))


_SYMBOLS = _byte_symbols()
_BYTES = {symbol: byte for byte, symbol in enumerate(_SYMBOLS)}


class Tokenizer:
    """Turns text into ids of ``tokens``, joining pairs in the order of ``merges``.

    Args:
        tokens: the vocabulary; a token's place is its id.
        merges: pairs as ``"left right"``, the first to be joined first.
        unknown: the id of a byte that the vocabulary lacks (some control characters).
    """

    def __init__(self, tokens: Iterable[str], merges: Iterable[str], unknown: int) -> None:
        self.tokens = tuple(tokens)
        self.unknown = unknown
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        self._order = {tuple(pair.split(" ")): index for index, pair in enumerate(merges)}

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``; where no byte is unknown, ``decode`` gives the text back."""
        tokens = (token for piece in _PIECE.findall(text) for token in self._join(piece))
        return [self._ids.get(token, self.unknown) for token in tokens]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        symbols = "".join(self.tokens[index] for index in ids)
        return bytes(_BYTES[symbol] for symbol in symbols).decode("utf-8", "replace")

    def _join(self, piece: str) -> list[str]:
        parts = [_SYMBOLS[byte] for byte in piece.encode()]
        never = len(self._order)
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: self._order.get(pair, never))
            if best not in self._order:
                break
            parts = list(_joined(parts, best))
        return parts


def _joined(parts: list[str], pair: tuple[str, str]) -> Iterator[str]:
    """``parts`` with every occurrence of ``pair`` made one, from the left."""
    index = 0
    while index < len(parts):
        if tuple(parts[index : index + 2]) == pair:
            yield "".join(pair)
            index += 2
        else:
            yield parts[index]
            index += 1
