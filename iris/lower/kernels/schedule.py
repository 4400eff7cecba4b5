"""Which parts of which output tiles to compute: decided on the host, dealt out on the device.

A *segment* is a run of steps along the contracted dim of one tile. Program p of a team of R
computes segments p, p + R, p + 2 R, ... of the list in one pipelined loop. The list has whole tiles
first. Where the last wave of tiles would leave most programs idle, its tiles are cut along the
contracted dim instead (split-K), so that all programs have a part. Cutting does not depend on the
team, so neither do the bits of the results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

FEW_ROWS = 64  # of a product: tiles are narrow, launches short, and sums are made in one step

# What a cut costs, in steps of the loop: storing a part and meeting, and adding each of the parts.
CUT_COST = 12
PART_COST = 0.5
SEGMENT_WORDS = 8


class Segment(NamedTuple):
    """Steps ``first .. first + count`` of tile (row, column): ``part`` of ``parts`` of it.

    ``space`` is the tile's first place in the scratch memory for parts; ``cut`` numbers the cut
    tiles.
    """

    row: int
    column: int
    first: int
    count: int
    part: int = 0
    parts: int = 1
    space: int = 0
    cut: int = 0


def tile_order(rows: int, columns: int, group: int, first_row: int) -> list[tuple[int, int]]:
    """All tiles (row, column): ``group`` rows at a time, by columns, from row ``first_row`` on."""
    order = []
    for start in range(0, rows, group):
        band = range(start, min(start + group, rows))
        order += [((row + first_row) % rows, column) for column in range(columns) for row in band]
    return order


@dataclass(frozen=True)
class Schedule:
    """Segments of several weights, one weight after the other.

    ``heads[i] = (first, cut, end)``: weight i has whole tiles ``first .. cut`` and parts of tiles
    ``cut .. end`` of ``segments``.
    """

    segments: tuple[Segment, ...]
    heads: tuple[tuple[int, int, int], ...]
    depth: int
    parts: int
    cuts: int

    def pack(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ``heads`` int32[weights, 3] and ``table`` int32[segments, 8]."""
        table = self.segments or (Segment(0, 0, 0, 0),)
        return (
            torch.tensor(self.heads, dtype=torch.int32, device=device),
            torch.tensor(table, dtype=torch.int32, device=device),
        )


def make_schedule(
    orders: Sequence[Sequence[tuple[int, int]]], depth: int, programs: int, cut: bool = True
) -> Schedule:
    """The segments of the tiles of several weights (one order each), for ``programs`` programs.

    ``depth`` is the number of steps of a whole tile (at least 1).
    """
    total = sum(map(len, orders))
    left = total % programs
    parts = _parts(left, depth, programs) if cut else 1
    whole = total - left if parts > 1 else total
    segments: list[Segment] = []
    heads = []
    space = cuts = index = 0
    for order in orders:
        first = len(segments)
        plain = order[: max(0, whole - index)]
        segments += [Segment(*tile, 0, depth) for tile in plain]
        edge = len(segments)
        for tile in order[len(plain) :]:
            bounds = [depth * part // parts for part in range(parts + 1)]
            for part, (start, stop) in enumerate(pairwise(bounds)):
                segments.append(Segment(*tile, start, stop - start, part, parts, space, cuts))
            space, cuts = space + parts, cuts + 1
        heads.append((first, edge, len(segments)))
        index += len(order)
    return Schedule(tuple(segments), tuple(heads), depth, space, cuts)


def _parts(tiles: int, depth: int, programs: int) -> int:
    """Into how many parts to cut each of the ``tiles`` of the last wave; 1: do not."""
    costs = {1: float(depth)}
    for parts in range(2, (min(programs // tiles, depth) if tiles else 1) + 1):
        costs[parts] = -(-depth // parts) + CUT_COST + PART_COST * parts
    return min(costs, key=costs.__getitem__)


def last_wave(tiles: int, depth: int, programs: int) -> float:
    """Steps that the last ``tiles`` tiles take, fewer than there are programs."""
    parts = _parts(tiles, depth, programs)
    if parts == 1:
        return depth if tiles else 0
    return -(-depth // parts) + CUT_COST + PART_COST * parts
