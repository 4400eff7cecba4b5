"""``all_gather(x @ w, dim=0)`` in one kernel.

Every finished tile goes to all ranks while later tiles compute; each rank copies what arrives into
its result. See NOTE [Epochs] and NOTE [Progress] in protocol.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from iris.device import tracing
from iris.device.target import device_function
from iris.lower.kernels.config import TRITON_DTYPES, GemmConfig, Tiling, default_config
from iris.lower.kernels.gemm import identity, nothing, run_segments
from iris.lower.kernels.host import (
    GroupLike,
    Share,
    Turns,
    Workspace,
    interpreted,
    launch,
    operand,
    product_modes,
    round_up,
    rows_of,
    shard_rows,
    tiles_of,
)
from iris.lower.kernels.protocol import enter, greet, leave, meet, peer, team
from iris.lower.kernels.sums import announce_to_all, collect, send_to_all, tiles_in


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


@triton.jit(do_not_specialize=["dry", "m", "rank", "stage", "M", "shard", "run"])
def matmul_all_gather_kernel(
    dry, a, a_row, a_k, b, b_row, b_k, out, out_row, out_column, staging, flags, state, record,
    stage, trace, rank, m, M, N, K, ld, shard, run, heads, table, scratch, counts, args,
    epilogue: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    if dry == 0:
        epoch, number = enter(state)
        half = (epoch & 1).to(tl.int64) * M
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
        sink = (out, out_row, out_column, M, N, args)
        since = tracing.begin(watch)
        collect(source, ld, T.world, shard, run, (M, N), line, rank, number, sink, identity, T)
        tracing.end(watch, since, tracing.COLLECT)
        if T.meet:
            meet(line[0], number, epoch, line[3], T.world, T.lanes)
        leave(state, epoch)


class MatmulAllGather:
    """``out = all_gather(epilogue(x @ w), dim=0)`` over a group, one kernel.

    ``x`` is this rank's rows of [M, K] (torch.chunk's split), ``w`` is [K, N], of any strides;
    ``out`` is [M, N]. The epilogue sees this rank's rows, from 0. To gather columns, give the
    transposed problem: ``stage(w.T, x.T, out=out.T)``.

    Example::

        head = MatmulAllGather.create(ctx, ctx.world, M=512, N=4096, K=4096, dtype=torch.bfloat16)
        head.warm(x, w, out=y); ctx.barrier()
        head(x, w, out=y)
    """

    def __init__(
        self,
        group: GroupLike,
        workspace: Workspace,
        share: Share,
        T: Tiling,
        config: GemmConfig,
        shape: tuple[int, int, int],
        epilogue: Any,
    ) -> None:
        self.group, self.workspace, self.share = group, workspace, share
        self.T, self.config, self.epilogue = T, config, epilogue
        self.M, self.N, self.K = shape

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
        out_dtype: torch.dtype | None = None,
        epilogue: Any = identity,
        config: GemmConfig | None = None,
    ) -> "MatmulAllGather":
        """Allocate the workspace (collective over ``group``). ``M`` counts all ranks' rows.

        Results travel as ``out_dtype`` (default: the type of a product of ``dtype``).
        """
        device, W = ctx.heap.device, group.size
        shard, m = shard_rows(M, W), rows_of(M, W, group.index)
        config = config or default_config(shard, N, dtype, device)
        out = out_dtype or (torch.int32 if dtype == torch.int8 else dtype)
        T = Tiling.of(config, W, 1, dtype, interpreted())
        high = min(T.block_m, max(1, config.copy // 2 // T.block_n))
        T = T.with_modes(
            dtype=TRITON_DTYPES[out],
            rows=high,
            columns=T.block_n,
            announced=True,
            meet=rows_of(M, W, W - 1) == 0,
        )
        half = M * round_up(N, 16) * out.itemsize
        flags = W * (1 + tiles_of(shard, N, T))
        workspace = Workspace(
            ctx, group, half, flags, f"matmul_all_gather of [{M}, {K}] x [{K}, {N}]"
        )
        share = Share.create(config, T, m, [N], K, 0, device)
        return cls(group, workspace, share, T, config, (M, N, K), epilogue)

    def __call__(
        self, x: Tensor, w: Tensor, *, out: Tensor, args: tuple[Any, ...] = (), dry: int | Turns = 0
    ) -> None:
        """Launch on the current stream."""
        if 0 in (self.M, self.N):
            return
        T, work, share = product_modes(self.T, x, w, self.config), self.workspace, self.share
        launch(
            matmul_all_gather_kernel, share.programs, dry,
            operand(x, T.a_mode, T.block_m, T.block_k), *x.stride(),
            operand(w.T, T.b_mode, T.block_n, T.block_k), *w.T.stride(), out, *out.stride(),
            work.staging, work.flags, work.state, *work.watch, self.group.index, x.shape[0], self.M,
            self.N, self.K, round_up(self.N, 16), shard_rows(self.M, self.group.size),
            T.block_m, share.heads,
            share.table, share.scratch, share.counts, args, self.epilogue, T,
            num_warps=self.config.warps, num_stages=self.config.stages,
        )  # fmt: skip

    def warm(self, x: Tensor, w: Tensor, *, out: Tensor, args: tuple[Any, ...] = ()) -> None:
        """Compile and load the kernel for these operands without running it."""
        self(x, w, out=out, args=args, dry=1)
