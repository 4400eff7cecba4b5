"""``all_reduce(x @ w)`` in one kernel, in two ways.

*One-shot*: every rank sends every finished tile of its partial product to all ranks, and each sums
all rows. One hop; W times the traffic: for few rows. *Two-shot*: tiles go to the ranks that own
their rows, which sum them and send the sums to all. The bits of the result are the same: parts and
sums are rounded to the staging's type, sums are fp32 in rank order, ``after`` works on the rounded
sum.
"""

from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from iris.device import tracing
from iris.device.target import device_function
from iris.lower.kernels.gemm import nothing, run_segments
from iris.lower.kernels.host import part_tiling, tiles_of
from iris.lower.kernels.product import LOOSE, Layout, Problem, ProductStage
from iris.lower.kernels.protocol import enter, leave, peer, publish, team
from iris.lower.kernels.schedule import FEW_ROWS
from iris.lower.kernels.sums import (
    announce_to_all,
    announce_to_owners,
    collect,
    count_columns,
    finish_sum,
    norm_rows,
    send_to_all,
    send_to_owners,
    sum_rows,
    tiles_in,
)


@device_function
def _emit(env, tiles, row, column, epilogue, T: tl.constexpr):
    slot, shard, size, ld, staging, _, _, _, args = env
    rows = row + tl.arange(0, T.block_m)
    columns = column + tl.arange(0, T.block_n // T.pieces)
    value = epilogue(tiles, rows, columns, size[0], size[1], args)
    if T.one_shot:
        send_to_all(value, rows, columns, slot, size, ld, staging, T)
    else:
        send_to_owners(value, row, column, slot, shard, size, ld, staging, T)


@device_function
def _done(env, row, column, T: tl.constexpr):
    _, shard, size, _, _, flags, rank, epoch, _ = env
    if T.one_shot:
        first_flag = T.world + rank * tiles_in(size[0], size[1], T)
        announce_to_all(row, column, first_flag, size[1], flags, epoch, T)
    else:
        announce_to_owners(row, column, rank, shard, size, flags, epoch, T)


@device_function
def _send_sum(env, total, row, column, after, T: tl.constexpr):
    """Send a block of this rank's sums to all members."""
    slot, size, ld, sums = env
    rows = row + tl.arange(0, T.rows)
    columns = column + tl.arange(0, T.columns)
    send_to_all(total, rows, columns, slot, size, ld, sums, T)


@device_function
def _sent_sums(news, item, block, row, end, T: tl.constexpr):
    """Tell all members that an item of this rank's sums is there."""
    first_flag, flags, epoch = news
    publish(flags, first_flag + item, epoch, T.world, T.lanes)


@triton.jit(do_not_specialize=LOOSE)
def matmul_all_reduce_kernel(
    dry, a, a_row, a_k, b, b_row, b_k, out, out_row, out_column, staging, sums, flags, state,
    record, stage, trace, rank, m, M, N, K, ld, shard, run, heads, table, scratch, counts, args,
    after_args, weight, eps, normed, normed_row, counters, epilogue: tl.constexpr,
    after: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    if dry == 0:
        epoch, turn, number = enter(state)
        size = (M, N)
        slot_rows = M if T.one_shot else shard
        half = ((turn & 1) * T.world).to(tl.int64) * slot_rows
        left = (a, M, a_row, a_k, 0)
        right = (b, N, b_row, b_k)
        watch = (record, stage, trace)
        plan = (heads, table, scratch, counts, epoch, team(state), watch)
        env = (half + rank * slot_rows, shard, size, ld, staging, flags, rank, epoch, args)
        run_segments(left, right, right, K, plan, number, nothing, _emit, _done, env, epilogue, T)
        line = (peer(flags, rank, tl.int32), epoch, state, watch)
        parts = (peer(staging, rank, T.dtype) + half * ld, slot_rows, ld)
        sink = (out, out_row, out_column, M, N, after_args)
        across = tl.cdiv(N, T.columns)
        news = (counters, epoch, across, N, out, out_row, weight, eps, normed, normed_row)
        since = tracing.begin(watch)
        if T.one_shot:
            sum_rows(
                number, M, 0, run, parts, size, line, finish_sum, sink, count_columns, news, after,
                T,
            )  # fmt: skip
            tracing.end(watch, since, tracing.SUM)
        else:
            row0 = (turn & 1).to(tl.int64) * T.world * shard
            first_flag = T.world * (1 + tiles_in(M, N, T))
            each = tl.cdiv(shard, run) * across
            mine = (first_flag + rank * each, flags, epoch)
            send = (row0 + rank * shard, (m, N), ld, sums)
            first = rank * shard
            sum_rows(
                number, m, first, run, parts, size, line, _send_sum, send, _sent_sums, mine, after,
                T,
            )  # fmt: skip
            tracing.end(watch, since, tracing.SUM)
            since = tracing.begin(watch)
            source = peer(sums, rank, T.dtype) + row0 * ld
            collect(
                source, ld, first_flag, shard, run, size, line, rank, number, sink, count_columns,
                news, after, T,
            )  # fmt: skip
            tracing.end(watch, since, tracing.COLLECT)
        if T.norm > 0:
            since = tracing.begin(watch)
            norm_rows(news, M, slot_rows, run, state, T)
            tracing.end(watch, since, tracing.COLLECT)
        leave(state, epoch, turn, rank, watch, T)


class MatmulAllReduce(ProductStage):
    """``out = after(all_reduce(epilogue(x @ w)))`` over a group, one kernel; and its RMSNorm.

    ``x`` is [M, K] and ``w`` [K, N], both this rank's part of the contracted dim, of any strides;
    ``out`` is [M, N]. ``epilogue`` (scales) works on this rank's part, with ``args``; ``after``
    (bias, residual, activation) on the sum, with ``after_args``. ``one_shot`` chooses the way;
    None: by the number of rows. With ``norm``, ``normed`` [M, N] gets ``rms_norm(out) * weight``
    ("weighted") or ``rms_norm(out)`` ("plain"); then rows of ``out`` are contiguous.

    Example::

        o_proj = MatmulAllReduce.create(ctx, ctx.world, M=8, N=8192, K=2048, dtype=torch.bfloat16)
        o_proj.warm(h, w, out=y); ctx.barrier()
        o_proj(h, w, out=y)
    """

    NORMS: ClassVar = {None: 0, "plain": 1, "weighted": 2}
    name = "matmul_all_reduce"
    kernel = matmul_all_reduce_kernel

    @classmethod
    def layout(
        cls, problem: Problem, one_shot: bool | None = None, norm: str | None = None
    ) -> Layout:
        M, N, shard, W = problem.M, problem.N, problem.shard, problem.group.size
        one_shot = M <= FEW_ROWS if one_shot is None else one_shot
        T, run = part_tiling(problem, M if one_shot else shard)
        T = T.with_modes(
            one_shot=one_shot,
            awaited=not one_shot or norm is not None,
            announced=True,
            norm=cls.NORMS[norm],
        )
        parts = W * (M if one_shot else shard) * problem.row_bytes
        flags: tuple[int, ...] = (1, tiles_of(M, N, T))
        if one_shot:
            return Layout(T, run, parts, flags, 0, 0, M)
        flags += (-(-shard // run) * -(-N // T.columns),)
        return Layout(T, run, parts, flags, parts, problem.first_row_after, M)

    def __init__(self, ctx: Any, problem: Problem, layout: Layout, functions: Any) -> None:
        super().__init__(ctx, problem, layout, functions)
        blocks = problem.group.size * -(-problem.shard // self.run) + -(-problem.M // self.run)
        self.counters = torch.zeros(blocks, dtype=torch.int32, device=problem.device)
        self.workspace.counters.append(self.counters)

    def extra(
        self, weight: Tensor | None = None, eps: float = 0.0, normed: Tensor | None = None
    ) -> list[Any]:
        row = 0 if normed is None else normed.stride(0)
        return [weight, eps, normed, row, self.counters]
