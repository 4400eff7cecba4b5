"""The models that the benchmark measures: iris and the plain form of its peers agree."""

import pytest
import torch

import iris
from iris.bench.decoder import Block, Decoder, Inputs, Peer, Place, Shape, program, rows_of

pytestmark = pytest.mark.ranks

SHAPE = Shape(hidden=16, inner=24, heads=8, layers=2, kv_heads=4, width=4, words=40)


def _run(layers, batch, rows, held):
    ctx = iris.iris(1 << 22)
    place = Place(ctx.cur_rank, ctx.num_ranks, ctx.device, torch.float32)
    module = Decoder(SHAPE, place) if layers else Block(SHAPE, place, 2)
    inputs = Inputs.of(SHAPE, place, batch, rows, held, layers)
    spread = not layers and batch * rows >= 256
    x = rows_of(inputs.x, place) if spread else inputs.x
    step = program(module, inputs, spread)
    with torch.no_grad():
        want, kept = Peer(module, place, "exact", batch * rows, SHAPE.hidden)(*inputs.args)
        for _ in range(3):
            found, new = step(x, *inputs.args[1:])
            close = {"rtol": 1e-4, "atol": 1e-4}
            part = rows_of(want, place) if spread else want
            torch.testing.assert_close(found, part, **close)
            torch.testing.assert_close(new, kept, **close)


@pytest.mark.parametrize("layers", [0, 2], ids=["layer", "model"])
@pytest.mark.parametrize(("batch", "rows", "held"), [(3, 1, 8), (1, 256, 0), (2, 5, 0)], ids=str)
def test_iris_and_its_peers_compute_the_same(ranks, layers, batch, rows, held):
    ranks(2).run(_run, layers, batch, rows, held)
