"""Fused stages in programs on GPU ranks, many in a row without a meeting, against the CPU.

What is right comes from the CPU: loading a kernel of cuBLAS may wait behind a peer's kernel.
"""

import random
from dataclasses import replace

import pytest
import torch
from stage_programs import (
    FP8,
    KINDS,
    LINEAR,
    POINTWISE,
    Case,
    compare,
    expected,
    in_specs,
    moved,
    operands,
    program,
    tuple_of,
)

import iris
from iris.lower.kernels.config import GemmConfig
from iris.testing import small_integers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(240),
]

BF16, INT8 = torch.bfloat16, torch.int8
# Small tiles: several of each stage here, some cut, and quick to compile.
TILES = GemmConfig(64, 64, 64, 4, 3, pieces=1, copy=4096)
N = K = 384  # over 2, 3, 4 and 8 ranks in multiples of 16, as products of bytes need them
FUSED = [
    Case("gather", 100, N, K, BF16, weights=3, bias=True, linear=True),
    Case("gather", 136, N, K, BF16, weights=2, residual=True),  # SwiGLU
    Case("gather", 9, N, K, BF16, epilogue="relu", again=True),  # ranks without rows
    Case("gather", 72, N, 1000, BF16, dim=1, bias=True, again=True),
    Case("gather", 100, N, K, FP8),
    Case("gather", 96, N, K, FP8, dim=1),
    Case("gather", 100, N, K, INT8),
    Case("scatter", 100, N, K, BF16, epilogue="scale", bias=True, residual=True),
    Case("scatter", 5, N, K, BF16, linear=True),
    Case("scatter", 72, N, K, FP8),
    Case("scatter", 72, N, K, FP8, dim=1),
    Case("scatter", 100, N, K, INT8),
    Case("send", 100, N, 264, torch.float16, bias=True, epilogue="gelu", linear=True),
    Case("send", 9, N, K, BF16, dim=1, epilogue="clamp"),
    Case("send", 100, N, K, INT8),
    Case("norm", 17, 4096, 1, BF16, residual=True, norm="written"),
]
REDUCED = [
    Case("reduce", 5, 1000, K, BF16, bias=True, residual=True, norm="fused"),
    Case("reduce", 100, N, K, BF16, residual=True, norm="written"),
    Case("reduce", 40, N, K, FP8),
    Case("reduce", 40, N, K, INT8),
]
SOAKS = {
    "fused": FUSED,
    "one-shot": REDUCED,
    "two-shot": REDUCED,
    "unfused": [Case("reduce", 8, 2048, 512, BF16, residual=True, norm="fused")],
}


def decorated(cases, algorithm, **options):
    """All ``cases`` as one program: ranks share out the compiling of its kernels."""
    runs = [program(case) for case in cases]
    config = iris.StageConfig(algorithm, TILES)

    @iris.spmd(
        in_specs=([in_specs(case) for case in cases],), lowering="triton", config=config, **options
    )
    def stages(given):
        return [run(*args) for run, args in zip(runs, given, strict=True)]

    return stages


def operands_and_results(cases, ctx):
    """Of three calls: operands on the GPU, right results on the CPU, whether they are exact."""
    place = ctx.cur_rank, ctx.num_ranks
    for seed in range(3):
        exact = seed < 2
        given = [operands(case, seed, exact, *place) for case in cases]
        want = [expected(case, seed, exact, *place) for case in cases]
        yield moved(given, ctx.device), want, exact


def check_all(cases, results):
    """Compare, when all calls are through."""
    torch.cuda.synchronize()
    iris.current().watch.check(synchronized=True)
    for got, wants, exact in results:
        for case, ours, want in zip(cases, got, wants, strict=True):
            compare(case, moved(tuple_of(ours), "cpu"), want, exact)


def soak(algorithm):
    ctx, cases = iris.iris(1 << 28), SOAKS[algorithm]
    data = list(operands_and_results(cases, ctx))
    for replay, calls in ((False, 200), (True, 50)):
        stages = decorated(cases, algorithm, replay=replay)
        stages(data[0][0])
        results, late = [], random.Random(calls)  # draws alike on all ranks
        for call in range(calls):
            given, want, exact = data[call % 3]
            if late.randrange(2 * ctx.num_ranks) == ctx.cur_rank:
                torch.cuda._sleep(300_000)
            results.append((stages(given), want, exact))
        check_all(cases, results)
    return [row.choice.algorithm for row in stages.trace(given).lower().explain().rows]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("algorithm", SOAKS)
def test_calls_and_replays_in_a_row(ranks, algorithm, world):
    # ROCm/iris#226
    for ways in ranks(world).run(soak, algorithm, timeout=200):
        assert len(ways) == len(SOAKS[algorithm])
        assert set(ways) == {algorithm}


def random_cases(kind, aligned, rng):
    """Cases of one form, whose kernels differ little, and of random sizes."""
    form = Case(
        kind,
        *(0, 0, 0, rng.choice([BF16, torch.float16])),
        dim=rng.randrange(2) if kind in ("gather", "scatter", "send") else 0,
        layout=rng.choice(["rows", "columns", "strided"]) if kind != "norm" else "rows",
        linear=rng.random() < 0.5 and kind != "norm",
        weights=rng.randint(1, 3) if kind == "gather" else 1,
        epilogue=rng.choice([*(POINTWISE if kind in ("gather", "send") else LINEAR)]),
        bias=rng.random() < 0.5,
        residual=rng.random() < 0.5,
        norm="fused" if kind == "norm" else "",
        algorithm=rng.choice(["one-shot", "two-shot"]) if kind == "reduce" else "fused",
    )
    sizes = range(144, 241, 48) if aligned else range(135, 250, 6)  # by 3: multiples of 16, or odd
    for _ in range(6):
        size = {"M": rng.randrange(200), "N": rng.choice(sizes), "K": rng.choice(sizes)}
        yield replace(form, **size)


def random_programs(kind):
    ctx, rng = iris.iris(1 << 28), random.Random(kind)
    for number in range(4):
        for case in random_cases(kind, number % 2 == 0, rng):
            stages, results = decorated([case], case.algorithm), []
            for given, want, exact in operands_and_results([case], ctx):
                results.append((stages(given), want, exact))
            try:
                check_all([case], results)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from None


@pytest.mark.parametrize("kind", KINDS)
def test_random_programs(ranks, kind):
    ranks(3).run(random_programs, kind, timeout=200)


def not_a_number():
    """Bounds pass it on, as torch's do."""
    ctx = iris.iris(1 << 26)
    rank, world = ctx.cur_rank, ctx.num_ranks

    @iris.spmd(lowering="triton", config=iris.StageConfig("fused", TILES))
    def bounded(x, w):
        return torch.relu(iris.all_gather(x, "tp") @ w).clamp(-1, 8)

    x = torch.ones(8, 64, dtype=BF16)
    x[rank + 2] = float("nan")
    y = bounded(x.to(ctx.device), torch.eye(64, dtype=BF16, device=ctx.device)).cpu()
    bad = [8 * r + r + 2 for r in range(world)]
    assert y.isnan().all(1).nonzero().flatten().tolist() == bad
    assert y.isnan().sum() == 64 * world


def test_what_is_not_a_number_stays_so(ranks):
    ranks(2).run(not_a_number)


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
