"""``reduce_scatter(x @ w, dim=0)`` in one kernel.

Every finished tile of a rank's partial product goes to the staging of the ranks that own its rows,
other ranks' rows first; then each rank sums its own rows in rank order, as the parts arrive. See
NOTE [Epochs] and NOTE [Progress].
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
    rows_of,
    shard_rows,
    tiles_of,
)
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


@triton.jit(do_not_specialize=["dry", "m", "rank", "stage", "M", "shard", "run"])
def matmul_reduce_scatter_kernel(
    dry, a, a_row, a_k, b, b_row, b_k, out, out_row, out_column, staging, flags, state, record,
    stage, trace, rank, m, M, N, K, ld, shard, run, heads, table, scratch, counts, args, after_args,
    epilogue: tl.constexpr, after: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    if dry == 0:
        epoch, number = enter(state)
        size = (M, N)
        half = ((epoch & 1) * T.world).to(tl.int64) * shard
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
        sum_rows(number, m, first, run, parts, size, line, finish_sum, no_news, sink, after, T)
        tracing.end(watch, since, tracing.SUM)
        if T.meet:
            meet(line[0], number, epoch, line[3], T.world, T.lanes)
        leave(state, epoch)


class MatmulReduceScatter:
    """``out = after(reduce_scatter(epilogue(x @ w), dim=0))`` over a group, one kernel.

    ``x`` is [M, K] and ``w`` [K, N], both this rank's part of the contracted dim, of any strides;
    ``out`` this rank's rows of [M, N] (torch.chunk's split). ``epilogue`` works on this rank's part
    before the sum, ``after`` on the sum. To scatter columns, give the transposed problem:
    ``stage(w.T, x.T, out=out.T)``.

    Example::

        down = MatmulReduceScatter.create(ctx, ctx.world, M=4096, N=8192, K=7168,
        dtype=torch.bfloat16) down.warm(h, w, out=y); ctx.barrier() down(h, w, out=y)
    """

    def __init__(
        self,
        group: GroupLike,
        workspace: Workspace,
        share: Share,
        T: Tiling,
        config: GemmConfig,
        shape: tuple[int, int, int],
        epilogues: tuple[Any, Any],
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
        self.epilogue, self.after = epilogues
        self.run = run

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
        epilogue: Any = identity,
        after: Any = identity,
        config: GemmConfig | None = None,
    ) -> "MatmulReduceScatter":
        """Allocate the workspace (collective). Parts are sent as ``part_dtype``.

        By default that is the type of a product of ``dtype``.
        """
        device = ctx.heap.device
        config = config or default_config(M, N, dtype, device)
        part = part_dtype or (torch.int32 if dtype == torch.int8 else dtype)
        T, run = part_tiling(config, group.size, dtype, part, shard_rows(M, group.size), N, device)
        T = T.with_modes(announced=True, meet=rows_of(M, group.size, group.size - 1) == 0)
        half = group.size * shard_rows(M, group.size) * round_up(N, 16) * part.itemsize
        what = f"matmul_reduce_scatter to [{M}, {N}]"
        workspace = Workspace(ctx, group, half, group.size * (1 + tiles_of(M, N, T)), what)
        first_row = (group.index + 1) % group.size * shard_rows(M, group.size)
        share = Share.create(config, T, M, [N], K, first_row if first_row < M else 0, device)
        return cls(group, workspace, share, T, config, (M, N, K), (epilogue, after), run)

    def __call__(
        self,
        x: Tensor,
        w: Tensor,
        *,
        out: Tensor,
        args: tuple[Any, ...] = (),
        after_args: tuple[Any, ...] = (),
        dry: int | Turns = 0,
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
            matmul_reduce_scatter_kernel, share.programs, dry,
            operand(x, T.a_mode, T.block_m, T.block_k), *x.stride(),
            operand(w.T, T.b_mode, T.block_n, T.block_k), *w.T.stride(), out, *out.stride(),
            work.staging, work.flags, work.state, *work.watch, group.index,
            rows_of(self.M, group.size, group.index), self.M, self.N, self.K, round_up(self.N, 16),
            shard_rows(self.M, group.size), self.run, share.heads, share.table, share.scratch,
            share.counts, args, after_args, self.epilogue, self.after, T,
            num_warps=self.config.warps, num_stages=self.config.stages,
        )  # fmt: skip

    def warm(
        self,
        x: Tensor,
        w: Tensor,
        *,
        out: Tensor,
        args: tuple[Any, ...] = (),
        after_args: tuple[Any, ...] = (),
    ) -> None:
        """Compile and load the kernel for these operands without running it."""
        self(x, w, out=out, args=args, after_args=after_args, dry=1)
