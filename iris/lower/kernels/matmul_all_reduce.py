"""``all_reduce(x @ w)`` in one kernel, in two ways.

*One-shot*: every rank sends every finished tile of its partial product to all ranks, and each sums
all rows. One hop; W times the traffic: for few rows. *Two-shot*: tiles go to the ranks that own
their rows, which sum them and send the sums to all. The bits of the result are the same: parts and
sums are rounded to the staging's type, sums are fp32 in rank order, ``after`` works on the rounded
sum.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from iris.device import tracing
from iris.device.target import device_function
from iris.lower.kernels.config import GemmConfig, Tiling, default_config
from iris.lower.kernels.gemm import identity, nothing, run_segments
from iris.lower.kernels.host import (
    GroupLike,
    Share,
    Turns,
    Workspace,
    launch,
    operand,
    part_tiling,
    product_modes,
    round_up,
    shard_rows,
    tiles_of,
)
from iris.lower.kernels.protocol import enter, leave, peer, publish, team
from iris.lower.kernels.sums import (
    announce_to_all,
    announce_to_owners,
    collect,
    finish_sum,
    no_news,
    send_to_all,
    send_to_owners,
    sum_rows,
    tiles_in,
)


@device_function
def _emit(env, tiles, row, column, epilogue, T: tl.constexpr):
    slot, shard, size, ld, staging, _, _, _ = env
    if T.one_shot:
        rows = row + tl.arange(0, T.block_m)
        columns = column + tl.arange(0, T.block_n // T.pieces)
        send_to_all(tiles[0], rows, columns, slot, size, ld, staging, T)
    else:
        send_to_owners(tiles[0], row, column, slot, shard, size, ld, staging, T)


@device_function
def _done(env, row, column, T: tl.constexpr):
    _, shard, size, _, _, flags, rank, epoch = env
    if T.one_shot:
        first_flag = T.world + rank * tiles_in(size[0], size[1], T)
        announce_to_all(row, column, first_flag, size[1], flags, epoch, T)
    else:
        announce_to_owners(row, column, rank, shard, size, flags, epoch, T)


@device_function
def _send_sum(env, total, row, column, after, T: tl.constexpr):
    """Send a block of this rank's sums to all members."""
    slot, _, size, ld, sums, _, _ = env
    rows = row + tl.arange(0, T.rows)
    columns = column + tl.arange(0, T.columns)
    send_to_all(total, rows, columns, slot, size, ld, sums, T)


@device_function
def _sent_sums(env, item, T: tl.constexpr):
    """Tell all members that an item of this rank's sums is there."""
    _, first_flag, _, _, _, flags, epoch = env
    publish(flags, first_flag + item, epoch, T.world, T.lanes)


@triton.jit(do_not_specialize=["dry", "rank", "stage", "M", "shard", "run"])
def matmul_all_reduce_kernel(
    dry, a, a_row, a_k, b, b_row, b_k, out, out_row, out_column, staging, sums, flags, state,
    record, stage, trace, rank, M, N, K, ld, shard, run, heads, table, scratch, counts, args,
    after: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    if dry == 0:
        epoch, number = enter(state)
        size = (M, N)
        slot_rows = M if T.one_shot else shard
        half = ((epoch & 1) * T.world).to(tl.int64) * slot_rows
        left = (a, M, a_row, a_k, 0)
        right = (b, N, b_row, b_k)
        watch = (record, stage, trace)
        plan = (heads, table, scratch, counts, epoch, team(state), watch)
        env = (half + rank * slot_rows, shard, size, ld, staging, flags, rank, epoch)
        run_segments(left, right, right, K, plan, number, nothing, _emit, _done, env, identity, T)
        line = (peer(flags, rank, tl.int32), epoch, state, watch)
        parts = (peer(staging, rank, T.dtype) + half * ld, slot_rows, ld)
        sink = (out, out_row, out_column, M, N, args)
        since = tracing.begin(watch)
        if T.one_shot:
            sum_rows(number, M, 0, run, parts, size, line, finish_sum, no_news, sink, after, T)
            tracing.end(watch, since, tracing.SUM)
        else:
            m = tl.minimum(shard, M - rank * shard)
            row0 = (epoch & 1).to(tl.int64) * T.world * shard
            first_flag = T.world * (1 + tiles_in(M, N, T))
            each = tl.cdiv(shard, run) * tl.cdiv(N, T.columns)
            mine = first_flag + rank * each
            send = (row0 + rank * shard, mine, (m, N), ld, sums, flags, epoch)
            first = rank * shard
            sum_rows(
                number, m, first, run, parts, size, line, _send_sum, _sent_sums, send, after, T
            )
            tracing.end(watch, since, tracing.SUM)
            since = tracing.begin(watch)
            source = peer(sums, rank, T.dtype) + row0 * ld
            collect(source, ld, first_flag, shard, run, size, line, rank, number, sink, after, T)
            tracing.end(watch, since, tracing.COLLECT)
        leave(state, epoch)


class MatmulAllReduce:
    """``out = after(all_reduce(x @ w))`` over a group, one kernel.

    ``x`` is [M, K] and ``w`` [K, N], both this rank's part of the contracted dim, of any strides;
    ``out`` is [M, N]. ``after`` (bias, residual, activation) works on the sum. ``one_shot`` chooses
    the way; None: by the number of rows.

    Example::

        o_proj = MatmulAllReduce.create(ctx, ctx.world, M=8, N=8192, K=2048, dtype=torch.bfloat16)
        o_proj.warm(h, w, out=y); ctx.barrier()
        o_proj(h, w, out=y)
    """

    ONE_SHOT_ROWS = 64

    def __init__(
        self,
        group: GroupLike,
        workspace: Workspace,
        share: Share,
        T: Tiling,
        config: GemmConfig,
        shape: tuple[int, int, int],
        after: Any,
        sums: Tensor,
        run: int,
    ) -> None:
        self.group, self.workspace, self.share, self.T, self.config = (
            group,
            workspace,
            share,
            T,
            config,
        )
        self.M, self.N, self.K = shape
        self.after, self.sums, self.run = after, sums, run

    @classmethod
    def create(
        cls,
        ctx: Any,
        group: GroupLike,
        *,
        M: int,
        N: int,
        K: int,
        dtype: torch.dtype,
        part_dtype: torch.dtype | None = None,
        after: Any = identity,
        one_shot: bool | None = None,
        config: GemmConfig | None = None,
    ) -> "MatmulAllReduce":
        """Allocate the workspace (collective). Parts and sums are sent as ``part_dtype``."""
        device, W, shard = ctx.heap.device, group.size, shard_rows(M, group.size)
        one_shot = M <= cls.ONE_SHOT_ROWS if one_shot is None else one_shot
        config = config or default_config(M, N, dtype, device)
        part = part_dtype or (torch.int32 if dtype == torch.int8 else dtype)
        T, run = part_tiling(config, W, dtype, part, M if one_shot else shard, N, device)
        T = T.with_modes(one_shot=one_shot, awaited=not one_shot, announced=True)
        row_bytes = round_up(N, 16) * part.itemsize
        parts = W * (M if one_shot else shard) * row_bytes
        sums = 0 if one_shot else W * shard * row_bytes
        blocks = 0 if one_shot else W * -(-shard // run) * -(-N // T.columns)
        what = f"matmul_all_reduce to [{M}, {N}]"
        workspace = Workspace(ctx, group, parts + sums, W * (1 + tiles_of(M, N, T)) + blocks, what)
        first_row = 0 if one_shot else (group.index + 1) % W * shard
        share = Share.create(config, T, M, [N], K, first_row if first_row < M else 0, device)
        return cls(
            group, workspace, share, T, config, (M, N, K), after, workspace.staging + 2 * parts, run
        )

    def __call__(
        self, x: Tensor, w: Tensor, *, out: Tensor, args: tuple[Any, ...] = (), dry: int | Turns = 0
    ) -> None:
        """Launch on the current stream."""
        if 0 in (self.M, self.N):
            return
        T, work, share, group = (
            product_modes(self.T, x, w, self.config),
            self.workspace,
            self.share,
            self.group,
        )
        launch(
            matmul_all_reduce_kernel, share.programs, dry,
            operand(x, T.a_mode, T.block_m, T.block_k), *x.stride(),
            operand(w.T, T.b_mode, T.block_n, T.block_k), *w.T.stride(), out, *out.stride(),
            work.staging, self.sums, work.flags, work.state, *work.watch, group.index, self.M,
            self.N, self.K, round_up(self.N, 16), shard_rows(self.M, group.size), self.run,
            share.heads,
            share.table, share.scratch, share.counts, args, self.after, T,
            num_warps=self.config.warps, num_stages=self.config.stages,
        )  # fmt: skip

    def warm(self, x: Tensor, w: Tensor, *, out: Tensor, args: tuple[Any, ...] = ()) -> None:
        """Compile and load the kernel for these operands without running it."""
        self(x, w, out=out, args=args, dry=1)
