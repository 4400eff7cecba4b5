"""``all_gather(x, dim=0) @ w`` for one or several weights, in one kernel.

Every rank pushes its rows to all ranks (each byte crosses a link once), then computes tiles, its
own rows first. A tile waits only for the ranks whose rows it needs. See NOTE [Epochs] and NOTE
[Progress].
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from iris.device import tracing
from iris.device.target import device_function, fence_bulk
from iris.lower.kernels.config import GemmConfig, Tiling, default_config
from iris.lower.kernels.gemm import finish_piece, identity, nothing, run_segments
from iris.lower.kernels.host import (
    TMA_K,
    GroupLike,
    Share,
    Turns,
    Workspace,
    can_store_tma,
    common_mode,
    interpreted,
    launch,
    operand,
    round_up,
    rows_of,
    shard_rows,
    target,
)
from iris.lower.kernels.protocol import (
    enter,
    finished,
    leave,
    meet,
    peer,
    publish,
    team,
    ticket,
    wait_members,
)


@device_function
def _block(block, columns, S: tl.constexpr):
    """Rows and columns of a block of a matrix with ``columns`` columns."""
    across = tl.cdiv(columns, S.columns)
    rows = block // across * S.rows + tl.arange(0, S.rows)
    return rows, block % across * S.columns + tl.arange(0, S.columns)


@device_function
def _blocks(rows, columns, S: tl.constexpr):
    return tl.cdiv(rows, S.rows) * tl.cdiv(columns, S.columns)


@device_function
def _push_rows(x, m, K, staging, row, ld, state, S: tl.constexpr):
    """Send ``x = (source, row stride, column stride)`` to rows ``row ..`` of all members' staging.

    By ticket. Returns how many blocks this program sent.
    """
    W: tl.constexpr = S.world
    sent = 0
    block = ticket(state, 0)
    while block < _blocks(m, K, S):
        later = ticket(state, 0)
        r, c = _block(block, K, S)
        mask = (r < m)[:, None] & (c < K)[None, :]
        at = r.to(tl.int64)[:, None] * x[1] + c.to(tl.int64)[None, :] * x[2]
        value = tl.load(x[0] + at, mask=mask)
        at = (row + r.to(tl.int64))[:, None] * ld + c[None, :]
        for member in tl.static_range(W):
            tl.store(peer(staging, member, S.dtype) + at, value, mask=mask)
        sent += 1
        block = later
    return sent


@device_function
def _copy_gathered(source, M, K, ld, out, number, line, S: tl.constexpr):
    """Copy the gathered x from staging to ``out`` [M, K], when all ranks' rows are there."""
    flags, epoch, state, watch = line
    wait_members(flags, 0, S.world - 1, epoch, watch, S.lanes)
    block = number
    while block < _blocks(M, K, S):
        later = ticket(state, 1) + tl.num_programs(0)
        r, c = _block(block, K, S)
        mask = (r < M)[:, None] & (c < K)[None, :]
        r = r.to(tl.int64)[:, None]
        value = tl.load(source + r * ld + c[None, :], mask=mask, cache_modifier=".cg")
        tl.store(out + r * K + c[None, :], value, mask=mask)
        block = later


@device_function
def _begin(env, row, column, T: tl.constexpr):
    """Wait for the ranks whose rows the tile at ``row`` needs."""
    M, shard, line, _, _, _ = env
    last = tl.minimum(row + T.block_m, M) - 1
    wait_members(line[0], row // shard, last // shard, line[1], line[3], T.lanes)
    if T.a_mode != 0:
        fence_bulk()


@device_function
def _emit(env, tiles, row, column, epilogue, T: tl.constexpr):
    M, _, _, N, out, args = env
    finish_piece(tiles, row, column, out, M, N, epilogue, args, T)


@triton.jit(do_not_specialize=["dry", "m", "rank", "stage", "M", "shard"])
def all_gather_matmul_kernel(
    dry, x, x_row, x_column, m, staging, flags, state, record, stage, trace, rank, M, K, ld, shard,
    a_desc, gathered, heads, table, scratch, counts,
    b0, b0_row, b0_k, N0, out0, out0_row, out0_column,
    b1, b1_row, b1_k, N1, out1, out1_row, out1_column,
    b2, b2_row, b2_k, N2, out2, out2_row, out2_column,
    args, epilogue: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    if dry == 0:
        epoch, number = enter(state)
        half = (epoch & 1) * M
        row = half + rank * shard
        watch = (record, stage, trace)
        since = tracing.begin(watch)
        sent = _push_rows((x, x_row, x_column), m, K, staging, row, ld, state, T)
        tracing.end(watch, since, tracing.PUSH, nbytes=tracing.block_bytes(sent * T.world, T))
        if finished(state, 0, sent, _blocks(m, K, T), number):
            publish(flags, rank, epoch, T.world, T.lanes)
        line = (peer(flags, rank, tl.int32), epoch, state, watch)
        source = peer(staging, rank, T.dtype)
        a = (source, half + M, ld, 1, half)
        if T.a_mode != 0:
            a = (a_desc, M, ld, 1, half)
        members = team(state)
        w0 = (b0, N0, b0_row, b0_k)
        w1 = (b1, N1, b1_row, b1_k)
        w2 = (b2, N2, b2_row, b2_k)
        plan = (heads, table, scratch, counts, epoch, members, watch)
        env = (M, shard, line, N0, (out0, out0_row, out0_column), args)
        run_segments(a, w0, w1, K, plan, number, _begin, _emit, nothing, env, epilogue, T)
        if T.weights > 1:
            plan = (heads + 3, table, scratch, counts, epoch, members, watch)
            env = (M, shard, line, N1, (out1, out1_row, out1_column), args)
            run_segments(a, w1, w1, K, plan, number, _begin, _emit, nothing, env, epilogue, T)
        if T.weights > 2:
            plan = (heads + 6, table, scratch, counts, epoch, members, watch)
            env = (M, shard, line, N2, (out2, out2_row, out2_column), args)
            run_segments(a, w2, w2, K, plan, number, _begin, _emit, nothing, env, epilogue, T)
        if gathered is not None:
            first = source + half.to(tl.int64) * ld
            since = tracing.begin(watch)
            _copy_gathered(first, M, K, ld, gathered, number, line, T)
            tracing.end(watch, since, tracing.COLLECT)
        if T.meet:
            meet(line[0], number, epoch, line[3], T.world, T.lanes)
        leave(state, epoch)


class AllGatherMatmul:
    """``out[i] = epilogue(all_gather(x, dim=0) @ w[i])`` over a group, one kernel.

    ``x`` is this rank's rows of [M, K] (torch.chunk's split), ``w[i]`` is [K, columns[i]] of any
    strides, ``out[i]`` [M, columns[i]]. With ``zipped`` two weights of equal width share one
    epilogue and one output: ``out[0] = epilogue((x @ w[0], x @ w[1]))``.

    Example::

        up = AllGatherMatmul.create(ctx, ctx.world, M=4096, K=8192, columns=[7168],
        dtype=torch.bfloat16) up.warm(x, [w], out=[h]); ctx.barrier()     # loads the kernel; no
        rank waits inside a kernel before all have up(x, [w], out=[h])                         #
        only launches
    """

    MAX_WEIGHTS = 3

    def __init__(
        self,
        group: GroupLike,
        workspace: Workspace,
        share: Share,
        T: Tiling,
        config: GemmConfig,
        shape: tuple[int, int],
        epilogue: Any,
        dtype: torch.dtype,
    ) -> None:
        self.group, self.workspace, self.share, self.T, self.config = (
            group,
            workspace,
            share,
            T,
            config,
        )
        self.M, self.K = shape
        self.epilogue = epilogue
        self.dtype = dtype
        self.ld = round_up(max(1, self.K), 16)
        half = self.M * self.ld * dtype.itemsize
        halves = workspace.local[: 2 * half].view(dtype).view(2 * self.M, self.ld)
        self.staged = halves[:, : self.K]

    @classmethod
    def create(
        cls,
        ctx: Any,
        group: GroupLike,
        *,
        M: int,
        K: int,
        columns: Sequence[int],
        dtype: torch.dtype,
        epilogue: Any = identity,
        zipped: bool = False,
        config: GemmConfig | None = None,
    ) -> "AllGatherMatmul":
        """Allocate the workspace (collective). ``M`` and ``K`` are those of the gathered ``x``."""
        device = ctx.heap.device
        config = config or default_config(M, max(columns), dtype, device)
        T = Tiling.of(config, group.size, K, dtype, interpreted())
        tiled = columns[:1] if zipped else columns
        # Nothing to compute here, or nothing to send there: then no tile waits for every member.
        some_idle = 0 in tiled or rows_of(M, group.size, group.size - 1) == 0
        T = T.with_modes(weights=len(tiled), zipped=2 if zipped else 1, meet=some_idle)
        half = M * round_up(max(1, K), 16) * dtype.itemsize
        workspace = Workspace(ctx, group, half, group.size, f"all_gather_matmul of [{M}, {K}]")
        share = Share.create(
            config, T, M, tiled, K, group.index * shard_rows(M, group.size), device
        )
        return cls(group, workspace, share, T, config, (M, K), epilogue, dtype)

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        *,
        out: Sequence[Tensor],
        args: tuple[Any, ...] = (),
        gathered: Tensor | None = None,
        dry: int | Turns = 0,
    ) -> None:
        """Launch on the current stream. ``gathered`` [M, K], contiguous, gets the gathered x."""
        T = self.T
        if self.M == 0:
            return
        a_mode = TMA_K if self.config.tma and self.staged.is_cuda and self.K > 0 else 0
        columns = [w.T for w in weights]
        T = T.with_modes(
            a_mode=a_mode,
            b_mode=common_mode(columns, self.config.tma and x.is_cuda),
            out_tma=can_store_tma(out, self.config.tma and x.is_cuda),
        )
        slots: list[Any] = []
        for i in range(self.MAX_WEIGHTS):
            if i < len(columns):
                w = columns[i]
                slots += [operand(w, T.b_mode, T.block_n, T.block_k), *w.stride(), w.shape[0]]
            else:
                slots += [None, 0, 0, 0]
            slots += [target(out[i], T), *out[i].stride()] if i < len(out) else [None, 0, 0]
        work, share = self.workspace, self.share
        shard = shard_rows(self.M, self.group.size)
        a = operand(self.staged, a_mode, T.block_m, T.block_k) if a_mode else None
        launch(
            all_gather_matmul_kernel, share.programs, dry, x, *x.stride(), x.shape[0],
            work.staging, work.flags, work.state, *work.watch,
            self.group.index, self.M, self.K, self.ld, shard, a, gathered, share.heads, share.table,
            share.scratch, share.counts, *slots, args, self.epilogue, T,
            num_warps=self.config.warps, num_stages=self.config.stages,
        )  # fmt: skip

    def warm(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        *,
        out: Sequence[Tensor],
        args: tuple[Any, ...] = (),
        gathered: Tensor | None = None,
    ) -> None:
        """Compile and load the kernel for these operands without running it."""
        self(x, weights, out=out, args=args, gathered=gathered, dry=1)
