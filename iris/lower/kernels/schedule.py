"""Who computes which part of which output tile: decided on the host, followed by the kernels.

A *segment* is a run of steps along the contracted dim of one tile. A kernel's program with number ``p`` (in the order of starting)
runs through its segments in one pipelined loop. Whole waves of tiles are dealt out one tile a program; what is left over is cut
along the contracted dim into equal shares (stream-K), if that is shorter than one more wave. The program that finishes a cut tile
last adds the parts in their order, so results do not depend on timing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Steps that cutting a tile costs: storing a part and adding the parts, in units of one step of the loop.
CUT_COST = 12
MIN_STEPS = 4
SEGMENT_WORDS = 8


class Segment(NamedTuple):
    """Steps ``first .. first + count`` of tile (row, column) of ``weight``; ``part`` of ``parts`` of that tile.

    ``space`` is the tile's first place in the scratch memory for parts; ``cut`` numbers the cut tiles.
    """

    weight: int
    row: int
    column: int
    first: int
    count: int
    part: int = 0
    parts: int = 1
    space: int = 0
    cut: int = 0


def tile_order(rows: int, columns: int, group: int, first_row: int) -> list[tuple[int, int]]:
    """All tiles (row, column), ``group`` rows at a time column by column, starting at row ``first_row``."""
    order = []
    for start in range(0, rows, group):
        band = range(start, min(start + group, rows))
        order += [((row + first_row) % rows, column) for column in range(columns) for row in band]
    return order


@dataclass(frozen=True)
class Schedule:
    """Segments of every program; what the kernels read is ``table`` and ``heads`` (see ``pack``)."""

    programs: tuple[tuple[Segment, ...], ...]
    weights: int
    parts: int  # places for parts in the scratch memory
    cuts: int  # tiles that are cut

    def pack(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ``heads`` int32[weights, programs, 2] (first segment, steps) and ``table`` int32[segments, 8]."""
        heads, table = [], []
        for weight in range(self.weights):
            for program in self.programs:
                mine = [segment for segment in program if segment.weight == weight]
                heads.append((len(table), sum(segment.count for segment in mine)))
                table += [segment[1:] for segment in mine]
        return (
            torch.tensor(heads, dtype=torch.int32, device=device),
            torch.tensor(table or [(0,) * SEGMENT_WORDS], dtype=torch.int32, device=device),
        )


def make_schedule(
    orders: Sequence[Sequence[tuple[int, int]]], depth: int, programs: int, cut: bool = True
) -> Schedule:
    """Share the tiles of several weights (one order each, run in this order) among ``programs``.

    ``depth`` is the number of steps of a whole tile (at least 1).
    """
    tiles = [(weight, *tile) for weight, order in enumerate(orders) for tile in order]
    whole = _whole_tiles(len(tiles), depth, programs) if cut else len(tiles)
    shares: list[list[Segment]] = [[] for _ in range(programs)]
    for index, tile in enumerate(tiles[:whole]):
        shares[index % programs].append(Segment(*tile, 0, depth))
    parts, cuts = _deal_cut_tiles(tiles[whole:], depth, shares)
    return Schedule(tuple(map(tuple, shares)), len(orders), parts, cuts)


def _whole_tiles(tiles: int, depth: int, programs: int) -> int:
    """How many of the tiles to deal out whole: all, or whole waves less one so that the rest can be shared evenly."""
    left = tiles % programs
    if left == 0:
        return tiles
    options = {tiles: -(-tiles // programs) * depth}
    for whole in (tiles - left, tiles - left - programs):
        if whole >= 0:
            shared = -(-(tiles - whole) * depth // programs)
            fan_in = -(-programs // (tiles - whole))
            options[whole] = whole // programs * depth + shared + CUT_COST + CUT_COST * fan_in // 3
    return min(options, key=lambda whole: options[whole])


def _deal_cut_tiles(
    tiles: Sequence[tuple[int, int, int]], depth: int, shares: list[list[Segment]]
) -> tuple[int, int]:
    """Cut the steps of ``tiles``, end to end, into one share a program. Returns how many parts and cut tiles that makes."""
    total = len(tiles) * depth
    if total == 0:
        return 0, 0
    bounds = _bounds(total, depth, len(shares))
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in tiles]  # (program, first, count) a tile
    for program, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        while start < stop:
            tile, first = divmod(start, depth)
            count = min(stop - start, depth - first)
            pieces[tile].append((program, first, count))
            start += count
    space = cuts = 0
    for tile, cut in zip(tiles, pieces, strict=True):
        parts = len(cut)
        for part, (program, first, count) in enumerate(cut):
            shares[program].append(Segment(*tile, first, count, part, parts, space, cuts))
        if parts > 1:
            space, cuts = space + parts, cuts + 1
    return space, cuts


def _bounds(total: int, depth: int, programs: int) -> list[int]:
    """Ends of the shares, moved to a tile's edge where they would leave fewer than MIN_STEPS of it."""
    bounds = []
    for program in range(programs + 1):
        bound = program * total // programs
        rest = bound % depth
        if rest < MIN_STEPS:
            bound -= rest
        elif depth - rest < MIN_STEPS:
            bound += depth - rest
        bounds.append(bound)
    return bounds
