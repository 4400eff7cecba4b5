"""Collectives and all_reduce + RMSNorm as kernels, in the interpreter, against torch's results."""

import time

import pytest
import torch
import triton.language as tl

import iris
import iris.device.pickling  # epilogues of this file travel to the ranks
from iris.device.target import device_function
from iris.lower import collectives as oracle
from iris.lower.kernels import collectives
from iris.lower.kernels.all_reduce_norm import AllReduceNorm
from iris.lower.kernels.gemm import identity

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


def integers(rank, step, shape, dtype):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-20, 20, shape, generator=generator).to(dtype)


def raw(x):
    """The bytes of a tensor, to compare any dtype exactly."""
    return x.contiguous().view(torch.uint8) if x.numel() else x


def chunks(n, world):
    size = -(-n // world)
    return [max(0, min(size, n - rank * size)) for rank in range(world)]


def compare(ctx, stage, reference, operand):
    """Three launches with new data, once with rank 0 late, each equal to the reference."""
    rank = ctx.cur_rank
    for step in range(3):
        want = reference(operand(rank, step))
        around = torch.full((want.numel() + 8,), 7).to(want.dtype)
        out = around[4:-4].view(want.shape)
        if step == 0:
            stage.warm(operand(rank, step), out=out)
            ctx.barrier()
        if step == 1 and rank == 0:
            time.sleep(0.05)
        stage(operand(rank, step), out=out)
        assert torch.equal(raw(out), raw(want)), (stage.workspace.what, step)
        assert torch.equal(raw(around[:4]), raw(around[-4:]))
    ctx.watch.check()


def gathers():
    ctx = iris.iris(1 << 22)
    group, world = ctx.world, ctx.num_ranks
    for dim, n, dtype in (
        (0, 5, torch.float32),
        (1, 7, torch.bfloat16),
        (2, world, torch.bool),
        (1, 0, torch.int64),
        (0, 9, torch.float8_e4m3fn),
    ):
        shape, sizes = [3, 4, 5], chunks(n, world)
        shape[dim] = sizes[ctx.cur_rank]
        stage = collectives.all_gather(ctx, group, shape, sizes, dim, dtype)
        reference = oracle.make_all_gather(group, shape, sizes, dim, dtype, "all_gather")
        compare(ctx, stage, reference, lambda r, s, d=dtype, sh=shape: integers(r, s, sh, d))


def scatters():
    ctx = iris.iris(1 << 22)
    group, world = ctx.world, ctx.num_ranks
    for dim, n, op, dtype in (
        (0, 6, "sum", torch.bfloat16),
        (1, 7, "sum", torch.float32),
        (2, 5, "max", torch.int32),
        (1, 1, "avg", torch.float32),
    ):
        shape = [3, 4, 5]
        shape[dim] = n
        sizes = chunks(n, world)
        stage = collectives.reduce_scatter(ctx, group, shape, sizes, dim, op, dtype)
        reference = oracle.make_reduce_scatter(group, shape, sizes, dim, op, dtype, "scatter")

        def operand(rank, step, shape=shape, dtype=dtype):  # transposed: strides count
            return integers(rank, step, shape[::-1], dtype).permute(2, 1, 0)

        compare(ctx, stage, reference, operand)


def widths_of_blocks():
    ctx = iris.iris(1 << 22)
    sizes = [1, *[0] * (ctx.num_ranks - 1)]
    stage = collectives.reduce_scatter(ctx, ctx.world, [1, 4096], sizes, 0, "sum", torch.float32)
    return stage.moves.columns


def test_a_rank_that_gets_nothing_sends_whole_rows_all_the_same(ranks):
    assert min(ranks(2).run(widths_of_blocks)) > 1


def sums():
    ctx = iris.iris(1 << 22)
    for shape, op, dtype in (
        ((1,), "sum", torch.float32),
        ((257,), "sum", torch.bfloat16),
        ((5, 3), "avg", torch.int32),
        ((4, 4), "min", torch.bool),
        ((64,), "sum", torch.int8),
        ((0, 3), "sum", torch.float32),
    ):
        reference = oracle.make_all_reduce(ctx.world, shape, op, dtype, "sums")
        for two_shot in (False, True):
            stage = collectives.all_reduce(ctx, ctx.world, shape, op, dtype, two_shot=two_shot)
            compare(ctx, stage, reference, lambda r, s, d=dtype, sh=shape: integers(r, s, sh, d))


def moves():
    ctx = iris.iris(1 << 22)
    group, world = ctx.world, ctx.num_ranks
    for split, concat in ((0, 0), (0, 1), (2, 1)):
        shapes = [[4, 5, 6] for _ in range(world)]
        if split != concat:
            for rank in range(world):
                shapes[rank][concat] = rank + 1
        splits = chunks(shapes[0][split], world)
        case = (group, shapes, split, splits, concat, torch.float16)
        stage = collectives.all_to_all(ctx, *case)
        reference = oracle.make_all_to_all(*case, "all_to_all")
        compare(ctx, stage, reference, lambda r, s, sh=shapes: integers(r, s, sh[r], torch.float16))
    stage = collectives.broadcast(ctx, group, [3, 7], world - 1, torch.float64)
    reference = oracle.make_broadcast(group, [3, 7], world - 1, torch.float64, "broadcast")
    compare(ctx, stage, reference, lambda r, s: integers(r, s, [7, 3], torch.float64).t())
    ring = [(rank, (rank + 1) % world) for rank in range(world)]
    stage = collectives.ppermute(ctx, group, [3, 7], ring, torch.int16)
    reference = oracle.make_ppermute(group, [3, 7], ring, torch.int16, "ppermute")
    compare(ctx, stage, reference, lambda r, s: integers(r, s, [3, 14], torch.int16)[:, ::2])


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("case", [gathers, scatters, sums, moves])
def test_collectives(ranks, case, world):
    ranks(world).run(case)


def interleaved():
    """Groups (0, 2) and (1, 3): columns of arange(16).reshape(4, 4), scattered over rows."""
    ctx = iris.iris(1 << 20)
    group = ctx.group([ctx.cur_rank % 2, ctx.cur_rank % 2 + 2])
    x = torch.arange(16.0).reshape(4, 4)[:, ctx.cur_rank]
    stage = collectives.reduce_scatter(ctx, group, [4], [2, 2], 0, "sum", torch.float32)
    out = torch.empty(2)
    stage.warm(x, out=out)
    ctx.barrier()
    stage(x, out=out)
    assert out.tolist() == [[2, 10], [4, 12], [18, 26], [20, 28]][ctx.cur_rank]


def test_interleaved_groups(ranks):
    ranks(4).run(interleaved)


@device_function
def plus_residual(tiles, rows, columns, M, N, args):
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    return tiles[0] + tl.load(args[0] + at, mask=mask, other=0).to(tl.float32)


def norms(M, N, dtype, with_residual, with_weight):
    ctx = iris.iris(1 << 22)
    world = ctx.num_ranks
    after = plus_residual if with_residual else identity
    stage = AllReduceNorm.create(ctx, ctx.world, M=M, N=N, dtype=dtype, eps=1e-5, after=after)
    for step in range(3):
        xs = [integers(rank, step, (M, N), dtype) / 4 for rank in range(world)]
        residual = integers(8, step, (M, N), dtype) / 4 if with_residual else None
        weight = integers(9, step, (N,), dtype) / 4 if with_weight else None
        x = xs[ctx.cur_rank]
        out, summed = torch.full_like(x, 7), torch.full_like(x, 7)
        if step == 0:
            stage.warm(x, weight, out=out, summed=summed, args=(residual,))
            ctx.barrier()
        stage(x, weight, out=out, summed=summed, args=(residual,))
        want = sum(part.float() for part in xs).to(dtype)
        if residual is not None:
            want = want + residual
        assert torch.equal(summed, want)
        normal = torch.nn.functional.rms_norm(want.float(), (N,), None, 1e-5)
        scaled = normal if weight is None else normal * weight.float()
        torch.testing.assert_close(out, scaled.to(dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("world", "M", "N", "dtype", "residual", "weight"),
    [
        (2, 1, 40, torch.float32, True, True),
        (3, 5, 17, torch.bfloat16, False, True),
        (2, 7, 64, torch.float16, True, False),
    ],
)
def test_all_reduce_norm(ranks, world, M, N, dtype, residual, weight):
    ranks(world).run(norms, M, N, dtype, residual, weight)
