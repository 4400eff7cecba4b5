"""``reduce_scatter(x @ w, dim=0)`` in one kernel.

Every finished tile of a rank's partial product goes to the staging of the ranks that own its rows,
other ranks' rows first; then each rank sums its own rows in rank order, as the parts arrive. See
NOTE [Epochs] and NOTE [Progress].
"""

import triton
import triton.language as tl

from iris.device import tracing
from iris.device.target import device_function
from iris.lower.kernels.gemm import nothing, run_segments
from iris.lower.kernels.host import part_tiling, tiles_of
from iris.lower.kernels.product import LOOSE, Layout, Problem, ProductStage
from iris.lower.kernels.protocol import enter, greet, leave, meet, peer, team
from iris.lower.kernels.sums import (
    announce_to_owners,
    finish_sum,
    no_news,
    send_to_owners,
    sum_rows,
)


@device_function
def _emit(env, tiles, row, column, epilogue, T: tl.constexpr):
    slot, shard, size, ld, staging, _, _, _, args = env
    rows = row + tl.arange(0, T.block_m)
    columns = column + tl.arange(0, T.block_n // T.pieces)
    value = epilogue(tiles, rows, columns, size[0], size[1], args)
    send_to_owners(value, row, column, slot, shard, size, ld, staging, T)


@device_function
def _done(env, row, column, T: tl.constexpr):
    _, shard, size, _, _, flags, rank, epoch, _ = env
    announce_to_owners(row, column, rank, shard, size, flags, epoch, T)


@triton.jit(do_not_specialize=LOOSE)
def matmul_reduce_scatter_kernel(
    dry, a, a_row, a_k, b, b_row, b_k, out, out_row, out_column, staging, sums, flags, state,
    record, stage, trace, rank, m, M, N, K, ld, shard, run, heads, table, scratch, counts, args,
    after_args, epilogue: tl.constexpr, after: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    if dry == 0:
        epoch, turn, number = enter(state)
        size = (M, N)
        half = ((turn & 1) * T.world).to(tl.int64) * shard
        if T.meet:
            greet(flags, rank, number, epoch, T.world, T.lanes)
        left = (a, M, a_row, a_k, 0)
        right = (b, N, b_row, b_k)
        watch = (record, stage, trace)
        plan = (heads, table, scratch, counts, epoch, team(state), watch)
        env = (half + rank * shard, shard, size, ld, staging, flags, rank, epoch, args)
        run_segments(left, right, right, K, plan, number, nothing, _emit, _done, env, epilogue, T)
        line = (peer(flags, rank, tl.int32), epoch, state, watch)
        parts = (peer(staging, rank, T.dtype) + half * ld, shard, ld)
        sink = (out, out_row, out_column, m, N, after_args)
        first = rank * shard
        since = tracing.begin(watch)
        sum_rows(number, m, first, run, parts, size, line, finish_sum, sink, no_news, (), after, T)
        tracing.end(watch, since, tracing.SUM)
        if T.meet:
            meet(line[0], number, epoch, line[3], T.world, T.lanes)
        leave(state, epoch, turn, rank, watch, T)


class MatmulReduceScatter(ProductStage):
    """``out = after(reduce_scatter(epilogue(x @ w), dim=0))`` over a group, one kernel.

    ``x`` is [M, K] and ``w`` [K, N], both this rank's part of the contracted dim, of any strides;
    ``out`` this rank's rows of [M, N] (torch.chunk's split). ``epilogue`` works on this rank's part
    before the sum, with ``args``; ``after`` on the sum, with ``after_args``. To scatter columns,
    give the transposed problem: ``stage(w.T, x.T, out=out.T)``.

    Example::

        down = MatmulReduceScatter.create(
            ctx, ctx.world, M=4096, N=8192, K=7168, dtype=torch.bfloat16
        )
        down.warm(h, w, out=y); ctx.barrier()
        down(h, w, out=y)
    """

    name = "matmul_reduce_scatter"
    kernel = matmul_reduce_scatter_kernel

    @classmethod
    def layout(cls, problem: Problem) -> Layout:
        T, run = part_tiling(problem, problem.shard)
        T = T.with_modes(announced=True, meet=problem.someone_idle)
        members = problem.group.size
        half = members * problem.shard * problem.row_bytes
        flags = 1, tiles_of(problem.M, problem.N, T)
        return Layout(T, run, half, flags, 0, problem.first_row_after, problem.M)
