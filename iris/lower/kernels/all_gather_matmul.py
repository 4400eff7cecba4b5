"""``all_gather(x, dim) @ w`` for one or several weights, in one kernel.

Every rank pushes its part to all ranks (each byte crosses a link once), then computes tiles, of
gathered rows its own first. A tile waits only for the ranks whose rows it needs. Where columns are
gathered, the contracted dim, a step of a tile waits for the rank whose columns it needs, in rank
order, so that every rank gets the same bits. See NOTE [Epochs] and NOTE [Progress].

With ``engine`` a program asks the copy engine to send to the other ranks and to set their flags:
that takes no SM, so even a kernel that holds all of them gets what it waits for. Only for ranks
with a GPU each: within one GPU, copies do take SMs.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from iris.device import copy_engine, tracing
from iris.device.target import device_function, fence_bulk
from iris.lower.kernels.config import GemmConfig, Tiling, settled
from iris.lower.kernels.gemm import finish_piece, identity, nothing, run_segments
from iris.lower.kernels.host import (
    TMA_K,
    GroupLike,
    Share,
    Stage,
    can_store_tma,
    common_mode,
    interpreted,
    operand,
    rows_of,
    shard_rows,
    target,
)
from iris.lower.kernels.protocol import (
    crew,
    enter,
    finished,
    first_item,
    first_ticket,
    leave,
    meet,
    peer,
    publish,
    publish_to,
    team,
    ticket,
    wait_members,
)
from iris.lower.kernels.schedule import FEW_ROWS
from iris.lower.kernels.workspace import Workspace, round_up


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
def _push(x, m, K, staging, row, column, ld, state, rank, number, S: tl.constexpr):
    """Send ``x = (source, row stride, column stride)`` [m, K] to all members' staging, by ticket.

    It lies at (row, column) there. Returns how many blocks this program sent. To this rank's own
    staging only, where the copy engine sends to others.
    """
    W: tl.constexpr = S.world
    sent = 0
    block = first_ticket(state, 0, number, S)
    while block < _blocks(m, K, S):
        later = ticket(state, 0)
        r, c = _block(block, K, S)
        mask = (r < m)[:, None] & (c < K)[None, :]
        at = r.to(tl.int64)[:, None] * x[1] + c.to(tl.int64)[None, :] * x[2]
        value = tl.load(x[0] + at, mask=mask)
        at = (row + r.to(tl.int64))[:, None] * ld + (column + c)[None, :]
        if S.engine:
            tl.store(peer(staging, rank, S.dtype) + at, value, mask=mask)
        else:
            for member in tl.static_range(W):
                tl.store(peer(staging, member, S.dtype) + at, value, mask=mask)
        sent += 1
        block = later
    return sent


@device_function
def _request(engine, x, m, K, place, rank, epoch, number, S: tl.constexpr):
    """Let program 0 ask the copy engine to send to all other members, and set their flags."""
    W: tl.constexpr = S.world
    SIZE: tl.constexpr = S.dtype.primitive_bitwidth // 8
    staging, row, column, ld, flags = place
    for member in tl.static_range(W):
        if (number == 0) & (member != rank):
            queue = tl.cast(tl.load(engine + member), tl.pointer_type(tl.int64))
            if m * K > 0:
                at = peer(staging, member, S.dtype) + row.to(tl.int64) * ld + column
                copy_engine.enqueue(
                    queue,
                    member,
                    copy_engine.COPY,
                    at.to(tl.int64),
                    x[0].to(tl.int64),
                    K * SIZE,
                    m,
                    ld * SIZE,
                    x[1] * SIZE,
                )
            flag = (peer(flags, member, tl.int32) + rank).to(tl.int64)
            copy_engine.enqueue(queue, member, copy_engine.SET, flag, epoch + 1, 4, 1, 0, 0)


@device_function
def _settle(engine, rank, number, W: tl.constexpr):
    """Let program 0 wait until the copy engine has read all of this rank's x."""
    for member in tl.static_range(W):
        if (number == 0) & (member != rank):
            queue = tl.cast(tl.load(engine + member), tl.pointer_type(tl.int64))
            copy_engine.drain(queue, member)


@device_function
def _copy_gathered(source, M, K, ld, out, number, line, S: tl.constexpr):
    """Copy the gathered x from staging to ``out`` [M, K], when all ranks' rows are there."""
    flags, epoch, state, watch = line
    wait_members(flags, 0, S.world - 1, epoch, watch, S.lanes)
    block = first_item(number, S)
    while block < _blocks(M, K, S):
        later = ticket(state, 1) + crew(S)
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
    if not T.by_columns:
        last = tl.minimum(row + T.block_m, M) - 1
        wait_members(line[0], row // shard, last // shard, line[1], line[3], T.lanes)
        if T.a_mode != 0:
            fence_bulk()


@device_function
def _emit(env, tiles, row, column, epilogue, T: tl.constexpr):
    M, _, _, N, out, args = env
    finish_piece(tiles, row, column, out, M, N, epilogue, args, T)


@device_function
def _announce(flags, rank, epoch, T: tl.constexpr):
    """Tell all members that this rank's rows are there; the copy engine tells the others itself."""
    if T.engine:
        publish_to(flags, rank, rank, rank, epoch, T.lanes)
    else:
        publish(flags, rank, epoch, T.world, T.lanes)


@triton.jit(do_not_specialize=["dry", "m", "rank", "stage", "M", "shard"])
def all_gather_matmul_kernel(
    dry, x, x_row, x_column, m, k, staging, flags, state, record, stage, trace, engine, rank, M, K,
    ld, shard, a_desc, gathered, heads, table, scratch, counts,
    b0, b0_row, b0_k, N0, out0, out0_row, out0_column,
    b1, b1_row, b1_k, N1, out1, out1_row, out1_column,
    b2, b2_row, b2_k, N2, out2, out2_row, out2_column,
    args0, args1, args2, epilogue0: tl.constexpr, epilogue1: tl.constexpr, epilogue2: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    if dry == 0:
        epoch, turn, number = enter(state)
        half = (turn & 1) * M
        source = (x, x_row, x_column)
        watch = (record, stage, trace)
        since = tracing.begin(watch)
        row = half
        column = rank * shard
        if not T.by_columns:
            row += column
            column *= 0
        if T.engine:
            place = (staging, row, column, ld, flags)
            _request(engine, source, m, k, place, rank, epoch, number, T)
        sent = _push(source, m, k, staging, row, column, ld, state, rank, number, T)
        there: tl.constexpr = 1 if T.engine else T.world
        tracing.end(watch, since, tracing.PUSH, nbytes=tracing.block_bytes(sent * there, T))
        if finished(state, 0, sent, _blocks(m, k, T), number):
            _announce(flags, rank, epoch, T)
        line = (peer(flags, rank, tl.int32), epoch, state, watch)
        source = peer(staging, rank, T.dtype)
        arriving = (line[0], epoch, watch, shard)
        a = (source, half + M, ld, 1, half, arriving)
        if T.a_mode != 0:
            a = (a_desc, M, ld, 1, half, arriving)
        members = team(state)
        w0 = (b0, N0, b0_row, b0_k)
        w1 = (b1, N1, b1_row, b1_k)
        w2 = (b2, N2, b2_row, b2_k)
        plan = (heads, table, scratch, counts, epoch, members, watch)
        env = (M, shard, line, N0, (out0, out0_row, out0_column), args0)
        run_segments(a, w0, w1, K, plan, number, _begin, _emit, nothing, env, epilogue0, T)
        if T.weights > 1:
            plan = (heads + 3, table, scratch, counts, epoch, members, watch)
            env = (M, shard, line, N1, (out1, out1_row, out1_column), args1)
            run_segments(a, w1, w1, K, plan, number, _begin, _emit, nothing, env, epilogue1, T)
        if T.weights > 2:
            plan = (heads + 6, table, scratch, counts, epoch, members, watch)
            env = (M, shard, line, N2, (out2, out2_row, out2_column), args2)
            run_segments(a, w2, w2, K, plan, number, _begin, _emit, nothing, env, epilogue2, T)
        if gathered is not None:
            first = source + half.to(tl.int64) * ld
            since = tracing.begin(watch)
            _copy_gathered(first, M, K, ld, gathered, number, line, T)
            tracing.end(watch, since, tracing.COLLECT)
        if T.meet:
            meet(line[0], number, epoch, line[3], T.world, T.lanes)
        if T.engine:
            _settle(engine, rank, number, T.world)
        leave(state, epoch, turn, rank, watch, T)


class AllGatherMatmul(Stage):
    """``out[i] = epilogue[i](all_gather(x, dim) @ w[i])`` over a group, one kernel.

    ``x`` is this rank's rows of [M, K], or with ``dim=1`` its columns (torch.chunk's split either
    way); ``w[i]`` is [K, columns[i]] of any strides, ``out[i]`` [M, columns[i]]. With ``zipped``
    two weights of equal width share one epilogue and one output: ``out[0] = epilogue((x @ w[0], x @
    w[1]))``. Every epilogue has its own ``args[i]``.

    Example::

        up = AllGatherMatmul.create(
            ctx, ctx.world, M=4096, K=8192, columns=[7168], dtype=torch.bfloat16
        )
        up.warm(x, [w], out=[h]); ctx.barrier()     # no rank waits in a kernel before all have it
        up(x, [w], out=[h])                         # only launches
    """

    MAX_WEIGHTS = 3
    kernel = all_gather_matmul_kernel

    def __init__(
        self,
        ctx: Any,
        group: GroupLike,
        shape: tuple[int, int],
        tiled: Sequence[int],
        dtype: torch.dtype,
        T: Tiling,
        config: GemmConfig,
        epilogues: Sequence[Any],
    ) -> None:
        self.group, self.T, self.config = group, T, config
        self.M, self.K = shape
        self.ld = round_up(max(1, self.K), 16)
        half = self.M * self.ld * dtype.itemsize
        what = f"all_gather_matmul of [{self.M}, {self.K}]"
        self.shard = shard_rows(self.K if T.by_columns else self.M, group.size)
        first_row = 0 if T.by_columns else group.index * self.shard
        self.queues = _queues(ctx, group) if T.engine else None
        self.share = Share.create(config, T, self.M, tiled, self.K, first_row, ctx.heap.device)
        together = self.M > FEW_ROWS
        self.workspace = Workspace(
            ctx, group, half, (1,), what, scratch=self.share.scratch, together=together
        )
        self.workspace.counters.append(self.share.counts)
        self.epilogues = [*epilogues, *[identity] * (self.MAX_WEIGHTS - len(epilogues))]
        self.programs = self.share.programs
        self.options = {"num_warps": config.warps, "num_stages": config.stages}
        self.dtype = dtype

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
        dim: int = 0,
        config: GemmConfig | None = None,
        engine: bool = False,
    ) -> "AllGatherMatmul":
        """Allocate the workspace (collective). ``M`` and ``K`` are those of the gathered ``x``;
        ``epilogue`` may be a list, one for each output. ``engine`` sends by the context's copy
        engine where rows of ``x`` are contiguous.
        """
        config = settled(ctx, config, M, max(columns), dtype)
        split = K if dim else M
        T = Tiling.of(config, group.size, -(-K // group.size) if dim else K, dtype, interpreted())
        tiled = columns[:1] if zipped else columns
        # Nothing to compute here, or nothing to send there: then no tile waits for every member.
        some_idle = 0 in tiled or rows_of(split, group.size, group.size - 1) == 0
        T = T.with_modes(
            weights=len(tiled),
            zipped=2 if zipped else 1,
            meet=some_idle,
            by_columns=dim == 1,
            engine=engine and group.size > 1,
        )
        epilogues = epilogue if isinstance(epilogue, list) else [epilogue] * len(tiled)
        return cls(ctx, group, (M, K), tiled, dtype, T, config, epilogues)

    @cached_property
    def staged(self) -> Tensor:
        """This rank's staging, both halves, without the ends of rows."""
        return self.workspace.local.view(self.dtype).view(-1, self.ld)[:, : self.K]

    def arguments(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        *,
        out: Sequence[Tensor],
        args: Sequence[tuple[Any, ...]] = (),
        gathered: Tensor | None = None,
    ) -> list[Any] | None:
        """The kernel's arguments. ``gathered`` [M, K], contiguous, gets the gathered x."""
        if self.M == 0:
            return None
        tma = self.config.tma and x.is_cuda
        a_mode = TMA_K if tma and self.K > 0 else 0
        columns = [w.T for w in weights]
        in_rows = x.stride(1) == 1 and x.stride(0) >= x.shape[1]
        T = self.T.with_modes(
            a_mode=a_mode,
            b_mode=common_mode(columns, tma),
            out_tma=can_store_tma(out, tma),
            engine=self.T.engine and in_rows,
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
        a = operand(self.staged, a_mode, T.block_m, T.block_k) if a_mode else None
        return [
            x, *x.stride(), *x.shape, work.staging, work.flags, work.state, *work.watch,
            self.queues, self.group.index, self.M, self.K, self.ld, self.shard, a, gathered,
            share.heads, share.table, work.scratch.view(share.acc), share.counts, *slots,
            *args, *[()] * (self.MAX_WEIGHTS - len(args)), *self.epilogues, T,
        ]  # fmt: skip


def _queues(ctx: Any, group: GroupLike) -> Tensor:
    """Where this rank's queues to the members' copy engines are described, int64[size]."""
    rows = ctx.get_copy_engine_ctx()
    addresses = [rows[rank].data_ptr() for rank in group.ranks]
    return torch.tensor(addresses, dtype=torch.int64, device=rows.device)
