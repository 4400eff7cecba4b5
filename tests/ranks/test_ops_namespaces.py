"""``ctx.ops`` and ``ctx.ccl``: results in a given tensor, nothing beside it touched, clear
errors.
"""

import os

import pytest
import torch

import iris
from iris.lower.choices import ALGORITHMS
from iris.lower.kernels.config import GemmConfig
from iris.testing import delay, small_integers

pytestmark = pytest.mark.ranks


def _rows(x, index, parts):
    chunk = -(-x.shape[0] // parts)
    start = min(index * chunk, x.shape[0])
    return x[start : start + chunk]


def _every_op(m, n, k, dtype, ranks_of):
    ctx = iris.iris(1 << 22)
    group = ranks_of(ctx.cur_rank)
    world, index = len(group), group.index(ctx.cur_rank)
    for seed in range(3):
        if seed == 2:
            delay(group[0])
        A = [small_integers((m, k), r, seed, dtype) for r in group]
        B = [small_integers((k, n), r, seed + 7, dtype) for r in group]
        bias = small_integers((n,), 0, seed, dtype)
        total = sum(a.double() @ b.double() for a, b in zip(A, B, strict=True)) + bias.double()
        mine, weight = A[index].t().contiguous().t(), B[index]
        guard = torch.full((m + 2, n), 7, dtype=dtype)
        ctx.ops.matmul_all_reduce(guard[1:-1], mine, weight, ctx, bias=bias, group=group)
        assert torch.equal(guard[1:-1].double(), total.to(dtype).double())
        assert torch.equal(guard[[0, -1]].double(), torch.full((2, n), 7.0).double())
        out = torch.full_like(_rows(guard[1:-1], index, world), 7)
        ctx.ops.matmul_reduce_scatter(out, mine, weight, group=group, bias=bias)
        assert torch.equal(out.double(), _rows(total.to(dtype).double(), index, world))
        gathered = torch.cat(A).double()
        out = torch.full((m * world, n), 7, dtype=dtype)
        handle = ctx.ops.all_gather_matmul(out, A[index], B[0], group=group, async_op=True)
        handle.wait()
        assert torch.equal(out.double(), (gathered @ B[0].double()).to(dtype).double())
        ctx.ops.matmul_all_gather(out, A[index], B[0], bias=bias, group=group)
        expected = (gathered @ B[0].double() + bias.double()).to(dtype)
        assert torch.equal(out.double(), expected.double())
        wide, tall = torch.cat(A, 1).double(), torch.cat(B)
        out = torch.full((m, n), 7, dtype=dtype)
        ctx.ops.all_gather_matmul(out, A[index], tall, gather_dim=1, group=group)
        assert torch.equal(out.double(), (wide @ tall.double()).to(dtype).double())
    return True


@pytest.mark.parametrize(("m", "n", "k"), [(6, 5, 4), (1, 3, 2), (4, 576, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_op(ranks, m, n, k, dtype):
    # pytorch/pytorch#31421, ROCm/iris#21, ROCm/iris#296
    assert all(ranks(2).run(_every_op, m, n, k, dtype, lambda rank: [0, 1]))


def test_ops_in_strided_groups(ranks):
    split = lambda rank: [0, 2] if rank % 2 == 0 else [1, 3]  # noqa: E731
    assert all(ranks(4).run(_every_op, 4, 3, 2, torch.float32, split))


def _collectives():
    ctx = iris.iris(1 << 20)
    rank, world = ctx.cur_rank, ctx.num_ranks
    xs = [small_integers((4, 6), r) for r in range(world)]
    x = xs[rank].clone()
    ctx.ccl.all_reduce(x, x)
    assert torch.equal(x, sum(xs))
    out = torch.empty(4, 6 * world)
    ctx.ccl.all_gather(out, xs[rank], dim=1)
    assert torch.equal(out, torch.cat(xs, 1))
    out = torch.empty(4 // world, 6)
    ctx.ccl.reduce_scatter(out, xs[rank], op="max")
    assert torch.equal(out, torch.stack(xs).amax(0)[rank * 2 : rank * 2 + 2])
    out = torch.empty(4, 6)
    ctx.ccl.all_to_all(out, xs[rank])
    assert torch.equal(out, torch.cat([part[rank * 2 : rank * 2 + 2] for part in xs]))
    return True


def test_collectives_into_a_given_tensor(ranks):
    assert all(ranks(2).run(_collectives))


def test_bad_operands():
    with iris.iris(1 << 20) as ctx:
        with pytest.raises(iris.SpecError) as caught:
            ctx.ops.matmul_all_reduce(torch.ones(2, 2), torch.ones(2, 3), torch.ones(4, 5))
        assert str(caught.value) == (
            "matmul_all_reduce: A [2, 3] and B [4, 5] do not multiply\n"
            "  output is [2, 2], the result is [2, 5]\n"
            "help: see help(ctx.ops)"
        )
        with pytest.raises(iris.SpecError, match="takes two matrices"):
            ctx.ops.matmul_all_gather(torch.ones(2), torch.ones(2), torch.ones(2))
        with pytest.raises(iris.ConfigError) as caught:
            ctx.ops.matmul_all_reduce(None, torch.ones(2, 3), torch.ones(3, 5), config="ring")
        assert str(caught.value) == f"algorithm 'ring' is not one of {', '.join(ALGORITHMS)}"
        with pytest.raises(iris.ConfigError) as caught:
            ctx.ops.matmul_all_reduce(None, torch.ones(2, 3), torch.ones(3, 5), config=5)
        assert str(caught.value) == "config is 5, a StageConfig or the name of an algorithm"


def test_configs_that_no_kernel_has():
    with pytest.raises(iris.ConfigError) as caught:
        GemmConfig(block_m=100, block_k=8, pieces=3, programs=-1, warps=2.0)
    assert str(caught.value) == (
        "GemmConfig: block_m=100 is not a power of two from 16 on\n"
        "  block_k=8 is not a power of two from 16 on\n"
        "  warps=2.0 is not a power of two from 1 on\n"
        "  programs=-1 is not a number from 0 on\n"
        "  pieces=3 is not one of 1, 2, 4"
    )
    with pytest.raises(iris.ConfigError) as caught:
        iris.StageConfig(gemm="big")
    assert str(caught.value) == "gemm is 'big', a GemmConfig or None"


def _algorithms(rows, dtype):
    """Every way of every op, on the same operands, gives the same bits."""
    ctx = iris.iris(1 << 24)
    world, rank = ctx.num_ranks, ctx.cur_rank
    A = [small_integers((rows, 6), r, 1, dtype) for r in range(world)]
    B = [small_integers((6, 64), r, 2, dtype) for r in range(world)]
    wide = torch.int32 if dtype == torch.int8 else dtype
    parts = [(a.double() @ b.double()).to(wide) for a, b in zip(A, B, strict=True)]
    total = sum(part.double() for part in parts).to(wide)
    few = [iris.StageConfig(way, communication=1) for way in ("fused", "one-shot", "two-shot")]
    for config in ("one-shot", "two-shot", "unfused", iris.StageConfig("fused"), *few[1:]):
        got = ctx.ops.matmul_all_reduce(None, A[rank], B[rank], config=config)
        assert got.dtype == wide
        assert torch.equal(got, total), config
    for config in ("unfused", "fused", few[0]):
        mine = ctx.ops.matmul_reduce_scatter(None, A[rank], B[rank], config=config)
        assert torch.equal(mine, _rows(total, rank, world)), config
        done = ctx.ops.matmul_all_gather(None, A[rank], B[0], config=config, async_op=True)
        want = torch.cat([(a.double() @ B[0].double()).to(wide) for a in A])
        assert torch.equal(done.wait(), want), config
        got = ctx.ops.all_gather_matmul(None, A[rank], torch.cat(B), config=config, gather_dim=1)
        assert torch.equal(got, (torch.cat(A, 1).double() @ torch.cat(B).double()).to(wide))
    return True


@pytest.mark.parametrize(
    ("world", "rows"),
    [(3, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 3), (2, 20)))],
)
def test_every_way_with_fewer_rows_than_ranks(ranks, world, rows):
    # vllm-project/vllm#34412, ROCm/iris#21 (N is not whole tiles)
    assert all(ranks(world).run(_in_triton, _algorithms, rows, torch.bfloat16))


def test_int8_products_are_int32(ranks):
    # triton-lang/triton#2296
    assert all(ranks(2).run(_in_triton, _algorithms, 17, torch.int8))
    assert ranks(2).run(_in_triton, _no_wrap) == [[[40000]]] * 2


def _no_wrap():
    ctx = iris.iris(1 << 20)
    A = torch.tensor([[100, -100]], dtype=torch.int8)
    return ctx.ops.matmul_all_reduce(None, A, A.t().contiguous()).tolist()


def _in_triton(fn, *args):
    """Run ``fn`` with stages as kernels."""
    os.environ["IRIS_LOWERING"] = "triton"
    try:
        return fn(*args)
    finally:
        del os.environ["IRIS_LOWERING"]


def _workspaces():
    ctx = iris.iris(2 << 20)
    rank, workspace = ctx.cur_rank, ctx.ops.workspace()
    small = iris.StageConfig(gemm=GemmConfig(16, 16, 16, 1, 1, programs=2, pieces=1, copy=256))
    before = ctx.zeros(64, dtype=torch.int32).fill_(7)
    problems = [
        (8, 32, torch.float32, None),
        (8, 32, torch.float32, None),  # the same: used again
        (40, 32, torch.float32, None),  # more rows
        (40, 32, torch.float32, small),  # smaller tiles
        (40, 32, torch.bfloat16, small),  # another type
        (8, 32, torch.float32, None),
    ]
    after = []
    for turn in range(12):  # each is a quarter of the heap and more: the last one's memory is freed
        rows, columns, dtype, config = problems[turn % len(problems)]
        A = [small_integers((rows, 4), r, turn, dtype) for r in range(2)]
        B = [small_integers((4, columns), r, turn + 9, dtype) for r in range(2)]
        delay(turn % 2, 0.01)
        output = torch.full((rows + 2, columns), 7, dtype=dtype)
        call = {"config": config, "workspace": workspace}
        ctx.ops.matmul_all_reduce(output[1:-1], A[rank], B[rank], **call)
        assert torch.equal(output[1:-1], A[0] @ B[0] + A[1] @ B[1]), turn
        assert bool((output[[0, -1]] == 7).all())
        if turn < 2:
            after.append(ctx.zeros(64, dtype=torch.int32).fill_(7))
    assert all(bool((guard == 7).all()) for guard in (before, *after))
    return True


def test_a_workspace_is_used_again_and_never_overrun(ranks):
    # ROCm/iris#463, ROCm/iris#465
    assert all(ranks(2).run(_in_triton, _workspaces))


def _ranks_disagree():
    ctx = iris.iris(1 << 22)
    tile = 16 << ctx.cur_rank
    config = iris.StageConfig(gemm=GemmConfig(tile, 16, 16, 1, 1, programs=2, pieces=1, copy=256))
    with pytest.raises(iris.TraceError) as caught:
        ctx.ops.matmul_all_reduce(None, torch.ones(4, 4), torch.ones(4, 4), config=config)
    assert "block_m=16" in str(caught.value)
    assert "block_m=32" in str(caught.value)
    config = iris.StageConfig(communication=1 + ctx.cur_rank)
    with pytest.raises(iris.TraceError) as caught:
        ctx.ops.matmul_all_reduce(None, torch.ones(4, 4), torch.ones(4, 4), config=config)
    assert "1 programs communicate" in str(caught.value)
    assert "2 programs communicate" in str(caught.value)
    return True


def test_ranks_with_other_tiles_are_told(ranks):
    # vllm-project/vllm#43616
    assert all(ranks(2).run(_in_triton, _ranks_disagree))
