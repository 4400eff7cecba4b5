"""``all_gather(x @ w, dim=0)`` in one kernel.

Every finished tile goes to all ranks while later tiles compute; each rank copies what arrives into
its result. See NOTE [Epochs] and NOTE [Progress] in protocol.py.
"""

import triton
import triton.language as tl

from iris.device import tracing
from iris.device.target import device_function
from iris.lower.kernels.config import Tiling
from iris.lower.kernels.gemm import nothing, run_segments
from iris.lower.kernels.host import GroupLike, interpreted, rows_of, shard_rows, tiles_of
from iris.lower.kernels.product import LOOSE, Layout, Problem, ProductStage
from iris.lower.kernels.protocol import enter, greet, leave, meet, peer, team
from iris.lower.kernels.sums import announce_to_all, collect, no_news, send_to_all, tiles_in


@device_function
def _emit(env, tiles, row, column, epilogue, T: tl.constexpr):
    slot, size, ld, staging, _, _, _, args = env
    rows = row + tl.arange(0, T.block_m)
    columns = column + tl.arange(0, T.block_n // T.pieces)
    value = epilogue(tiles, rows, columns, size[0], size[1], args)
    send_to_all(value, rows, columns, slot, size, ld, staging, T)


@device_function
def _done(env, row, column, T: tl.constexpr):
    _, size, _, _, first_flag, flags, epoch, _ = env
    announce_to_all(row, column, first_flag, size[1], flags, epoch, T)


@triton.jit(do_not_specialize=LOOSE)
def matmul_all_gather_kernel(
    dry, a, a_row, a_k, b, b_row, b_k, out, out_row, out_column, staging, sums, flags, state,
    record, stage, trace, rank, m, M, N, K, ld, shard, run, heads, table, scratch, counts, args,
    after_args, epilogue: tl.constexpr, after: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    if dry == 0:
        epoch, turn, number = enter(state)
        half = (turn & 1).to(tl.int64) * M
        if T.meet:
            greet(flags, rank, number, epoch, T.world, T.lanes)
        left = (a, m, a_row, a_k, 0)
        right = (b, N, b_row, b_k)
        watch = (record, stage, trace)
        plan = (heads, table, scratch, counts, epoch, team(state), watch)
        each = tiles_in(shard, N, T)
        slot = half + rank * shard
        env = (slot, (m, N), ld, staging, T.world + rank * each, flags, epoch, args)
        run_segments(left, right, right, K, plan, number, nothing, _emit, _done, env, epilogue, T)
        line = (peer(flags, rank, tl.int32), epoch, state, watch)
        source = peer(staging, rank, T.dtype) + half * ld
        sink = (out, out_row, out_column, M, N, after_args)
        since = tracing.begin(watch)
        collect(
            source, ld, T.world, shard, run, (M, N), line, rank, number, sink, no_news, (), after, T
        )
        tracing.end(watch, since, tracing.COLLECT)
        if T.meet:
            meet(line[0], number, epoch, line[3], T.world, T.lanes)
        leave(state, epoch, turn, rank, watch, T)


class MatmulAllGather(ProductStage):
    """``out = all_gather(epilogue(x @ w), dim=0)`` over a group, one kernel.

    ``x`` is this rank's rows of [M, K] (torch.chunk's split), ``w`` is [K, N], of any strides;
    ``out`` is [M, N]. The epilogue sees this rank's rows, from 0; ``after``, with ``after_args``,
    all rows. To gather columns, give the transposed problem: ``stage(w.T, x.T, out=out.T)``.

    Example::

        head = MatmulAllGather.create(ctx, ctx.world, M=512, N=4096, K=4096, dtype=torch.bfloat16)
        head.warm(x, w, out=y); ctx.barrier()
        head(x, w, out=y)
    """

    name = "matmul_all_gather"
    kernel = matmul_all_gather_kernel

    @classmethod
    def layout(cls, problem: Problem) -> Layout:
        config, members = problem.config, problem.group.size
        T = Tiling.of(config, members, 1, problem.dtype, interpreted())
        high = min(T.block_m, max(1, config.copy // 2 // T.block_n))
        T = T.staged(problem.part, high, T.block_n)
        T = T.with_modes(announced=True, meet=problem.someone_idle)
        flags = 1, tiles_of(problem.shard, problem.N, T)
        m = rows_of(problem.M, members, problem.group.index)
        return Layout(T, T.block_m, problem.M * problem.row_bytes, flags, 0, 0, m)

    @classmethod
    def tile_rows(cls, M: int, group: GroupLike) -> int:
        return shard_rows(M, group.size)
