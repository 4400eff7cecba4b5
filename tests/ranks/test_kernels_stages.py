"""The fused kernels in Triton's interpreter, on real ranks, against products of small integers."""

import time
from dataclasses import replace

import pytest
import torch
import triton.language as tl

import iris
import iris.device.pickling  # epilogues of this file travel to the ranks
from iris.device.target import device_function
from iris.lower.kernels.all_gather_matmul import AllGatherMatmul
from iris.lower.kernels.config import GemmConfig
from iris.lower.kernels.host import rows_of, shard_rows
from iris.lower.kernels.matmul_all_gather import MatmulAllGather
from iris.lower.kernels.matmul_all_reduce import MatmulAllReduce
from iris.lower.kernels.matmul_reduce_scatter import MatmulReduceScatter

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

LAUNCHES = 3
# Several tiles, some cut, in every case here.
SMALL = GemmConfig(16, 16, 16, warps=1, stages=1, programs=3, pieces=1, copy=256, group_m=2)


def integers(seed, *shape, dtype=torch.float32):
    """Values that differ by seed, row and column, and whose products are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def laid(x, layout):
    """The same values as a row-major, a column-major, a strided or a padded matrix."""
    if layout == "columns":
        return x.t().contiguous().t()
    if layout == "strided":
        return x.repeat_interleave(2, 1)[:, ::2]
    if layout == "padded":
        return torch.cat([x, x[:, :3]], 1)[:, : x.shape[1]]
    return x


def product(x, w):
    """``x @ w`` as a stage holds it: exact, int32 for int8."""
    dtype = torch.int32 if x.dtype == torch.int8 else x.dtype
    return (x.double() @ w.double()).to(dtype)


def guarded(rows, columns, dtype):
    """An output within a larger tensor, and that tensor."""
    around = torch.full((rows + 2, columns), 7, dtype=dtype)
    return around[1 : rows + 1], around


def check(out, around, want):
    assert torch.equal(out, want), (out.double() - want.double()).abs().max()
    assert (around[0] == 7).all()
    assert (around[-1] == 7).all()


def run(ctx, load, launch):
    """Load, then launch with new data each time, once with rank 0 late."""
    load()
    ctx.barrier()
    for step in range(LAUNCHES):
        if step == 1 and ctx.cur_rank == 0:
            time.sleep(0.1)
        launch(step)
    ctx.watch.check()


def gather_case(M, K, columns, dtype, layout, engine=False, config=SMALL):
    ctx = iris.iris(1 << 22, engines=("sdma",) if engine else ())
    rank, world = ctx.cur_rank, ctx.num_ranks
    stage = AllGatherMatmul.create(
        ctx, ctx.world, M=M, K=K, columns=columns, dtype=dtype, config=config, engine=engine
    )
    first, m = rank * shard_rows(M, world), rows_of(M, world, rank)
    result = torch.int32 if dtype == torch.int8 else dtype

    def launch(step, dry=0):
        x = integers(step, M, K, dtype=dtype)
        mine = laid(x[first : first + m], layout)
        weights = [laid(integers(9 + step + rank, K, n, dtype=dtype), layout) for n in columns]
        outs = [guarded(M, n, result) for n in columns]
        gathered = torch.full((M, K), 7, dtype=dtype)
        stage(mine, weights, out=[o for o, _ in outs], gathered=gathered, dry=dry)
        if not dry:
            for (out, around), w in zip(outs, weights, strict=True):
                check(out, around, product(x, w))
            assert torch.equal(gathered, x)

    run(ctx, lambda: launch(0, dry=1), launch)


def product_case(kind, M, N, K, dtype, layout, config=SMALL, **options):
    """The three stages that begin with a product; which programs waited, where few communicate."""
    ctx = iris.iris(1 << 22)
    if config.communication:
        ctx.tracing.enable(max_events=10000)
    rank, world = ctx.cur_rank, ctx.num_ranks
    first, m = rank * shard_rows(M, world), rows_of(M, world, rank)
    stage = kind.create(ctx, ctx.world, M=M, N=N, K=K, dtype=dtype, config=config, **options)
    result = torch.int32 if dtype == torch.int8 else dtype

    def launch(step, dry=0):
        rows = M if kind is not MatmulAllGather else None
        xs = [
            integers(step + 5 * r, rows or rows_of(M, world, r), K, dtype=dtype)
            for r in range(world)
        ]
        ws = [integers(9 + step + r, K, N, dtype=dtype) for r in range(world)]
        parts = [product(x, w) for x, w in zip(xs, ws, strict=True)]
        if kind is MatmulAllGather:
            want = torch.cat(parts)
        else:
            want = sum(part.double() for part in parts).to(result)
        if kind is MatmulReduceScatter:
            want = want[first : first + m]
        out, around = guarded(want.shape[0], N, result)
        stage(laid(xs[rank], layout), laid(ws[rank], layout), out=out, dry=dry)
        if not dry:
            check(out, around, want)

    run(ctx, lambda: launch(0, dry=1), launch)
    events = ctx.tracing.timeline().events if config.communication else []
    return {event.track for event in events if event.kind == "wait"}


@pytest.mark.parametrize(
    ("world", "M", "K", "columns", "dtype", "layout"),
    [
        (2, 8, 32, [24], torch.float32, "rows"),
        (2, 21, 35, [17, 9, 5], torch.bfloat16, "columns"),
        (3, 5, 40, [17], torch.float16, "strided"),
        (2, 19, 70, [33], torch.int8, "rows"),
        (3, 2, 0, [5], torch.float32, "rows"),  # nothing to send, a member without rows
        (2, 4, 8, [0], torch.float32, "rows"),
        (2, 1, 1, [1], torch.float32, "rows"),
    ],
)
def test_all_gather_matmul(ranks, world, M, K, columns, dtype, layout):
    ranks(world).run(gather_case, M, K, columns, dtype, layout)


@pytest.mark.parametrize(
    ("world", "M", "K", "columns", "dtype", "layout"),
    [
        (2, 21, 35, [17], torch.bfloat16, "rows"),
        (3, 7, 40, [17], torch.float32, "padded"),
        (2, 8, 32, [24], torch.float32, "columns"),  # columns are sent by the kernel all the same
        (3, 2, 8, [5], torch.float32, "rows"),  # a member without rows
    ],
)
def test_all_gather_matmul_by_the_copy_engine(ranks, world, M, K, columns, dtype, layout):
    ranks(world).run(gather_case, M, K, columns, dtype, layout, engine=True)


def columns_case(M, K, N, dtype):
    """Columns of x are gathered: the contracted dim."""
    ctx = iris.iris(1 << 22)
    rank, world = ctx.cur_rank, ctx.num_ranks
    stage = AllGatherMatmul.create(
        ctx, ctx.world, M=M, K=K, columns=[N], dtype=dtype, dim=1, config=SMALL
    )
    first, k = rank * shard_rows(K, world), rows_of(K, world, rank)
    bits = []

    def launch(step, dry=0):
        exact = step < LAUNCHES - 1
        x = integers(step, M, K, dtype=dtype) if exact else torch.randn(M, K).to(dtype)
        x = ctx.broadcast(x, 0, as_tensor=True)
        w = laid(integers(9 + step, K, N, dtype=dtype), "columns")
        out, around = guarded(M, N, dtype)
        gathered = torch.full((M, K), 7, dtype=dtype)
        stage(x[:, first : first + k], [w], out=[out], gathered=gathered, dry=dry)
        if not dry:
            assert torch.equal(gathered, x)
            bits.append(out.clone())
            if exact:
                check(out, around, product(x, w))

    run(ctx, lambda: launch(0, dry=1), launch)
    return bits[-1]


@pytest.mark.parametrize(
    ("world", "M", "K", "N"), [(2, 21, 70, 17), (3, 5, 32, 40), (3, 4, 2, 5), (2, 3, 0, 4)]
)
def test_gathered_columns_give_all_ranks_the_same_bits(ranks, world, M, K, N):
    # pytorch/pytorch#165653
    first, *others = ranks(world).run(columns_case, M, K, N, torch.float32)
    assert all(torch.equal(first, other) for other in others)


SHAPES = [
    (2, 8, 24, 32, torch.float32, "rows"),
    (2, 21, 17, 35, torch.bfloat16, "columns"),
    (3, 5, 9, 40, torch.float16, "strided"),
    (3, 2, 5, 0, torch.float32, "rows"),  # K = 0 gives zeros; fewer rows than members
    (2, 0, 5, 8, torch.float32, "rows"),
    (2, 17, 19, 20, torch.int8, "rows"),
]


@pytest.mark.parametrize(("world", "M", "N", "K", "dtype", "layout"), SHAPES)
def test_matmul_reduce_scatter(ranks, world, M, N, K, dtype, layout):
    ranks(world).run(product_case, MatmulReduceScatter, M, N, K, dtype, layout)


@pytest.mark.parametrize(("world", "M", "N", "K", "dtype", "layout"), SHAPES)
def test_matmul_all_gather(ranks, world, M, N, K, dtype, layout):
    ranks(world).run(product_case, MatmulAllGather, M, N, K, dtype, layout)


@pytest.mark.parametrize("one_shot", [True, False])
@pytest.mark.parametrize(
    ("world", "M", "N", "K", "dtype", "layout"),
    [pytest.param(*SHAPES[0], marks=pytest.mark.slow), *SHAPES[1:]],
)
def test_matmul_all_reduce(ranks, world, M, N, K, dtype, layout, one_shot):
    # triton-lang/triton#11584, ROCm/iris#21
    case = (MatmulAllReduce, M, N, K, dtype, layout)
    ranks(world).run(product_case, *case, one_shot=one_shot)


@pytest.mark.parametrize("crew", [1, 2])
@pytest.mark.parametrize("kind", [MatmulReduceScatter, MatmulAllGather, MatmulAllReduce])
def test_few_programs_communicate(ranks, kind, crew):
    config = replace(SMALL, communication=crew)
    found = ranks(2).run(product_case, kind, 35, 24, 20, torch.float32, "rows", config)
    assert found == [{f"program {number}" for number in range(crew)}] * 2


@pytest.mark.parametrize("crew", [1, 2])
def test_few_programs_gather(ranks, crew):
    config = replace(SMALL, communication=crew)
    ranks(2).run(gather_case, 21, 35, [17, 9], torch.float32, "rows", config=config)


@device_function
def gated(tiles, rows, columns, M, N, args):
    bias = tl.load(args[0] + columns, mask=columns < N, other=0)
    return (tiles[0] + bias[None, :]) * tiles[1]


def zipped_case():
    ctx = iris.iris(1 << 22)
    M, K, N = 21, 40, 24
    stage = AllGatherMatmul.create(
        ctx,
        ctx.world,
        M=M,
        K=K,
        columns=[N, N],
        dtype=torch.float32,
        zipped=True,
        epilogue=gated,
    )
    first, m = ctx.cur_rank * shard_rows(M, 2), rows_of(M, 2, ctx.cur_rank)

    def launch(step, dry=0):
        x, bias = integers(step, M, K), integers(step + 1, N)
        gate, up = integers(step + 2, K, N), integers(step + 3, K, N)
        out, around = guarded(M, N, torch.float32)
        stage(x[first : first + m], [gate, up], out=[out], args=[(bias,)], dry=dry)
        if not dry:
            check(out, around, (x @ gate + bias) * (x @ up))

    run(ctx, lambda: launch(0, dry=1), launch)


def test_two_weights_share_an_epilogue(ranks):
    ranks(2).run(zipped_case)


@device_function
def plus_bias(tiles, rows, columns, M, N, args):
    return tiles[0] + tl.load(args[0] + columns, mask=columns < N, other=0)[None, :]


def bias_case(one_shot):
    """Row-parallel linear with bias on 2 ranks: the bias counts once."""
    ctx = iris.iris(1 << 20)
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])[:, 2 * ctx.cur_rank :][:, :2]
    stage = MatmulAllReduce.create(
        ctx, ctx.world, M=2, N=3, K=2, dtype=torch.float32, after=plus_bias, one_shot=one_shot
    )
    out, bias = torch.empty(2, 3), torch.tensor([100.0, 200, 300])
    stage.warm(x, torch.ones(2, 3), out=out, after_args=(bias,))
    ctx.barrier()
    stage(x, torch.ones(2, 3), out=out, after_args=(bias,))
    assert out.tolist() == [[110, 210, 310], [126, 226, 326]]


@pytest.mark.parametrize("one_shot", [True, False])
def test_a_bias_after_the_sum_counts_once(ranks, one_shot):
    ranks(2).run(bias_case, one_shot)


def epoch_case(epoch):
    """Flags and counters go on across the wrap of 32 bits."""
    ctx = iris.iris(1 << 20)
    stage = MatmulReduceScatter.create(
        ctx, ctx.world, M=4, N=4, K=40, dtype=torch.float32, config=SMALL
    )
    work = stage.workspace
    flags, state, turn = work.counters[:3]
    flags.view(torch.int32).fill_(epoch)
    state[0] = turn[0] = epoch
    parts = stage.share.table[:, 5]
    cuts = stage.share.table[:, 7][parts > 1]
    for cut, count in zip(cuts.tolist(), parts[parts > 1].tolist(), strict=True):
        wrapped = (count * epoch + 2**31) % 2**32 - 2**31
        stage.share.counts[2 * cut : 2 * cut + 2] = wrapped
    ctx.barrier()
    for step in range(5):
        xs = [integers(step + r, 4, 40) for r in range(2)]
        w = integers(step + 7, 40, 4)
        out = torch.empty(2, 4)
        stage(xs[ctx.cur_rank], w, out=out)
        assert torch.equal(out, (sum(xs) @ w)[2 * ctx.cur_rank :][:2])


def test_the_epoch_may_wrap(ranks):
    ranks(2).run(epoch_case, 2**31 - 3)
