"""One whole layer (norms, q, k and v, attention, its output, feed-forward) beside the same layer in
plain torch with symmetric memory (see ``model``); all in CUDA graphs.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from iris.bench.decoder import SHAPES, SPREAD, Block, Inputs, Place, program, rows_of
from iris.bench.model import HELD, Ready, captured, served, timed
from iris.bench.peers import symmetric
from iris.bench.timing import Row
from iris.bench.torch_decoder import Peer, ways

ROWS = (1, 64, 2048)


def measure(args: Namespace) -> Iterator[Row]:
    """All points; runs on every rank. Few rows are a decode step, many a prefill."""
    align = symmetric(64)[1].barrier
    for name in args.models:
        shape, place = SHAPES[name], Place.here()
        block = Block(shape, place, 2)
        for M in ROWS:
            sizes = (M, 1, HELD) if M < SPREAD else (1, M, 0)
            inputs = Inputs.of(shape, place, *sizes, layers=0)
            point = {"model": name, "M": M}
            with torch.no_grad():
                yield from _point(point, block, place, inputs, align)


def _point(
    point: dict[str, Any], block: Block, place: Place, inputs: Inputs, align: Callable[[], object]
) -> Iterator[Row]:
    hidden, M = inputs.x.shape[-1], point["M"]
    want = Peer(block, place, "exact", M, hidden)(*inputs.args)[0]
    spread = M >= SPREAD

    def part(split: bool) -> Tensor:
        return rows_of(want, place) if split else want

    x = rows_of(inputs.x, place) if spread else inputs.x

    def ours() -> Any:
        return served(program(block, inputs, spread), x, inputs)

    ready = {"iris": Ready.by("iris", ours, part(spread))}
    for how in ways(M, place.size):
        peer = Peer(block, place, how, M, hidden)
        name = f"torch {how}"
        ready[name] = Ready.by(name, partial(captured, peer, inputs), part(peer.split))
    yield from timed("layer step", point, ready, align)
