"""One whole layer (norms, q, k and v, attention, its output, feed-forward) beside the same layer
with torch's symmetric-memory collectives and cuBLAS; both in CUDA graphs.
"""

import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from iris.bench.decoder import (
    SHAPES,
    SPREAD,
    Block,
    Inputs,
    Peer,
    Place,
    is_close,
    program,
    rows_of,
)
from iris.bench.model import HELD, agree, captured, served
from iris.bench.peers import symmetric
from iris.bench.timing import Row, paced

ROWS = (1, 64, 2048)


def measure(args: Namespace) -> Iterator[Row]:
    """All points; runs on every rank. Few rows are a decode step, many a prefill."""
    align = symmetric(64)[1].barrier
    for name in args.models:
        shape, place = SHAPES[name], Place.here()
        block = Block(shape, place, 2)
        for M in ROWS:
            decode = M < SPREAD
            sizes = (M, 1, HELD) if decode else (1, M, 0)
            inputs = Inputs.of(shape, place, *sizes, layers=0)
            point = {"model": name, "M": M}
            with torch.no_grad():
                yield from _point(point, block, place, inputs, align)


def _point(
    point: dict[str, Any],
    block: Block,
    place: Place,
    inputs: Inputs,
    align: Callable[[], object],
) -> Iterator[Row]:
    hidden, M = inputs.x.shape[-1], point["M"]
    want = Peer(block, place, "exact", M, hidden)(*inputs.args)[0]
    spread = M >= SPREAD
    x = rows_of(inputs.x, place) if spread else inputs.x
    ours = served(program(block, inputs, spread), x, inputs)
    steps: dict[str, Callable[[], Any]] = {"iris": ours}
    for how in ("one-shot", "two-shot"):
        if how == "two-shot" or M <= 512:
            steps[f"torch {how}"] = captured(Peer(block, place, how, M, hidden), inputs)

    def part(name: str) -> Tensor:
        return rows_of(want, place) if name == "iris" and spread else want

    right = {name: agree(is_close(step()[0], part(name))) for name, step in steps.items()}
    names = list(steps)
    random.Random(M).shuffle(names)
    for name, spent in paced({n: steps[n] for n in names}, align).items():
        yield Row("layer", point, name, spent, right[name])
