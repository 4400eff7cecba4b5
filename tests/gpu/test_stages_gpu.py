"""Fused stages in programs on GPU ranks, captured and replayed, against torch's ops."""

import pytest
import torch
from stage_programs import FP8, Case, check

import iris
from iris.testing import small_integers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(240),
]

BF16 = torch.bfloat16
CASES = {
    "qkv, each with its bias": Case(
        "gather", 520, 264, 512, BF16, weights=3, bias=True, linear=True
    ),
    "swiglu": Case("gather", 256, 512, 512, BF16, weights=2, residual=True),
    "gathered columns": Case("gather", 200, 384, 1000, BF16, dim=1, epilogue="relu", again=True),
    "fp8": Case("gather", 128, 256, 512, FP8, dim=0),
    "fp8 gathered columns": Case("gather", 96, 256, 512, FP8, dim=1),
    "fp8 scattered": Case("scatter", 136, 256, 512, FP8, dim=0),
    "fp8 scattered columns": Case("scatter", 136, 256, 512, FP8, dim=1),
    "fp8 summed": Case("reduce", 40, 256, 512, FP8),
    "int8": Case("gather", 128, 256, 512, torch.int8),
    "int8 summed": Case("reduce", 64, 256, 512, torch.int8),
    "one-shot, norm": Case(
        "reduce", 5, 4096, 512, BF16, bias=True, residual=True, norm="fused", algorithm="one-shot"
    ),
    "two-shot, norm": Case(
        "reduce", 300, 1000, 512, BF16, residual=True, norm="written", algorithm="two-shot"
    ),
    "product, then sum and norm": Case(
        "reduce", 8, 2048, 512, BF16, residual=True, norm="fused", algorithm="unfused"
    ),
    "sum and norm": Case("norm", 17, 4096, 1, BF16, residual=True, norm="written"),
    "sent": Case("send", 300, 520, 264, torch.float16, bias=True, epilogue="gelu", linear=True),
}


def run_cases(names):
    ctx = iris.iris(1 << 28)
    found = {}
    for name in names:
        found[name] = check(CASES[name], ctx, calls=15)
        torch.cuda.synchronize()
        ctx.watch.check(synchronized=True)
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("group", ["gather", "scatter", "reduce", "norm", "send"])
def test_stages_in_programs(ranks, group, world):
    names = [name for name, case in CASES.items() if case.kind == group]
    for found in ranks(world).run(run_cases, names, timeout=200):
        for name, rows in found.items():
            way = CASES[name].algorithm
            ways = {row[1] for row in rows}
            assert way in ways or (way == "fused" and ways & {"one-shot", "two-shot"}), (name, rows)


def on_a_side_stream():
    ctx = iris.iris(1 << 26)
    side = torch.cuda.Stream()
    for step in range(20):
        A = [small_integers((40, 64), r, step, BF16).cuda() for r in range(ctx.num_ranks)]
        B = [small_integers((64, 128), r, step + 50, BF16).cuda() for r in range(ctx.num_ranks)]
        want = sum((a @ b).float() for a, b in zip(A, B, strict=True)).to(BF16)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if step % ctx.num_ranks == ctx.cur_rank:
                torch.cuda._sleep(500_000)
            mine = A[ctx.cur_rank], B[ctx.cur_rank]
            done = ctx.ops.matmul_all_reduce(None, *mine, async_op=True, config="one-shot")
        assert torch.equal(done.wait(), want), step
        side.synchronize()  # operands of this turn are not freed before they are read


def test_a_handle_makes_a_stream_wait(ranks):
    ranks(2).run(on_a_side_stream)
