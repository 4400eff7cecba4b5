"""The host side of the stages that begin with a product: what they have in common, said once."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from iris.lower.kernels.config import GemmConfig, Tiling, settled
from iris.lower.kernels.gemm import identity
from iris.lower.kernels.host import (
    GroupLike,
    Share,
    Stage,
    operand,
    product_modes,
    rows_of,
    shard_rows,
)
from iris.lower.kernels.schedule import FEW_ROWS
from iris.lower.kernels.workspace import Workspace, round_up

# Numbers that kernels of products are not compiled anew for.
LOOSE = ["dry", "m", "rank", "stage", "M", "shard", "run"]


@dataclass(frozen=True)
class Problem:
    """What a stage is asked for: products with ``w`` [K, N], results [M, N] in all."""

    group: GroupLike
    device: torch.device
    config: GemmConfig
    M: int
    N: int
    K: int
    dtype: torch.dtype
    part: torch.dtype  # what travels between ranks

    @property
    def shard(self) -> int:
        """Rows of a full shard of the result."""
        return shard_rows(self.M, self.group.size)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of results in staging."""
        return round_up(self.N, 16) * self.part.itemsize

    @property
    def first_row_after(self) -> int:
        """The first row that the next member owns: where a rank begins that sends rows away."""
        row = (self.group.index + 1) % self.group.size * self.shard
        return row if row < self.M else 0

    @property
    def someone_idle(self) -> bool:
        """Whether a member owns no rows."""
        return rows_of(self.M, self.group.size, self.group.size - 1) == 0


@dataclass(frozen=True)
class Layout:
    """How a stage lays a problem out: its tiling, rows summed or copied after one wait, bytes of a
    half of its staging, and of the staging of sums, and how many flags of each member.
    """

    T: Tiling
    run: int
    half: int
    flags: tuple[int, ...]
    half_sums: int = 0
    first_row: int = 0
    tile_rows: int = 0


class ProductStage(Stage):
    """``x @ w``, then a collective: kernel arguments and workspace. Collective to create."""

    name: str

    def __init__(self, ctx: Any, problem: Problem, layout: Layout, functions: Any) -> None:
        group, config = problem.group, problem.config
        self.problem, self.T, self.run, self.functions = problem, layout.T, layout.run, functions
        what = f"{self.name} to [{problem.M}, {problem.N}]"
        self.share = Share.create(
            config,
            layout.T,
            layout.tile_rows,
            [problem.N],
            problem.K,
            layout.first_row,
            problem.device,
        )
        self.workspace = Workspace(
            ctx,
            group,
            layout.half,
            layout.flags,
            what,
            layout.half_sums,
            self.share.scratch,
            together=problem.M > FEW_ROWS,
        )
        self.workspace.counters.append(self.share.counts)
        self.programs = self.share.programs
        self.options = {"num_warps": config.warps, "num_stages": config.stages}

    @classmethod
    def layout(cls, problem: Problem, **options: Any) -> Layout:
        raise NotImplementedError

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
        **options: Any,
    ) -> Self:
        """Allocate the workspace (collective). [M, N] is the whole result; it travels as
        ``part_dtype`` (by default, the type of a product of ``dtype``).
        """
        part = part_dtype or (torch.int32 if dtype == torch.int8 else dtype)
        config = settled(ctx, config, cls.tile_rows(M, group), N, dtype)
        problem = Problem(group, ctx.device, config, M, N, K, dtype, part)
        return cls(ctx, problem, cls.layout(problem, **options), (epilogue, after))

    @classmethod
    def tile_rows(cls, M: int, group: GroupLike) -> int:
        """Rows of the product that a full member computes."""
        return M

    def arguments(
        self,
        x: Tensor,
        w: Tensor,
        *,
        out: Tensor,
        args: tuple[Any, ...] = (),
        after_args: tuple[Any, ...] = (),
        **more: Any,
    ) -> list[Any] | None:
        """The kernel's arguments for ``x``, ``w`` and ``out`` of any strides."""
        p, work, share = self.problem, self.workspace, self.share
        if 0 in (p.M, p.N):
            return None
        T = product_modes(self.T, x, w, p.config)
        return [
            operand(x, T.a_mode, T.block_m, T.block_k), *x.stride(),
            operand(w.T, T.b_mode, T.block_n, T.block_k), *w.T.stride(), out, *out.stride(),
            work.staging, work.sums, work.flags, work.state, *work.watch, p.group.index,
            rows_of(p.M, p.group.size, p.group.index), p.M, p.N, p.K, round_up(p.N, 16), p.shard,
            self.run, share.heads, share.table, work.scratch.view(share.acc), share.counts, args,
            after_args, *self.extra(**more), *self.functions, T,
        ]  # fmt: skip

    def extra(self) -> list[Any]:
        """Arguments that one kernel alone has."""
        return []
