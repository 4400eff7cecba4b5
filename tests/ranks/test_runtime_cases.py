"""Faults that users of other libraries reported: sizes that change, flags that two ranks write."""

import os

import pytest
import torch

import iris
from iris import P
from iris.check.log import Atomic
from iris.lower.kernels import collectives
from iris.lower.kernels.host import rows_of
from iris.lower.kernels.matmul_all_reduce import MatmulAllReduce

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(90)]


@iris.spmd(in_specs=(P("tp", None), P(None, "tp"), P("tp", None)), out_specs=P("tp", None))
def mlp(x, up, down):
    return iris.reduce_scatter((iris.all_gather(x, "tp", dim=0) @ up).relu() @ down, "tp", dim=0)


def sizes_that_change(lowering):
    """G10, N7: few rows, many (a larger workspace), none, few again, with other tensors between."""
    os.environ["IRIS_LOWERING"] = lowering
    try:
        ctx = iris.iris(1 << 22)
        world, rank = ctx.num_ranks, ctx.cur_rank
        held = []
        for call, rows in enumerate((8, 37, 8, 0, 37, 8, 0)):
            draw = torch.Generator().manual_seed(call)
            x, up, down = (
                torch.randint(-2, 3, n, generator=draw).float() for n in ((rows, 6), (6, 8), (8, 6))
            )
            want = ((x @ up).relu() @ down).chunk(world)
            held = [*held[-2:], ctx.full((100 * (call + 1),), float(call))]
            got = mlp(x.chunk(world)[rank], up.chunk(world, 1)[rank], down.chunk(world)[rank])
            assert torch.equal(got, want[rank])
            assert all(t.eq(t[0]).all() for t in held)
        return True
    finally:
        del os.environ["IRIS_LOWERING"]


@pytest.mark.parametrize("lowering", ["torch", "triton"])
def test_sizes_that_change_keep_old_workspaces_right(ranks, lowering):
    assert ranks(2).run(sizes_that_change, lowering) == [True] * 2


@iris.spmd(in_specs=(P("tp", None), P(None, "tp")), out_specs=P(None, "tp"))
def quantised(x, w):
    y = iris.all_gather(x, "tp", dim=0) @ w
    return (y * 8).round().clamp(-127, 127).to(torch.int8)


def quantise():
    """N6: a product that ends as bytes, in an interpreted kernel."""
    os.environ["IRIS_LOWERING"] = "triton"
    try:
        ctx = iris.iris(1 << 22)
        for call in range(3):
            draw = torch.Generator().manual_seed(call)
            x, w = torch.randn(8, 6, generator=draw), torch.randn(6, 8, generator=draw)
            mine = w.chunk(2, 1)[ctx.cur_rank]
            want = ((x @ mine) * 8).round().clamp(-127, 127).to(torch.int8)
            assert want.unique().numel() > 5
            assert torch.equal(quantised(x.chunk(2)[ctx.cur_rank], mine), want)
        return True
    finally:
        del os.environ["IRIS_LOWERING"]


def test_products_that_end_as_bytes(ranks):
    assert ranks(2).run(quantise) == [True] * 2


def flag_words():
    """I3: words of the heaps that this rank changes so that others see it."""
    os.environ["IRIS_CHECK"] = "1"
    try:
        ctx = iris.iris(1 << 21)
    finally:
        del os.environ["IRIS_CHECK"]
    world, m = ctx.num_ranks, rows_of(10, ctx.num_ranks, ctx.cur_rank)
    sizes = [rows_of(10, world, rank) for rank in range(world)]
    gather = collectives.all_gather(ctx, ctx.world, [m, 8], sizes, 0, torch.float32)
    reduce = MatmulAllReduce.create(
        ctx, ctx.world, M=10, N=20, K=8, dtype=torch.float32, one_shot=False
    )
    ctx.barrier()
    gather(torch.ones(m, 8), out=torch.empty(10, 8))
    reduce(torch.ones(10, 8), torch.ones(8, 20), out=torch.empty(10, 20))
    words = {
        (entry.owner, entry.offset // entry.size)
        for entry in ctx.checks.races.recorder.take()
        if isinstance(entry, Atomic) and entry.releases and entry.system
    }
    ctx.barrier()
    return words


def test_every_flag_word_has_one_writing_rank(ranks):
    answers = ranks(3).run(flag_words)
    assert all(len(words) > 6 for words in answers)
    assert sum(map(len, answers)) == len(set().union(*answers))
