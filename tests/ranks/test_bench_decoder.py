"""The models that the benchmark measures: iris and the plain form of its peers agree."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import iris
from iris.bench.decoder import Block, Decoder, Inputs, Place, Shape, program, rows_of
from iris.bench.torch_decoder import Peer, ways
from iris.lower.memory import memory_of

pytestmark = pytest.mark.ranks

SHAPE = Shape(hidden=16, inner=24, heads=8, layers=2, kv_heads=4, width=4, words=40)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Peak(TorchDispatchMode):
    """Counts the bytes that ops allocate, and the most that were held at one time."""

    def __init__(self):
        super().__init__()
        self.held, self.most = {}, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        given, made = (
            {x.untyped_storage()._cdata: x.untyped_storage() for x in tree_leaves(tree)
             if isinstance(x, torch.Tensor)}
            for tree in ((args, kwargs), out)
        )  # fmt: skip
        for key in made.keys() - given.keys() - self.held.keys():
            self.held[key] = made[key].nbytes()
            weakref.finalize(made[key], self.held.pop, key)
        self.most = max(self.most, sum(self.held.values()))
        return out


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
        split, also = Peer(module, place, "exact, split", batch * rows, 0)(*inputs.args)
        torch.testing.assert_close(split, want if layers else rows_of(want, place), **CLOSE)
        torch.testing.assert_close(also, kept, **CLOSE)
        for _ in range(3):
            found, new = step(x, *inputs.args[1:])
            part = rows_of(want, place) if spread else want
            torch.testing.assert_close(found, part, **CLOSE)
            torch.testing.assert_close(new, kept, **CLOSE)
        del found, new
        with Peak() as peak:
            step(x, *inputs.args[1:])
    assert memory_of(step.programs[-1].executable).local == peak.most


@pytest.mark.parametrize("layers", [0, 2], ids=["layer", "model"])
@pytest.mark.parametrize(("batch", "rows", "held"), [(3, 1, 8), (1, 256, 0), (2, 5, 0)], ids=str)
def test_iris_and_its_peers_compute_the_same(ranks, layers, batch, rows, held):
    ranks(2).run(_run, layers, batch, rows, held)


def test_which_peers_there_are():
    assert ways(1, 4) == ["one-shot", "two-shot"]
    assert ways(512, 4) == ["one-shot", "two-shot", "fused", "low contention"]
    assert ways(2048, 4) == ["two-shot", "fused", "low contention"]
