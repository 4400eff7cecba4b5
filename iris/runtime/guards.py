"""Guard words around every block of the heap (``IRIS_CHECK=1``)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from iris.runtime.heap import Record

GUARD_BYTES = 256  # behind a block, and in front of it (there at least its alignment)
_WORD = 0xA5
_POISON = 0xFF  # NaN in every float type, -1 in signed integers


class Guards:
    """The guards of one rank's heap; ``view(offset, nbytes)`` is its memory there."""

    def __init__(self, rank: int, view: Callable[[int, int], Tensor]) -> None:
        self._rank = rank
        self._view = view

    def put(self, block: "Record") -> None:
        """Fill the guards of a new block, and the block itself with NaN."""
        self._view(block.offset, block.nbytes).fill_(_POISON)
        for _, at, nbytes in self._around(block):
            self._view(at, nbytes).fill_(_WORD)

    def faults(self, blocks: Iterable["Record"]) -> list[str]:
        """Say beside which blocks something was written, where, and on which side; once."""
        return [text for block in blocks for text in self._faults(block)]

    def _faults(self, block: "Record") -> Iterator[str]:
        for side, at, nbytes in self._around(block):
            guard = self._view(at, nbytes)
            changed = _different(guard)
            if changed:
                guard.fill_(_WORD)
                near = changed[-1] if side.startswith("before") else changed[0]
                yield (
                    f"the heap of rank {self._rank} was written {side} of a block: "
                    f"{block.nbytes} bytes allocated at {block.line}, "
                    f"byte {at + near - block.offset} is not as it was"
                )

    def _around(self, block: "Record") -> Iterator[tuple[str, int, int]]:
        yield "before the start", block.offset - block.lead, block.lead
        yield "past the end", block.offset + block.nbytes, GUARD_BYTES


def nans(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty`` of what has no value yet: NaN, where the type has one."""
    x = torch.empty(shape, dtype=dtype, device=device)
    x.view(-1).view(torch.uint8).fill_(_POISON)
    return x


def _different(guard: Tensor) -> list[int]:
    """Places of bytes that are not as ``put`` left them."""
    if guard.device.type == "cpu":  # past what notes the accesses of torch operations
        return [int(at) for at in (guard.numpy() != _WORD).nonzero()[0]]
    return [int(at) for at in torch.nonzero(guard != _WORD).flatten()]
