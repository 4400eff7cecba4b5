"""Boxes: tensors as the exchange kernel walks them, rows of at most 5 dims."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from iris.errors import UnsupportedError

DIMS = 5


def collapse(shape: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """The same walk in as few dims as possible: those of size 1 go, those that continue join.

    All of ``strides`` are walked at once, over the same ``shape``.
    """
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        joins = bool(sizes) and all(
            kept[-1] == step[dim] * size for kept, step in zip(steps, strides, strict=True)
        )
        if joins:
            sizes[-1] *= size
        else:
            sizes.append(size)
        for kept, step in zip(steps, strides, strict=True):
            if joins:
                kept[-1] = step[dim]
            else:
                kept.append(step[dim])
    return sizes or [1], [kept or [1] for kept in steps]


def _five(sizes: list[int], *steps: list[int]) -> list[list[int]]:
    """Sizes and strides with dims of size 1 in front, five in all."""
    if len(sizes) > DIMS:
        raise UnsupportedError(
            f"a tensor of sizes {sizes} and strides {steps[0]} does not collapse to {DIMS} dims",
            help="call .contiguous() on it first",
        )
    room = DIMS - len(sizes)
    return [[1] * room + sizes, *([0] * room + step for step in steps)]


def operand_box(x: Tensor) -> tuple[int, ...]:
    """``x`` for the kernel: rows, width, sizes of dims 1 to 3, strides of dims 0 to 4."""
    sizes, (steps,) = collapse(x.shape, x.stride())
    sizes, steps = _five(sizes, steps)
    return (math.prod(sizes[:-1]), sizes[-1], *sizes[1:4], *steps)


@dataclass(frozen=True)
class Piece:
    """A box of a member's operand, which is contiguous, that becomes a box of the result.

    ``source`` and ``target`` are the shapes of the whole tensors; the box has ``shape`` and begins
    at ``take`` of dim ``from_dim`` there, and at ``put`` of dim ``to_dim`` here.
    """

    member: int
    shape: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    take: int = 0
    put: int = 0
    from_dim: int = 0
    to_dim: int = 0

    def words(self) -> list[int]:
        """Member, rows, width, sizes of dims 1 to 3, then start and row strides there and here."""
        there, here = _contiguous(self.source), _contiguous(self.target)
        sizes, (take, put) = collapse(self.shape, there, here)
        if take[-1] != 1 or put[-1] != 1:  # rows of one element
            sizes, take, put = [*sizes, 1], [*take, 1], [*put, 1]
        sizes, take, put = _five(sizes, take, put)
        rows = math.prod(sizes[:-1])
        start = self.take * there[self.from_dim] if there else 0
        end = self.put * here[self.to_dim] if here else 0
        return [self.member, rows, sizes[-1], *sizes[1:4], start, *take[:4], end, *put[:4]]


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def pack_pieces(
    pieces: Sequence[Piece], rows: int, columns: int, device: torch.device
) -> tuple[Tensor, int]:
    """Return the table that the kernel reads, int64[pieces + 1, 17], and the number of blocks.

    The last word of a piece is the number of its first block; an entry behind the last closes the
    list.
    """
    table, blocks = [], 0
    for piece in pieces:
        words = piece.words()
        table.append([*words, blocks])
        blocks += -(-words[1] // rows) * -(-words[2] // columns)
    table.append([0] * 16 + [blocks])
    return torch.tensor(table, dtype=torch.int64, device=device), blocks
