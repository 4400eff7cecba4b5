"""``IRIS_CHECK=1`` around programs: results begin as NaN, stray stores of kernels are found."""

import os
import re

import pytest
import torch
import triton
import triton.language as tl

import iris
import iris.device.pickling  # kernels of this file travel to the ranks
from iris import P
from iris.runtime.guards import nans

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


@triton.jit(do_not_specialize=["at"])
def store_one(x, at):
    tl.store(x + at, 7.0)


@iris.spmd(in_specs=(P("tp", None), P(None, "tp"), P("tp", None)), out_specs=P("tp", None))
def mlp(x, up, down):
    return iris.reduce_scatter((iris.all_gather(x, "tp", dim=0) @ up).relu() @ down, "tp", dim=0)


def program_with_stray_store(lowering):
    os.environ.update(IRIS_CHECK="1", IRIS_LOWERING=lowering)
    try:
        ctx = iris.iris(1 << 22)
        rank, world = ctx.cur_rank, ctx.num_ranks
        x = ctx.zeros(10)
        store_one[(1,)](x, 0)
        for call in range(5):  # traced, captured, replayed
            draw = torch.Generator().manual_seed(call)
            whole = [
                torch.randint(-2, 3, n, generator=draw).float() for n in ((8, 6), (6, 8), (8, 6))
            ]
            mine = [t.chunk(world, dim)[rank] for t, dim in zip(whole, (0, 1, 0), strict=True)]
            got = mlp(*(t.to(ctx.device) for t in mine))
            want = (whole[0] @ whole[1]).relu() @ whole[2]
            assert torch.equal(got.cpu(), want.chunk(world)[rank])
        if rank == 1:
            store_one[(1,)](x, 10)
        with pytest.raises(iris.CheckError) as error:
            mlp(*(t.to(ctx.device) for t in mine))
        return str(error.value)
    finally:
        del os.environ["IRIS_CHECK"], os.environ["IRIS_LOWERING"]


@pytest.mark.parametrize("lowering", ["torch", "triton"])
def test_a_stray_store_is_found_at_the_end_of_the_next_program(ranks, lowering):
    for text in ranks(2).run(program_with_stray_store, lowering):
        assert re.match(
            r"the heap of rank 1 was written past the end of a block: 40 bytes allocated at "
            r"test_check_guards.py:\d+, byte 40 is not as it was\n",
            text,
        ), text


def test_memory_without_a_value_is_nan():
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert nans((2, 3), dtype=dtype, device=cpu).isnan().all()
    assert nans((2, 3), dtype=torch.float8_e4m3fn, device=cpu).float().isnan().all()
    assert nans((4,), dtype=torch.int32, device=cpu).tolist() == [-1] * 4
    assert nans((0, 3), dtype=torch.float32, device=cpu).shape == (0, 3)
