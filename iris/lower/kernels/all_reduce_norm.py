"""``all_reduce(x)``, a residual or a bias, then RMSNorm, in one kernel: the step between layers.

One-shot: every rank sends its rows to all ranks, and each sums them, a row a program, in rank
order. For few rows; see NOTE [Epochs] and NOTE [Progress] in protocol.py.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from iris.device import tracing
from iris.device.target import device_function
from iris.lower.kernels.config import TRITON_DTYPES, processors
from iris.lower.kernels.gemm import identity
from iris.lower.kernels.host import GroupLike, Stage
from iris.lower.kernels.protocol import enter, leave, peer, publish, ticket, wait
from iris.lower.kernels.workspace import Workspace, round_up


@dataclass(frozen=True)
class Rows:
    """What the kernel is compiled for; it sees this as one constexpr, ``R``."""

    world: int
    lanes: int
    rows: int  # of a block
    columns: int  # the row length, rounded up to a power of two
    dtype: Any
    summed: Any


@device_function
def _push_rows(
    x, x_row, M, N, ld, slot, rank, blocks, staging, flags, epoch, state, R: tl.constexpr
):
    """Send this rank's rows to every member's slot, block by block, by ticket."""
    W: tl.constexpr = R.world
    columns = tl.arange(0, R.columns)
    block = ticket(state, 0)
    while block < blocks:
        rows = block * R.rows + tl.arange(0, R.rows)
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        value = tl.load(x + rows.to(tl.int64)[:, None] * x_row + columns[None, :], mask=mask)
        at = (slot + rows.to(tl.int64))[:, None] * ld + columns[None, :]
        for member in tl.static_range(W):
            tl.store(peer(staging, member, R.dtype) + at, value, mask=mask)
        publish(flags, rank * blocks + block, epoch, R.world, R.lanes)
        block = ticket(state, 0)


@device_function
def _sum_block(slots, M, ld, rows, mask, R: tl.constexpr):
    W: tl.constexpr = R.world
    at = rows.to(tl.int64)[:, None] * ld + tl.arange(0, R.columns)[None, :]
    total = tl.load(slots + at, mask=mask, other=0, cache_modifier=".cg").to(tl.float32)
    for member in tl.static_range(1, W):
        slot = slots + member * M.to(tl.int64) * ld
        total += tl.load(slot + at, mask=mask, other=0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit(do_not_specialize=["dry", "rank", "stage", "M", "blocks"])
def all_reduce_norm_kernel(
    dry, x, x_row, weight, eps, out, out_row, summed, summed_row, staging, flags, state, record,
    stage, trace, rank, M, N, ld, blocks, args, after: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    if dry == 0:
        epoch, turn, number = enter(state)
        half = (turn & 1).to(tl.int64) * R.world * M
        watch = (record, stage, trace)
        since = tracing.begin(watch)
        _push_rows(
            x, x_row, M, N, ld, half + rank * M, rank, blocks, staging, flags, epoch, state, R
        )
        tracing.end(watch, since, tracing.PUSH)
        since = tracing.begin(watch)
        mine = peer(flags, rank, tl.int32)
        slots = peer(staging, rank, R.dtype) + half * ld
        members = tl.arange(0, R.lanes)
        columns = tl.arange(0, R.columns)
        block = number
        while block < blocks:
            rows = block * R.rows + tl.arange(0, R.rows)
            mask = (rows < M)[:, None] & (columns < N)[None, :]
            r = rows.to(tl.int64)[:, None]
            flag = mine + members * blocks + block
            wait(flag, members, members < R.world, epoch, watch)
            total = _sum_block(slots, M, ld, rows, mask, R).to(R.dtype).to(tl.float32)
            total = after((total, total), rows, columns, M, N, args).to(R.summed)
            if summed is not None:
                tl.store(summed + r * summed_row + columns[None, :], total, mask=mask)
            value = total.to(tl.float32)
            square = tl.sum(tl.where(mask, value * value, 0.0), axis=1) / N
            value = value * tl.rsqrt(square + eps)[:, None]
            if weight is not None:
                scale = tl.load(weight + columns, mask=columns < N, other=0).to(tl.float32)
                value = value * scale[None, :]
            tl.store(
                out + r * out_row + columns[None, :], value.to(out.dtype.element_ty), mask=mask
            )
            block = ticket(state, 1) + tl.num_programs(0)
        tracing.end(watch, since, tracing.SUM)
        leave(state, epoch, turn, rank, watch, R)


class AllReduceNorm(Stage):
    """``summed = after(all_reduce(x))``; ``out = rms_norm(summed) * weight``, one kernel.

    ``x``, ``summed`` and ``out`` are [M, N] with contiguous rows; ``weight`` [N] and ``summed`` may
    be None. ``after`` (a residual, a bias) is an epilogue: see the package. The sum over ranks is
    fp32 in rank order and rounded, so is what ``after`` gives, the norm is fp32: what the separate
    torch operators give.

    Example::

        stage = AllReduceNorm.create(
            ctx, ctx.world, M=8, N=4096, dtype=torch.bfloat16, eps=1e-5, after=plus_residual
        )
        stage.warm(x, weight, out=y, summed=h, args=(residual,)); ctx.barrier()
        stage(x, weight, out=y, summed=h, args=(residual,))
    """

    kernel = all_reduce_norm_kernel
    options: ClassVar = {"num_warps": 8}

    def __init__(
        self,
        group: GroupLike,
        workspace: Workspace,
        programs: int,
        shape: tuple[int, int],
        R: Rows,
        eps: float,
        after: Any,
    ) -> None:
        self.group, self.workspace, self.R = group, workspace, R
        self.eps, self.after = eps, after
        self.M, self.N = shape
        self.blocks = -(-self.M // R.rows)
        self.programs = min(self.blocks, programs)

    @classmethod
    def create(
        cls,
        ctx: Any,
        group: GroupLike,
        *,
        M: int,
        N: int,
        dtype: torch.dtype,
        summed_dtype: torch.dtype | None = None,
        eps: float = 1e-6,
        after: Any = identity,
    ) -> "AllReduceNorm":
        """Allocate the workspace (collective over ``group``)."""
        W = group.size
        columns = max(16, triton.next_power_of_2(N))
        dtypes = TRITON_DTYPES[dtype], TRITON_DTYPES[summed_dtype or dtype]
        R = Rows(W, max(2, triton.next_power_of_2(W)), 1, columns, *dtypes)
        half = W * M * round_up(N, 16) * dtype.itemsize
        workspace = Workspace(ctx, group, half, (M,), f"all_reduce_norm of [{M}, {N}]")
        return cls(group, workspace, processors(ctx), (M, N), R, eps, after)

    def arguments(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        *,
        out: Tensor,
        summed: Tensor | None = None,
        args: tuple[Any, ...] = (),
    ) -> list[Any] | None:
        """The kernel's arguments; ``args`` are those of ``after``."""
        if 0 in (self.M, self.N):
            return None
        work = self.workspace
        return [
            x, x.stride(0), weight, self.eps, out, out.stride(0), summed,
            0 if summed is None else summed.stride(0), work.staging, work.flags, work.state,
            *work.watch, self.group.index, self.M, self.N, round_up(self.N, 16), self.blocks, args,
            self.after, self.R,
        ]  # fmt: skip
