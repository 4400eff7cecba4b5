"""Launch configurations: what a planner may choose, the defaults, what kernels are compiled for."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl

from iris.errors import ConfigError
from iris.lower.kernels.schedule import FEW_ROWS

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.int8: tl.int8,
    torch.int32: tl.int32,
}


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class GemmConfig:
    """Tile and launch shape of a GEMM stage.

    ``programs`` is how many programs run (0: one for each multiprocessor), ``group_m`` how many row
    tiles share a band of columns, ``pieces`` in how many column pieces a tile is stored (1, 2 or
    4), ``cut`` whether left-over tiles may be cut along the contracted dim, ``tma`` whether tensor
    descriptors are used where they can be, ``copy`` the elements a program moves at a time,
    ``fast`` whether fp8 products may be summed in what the matrix unit keeps, less than fp32,
    ``communication`` how many programs send, sum and collect besides (0: all).
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    warps: int = 8
    stages: int = 4
    group_m: int = 8
    programs: int = 0
    pieces: int = 4
    cut: bool = True
    tma: bool = True
    copy: int = 16384
    fast: bool = False
    communication: int = 0

    def __post_init__(self) -> None:
        """ConfigError for what no kernel can have."""
        powers = {"block_m": 16, "block_n": 16, "block_k": 16, "copy": 16, "warps": 1}
        numbers = {"stages": 1, "group_m": 1, "programs": 0, "communication": 0}
        faults = [
            f"{name}={getattr(self, name)!r} is not a {kind} from {least} on"
            for kind, fields in (("power of two", powers), ("number", numbers))
            for name, least in fields.items()
            if not _is_number(getattr(self, name), least, kind == "power of two")
        ]
        if self.pieces not in (1, 2, 4):
            faults.append(f"pieces={self.pieces!r} is not one of 1, 2, 4")
        if faults:
            raise ConfigError("GemmConfig: " + "\n  ".join(faults))


def _is_number(value: object, least: int, power: bool) -> bool:
    return isinstance(value, int) and value >= least and not (power and value & (value - 1))


def _interpreter_config(M: int, N: int) -> GemmConfig:
    """Tiles for Triton's interpreter, which pays by the operation and not by the element.

    Small products get small tiles all the same, so that tests of them see several.
    """
    block_m = max(16, min(128, _power(M) // 2))
    block_n = max(16, min(256, _power(N) // 2))
    block_k = 16 if M * N <= 4096 else 256
    copy = 256 if M * N <= 4096 else 16384
    return GemmConfig(block_m, block_n, block_k, warps=1, stages=1, programs=3, pieces=1, copy=copy)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def processors(ctx: Any, each: int = 1) -> int:
    """Programs of a grid whose programs wait, of which a multiprocessor holds ``each``.

    Of ranks that share a GPU without partitions, no grid may lie on more than its part of it:
    kernels that peers wait for need whole multiprocessors.
    """
    if ctx.device.type == "cpu":
        return 2 * each
    units: int = ctx.get_usable_units()
    return units * each if units == ctx.get_cu_count() else units


def default_config(M: int, N: int, dtype: torch.dtype, device: torch.device) -> GemmConfig:
    """The configuration for a product with [M, N] results where nothing was measured."""
    if device.type == "cpu":
        return _interpreter_config(M, N)
    if dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return GemmConfig(64, 64, 16, 4, 3, pieces=1, copy=4096)  # no matrix unit
    # 128 bytes of the contracted dim a step, twice that for the narrow tiles of few rows.
    step = 128 // dtype.itemsize
    stages = 3 if dtype in (torch.float32, torch.int8) else 4  # whose results are 4 bytes wide
    if M <= FEW_ROWS:
        return GemmConfig(64, 128, 2 * step, 4, stages, pieces=2, copy=4096)
    if min(M, N) <= 128 or dtype.itemsize > 2:
        return GemmConfig(128, 128, step, stages=stages, pieces=2)
    if M < 2048:
        return GemmConfig(block_k=step, stages=stages, pieces=4)
    return GemmConfig(block_k=step, stages=3, pieces=4 if dtype == torch.int8 else 2)


def settled(ctx: Any, config: GemmConfig | None, M: int, N: int, dtype: torch.dtype) -> GemmConfig:
    """The configuration, or the default one, with the number of programs that this rank runs."""
    config = config or default_config(M, N, dtype, ctx.device)
    return replace(config, programs=config.programs or processors(ctx))


@dataclass(frozen=True)
class Tiling:
    """What a GEMM kernel is compiled for. The kernels see it as one constexpr, ``T``."""

    block_m: int
    block_n: int
    block_k: int
    pieces: int  # column pieces in which a tile is stored
    slices: int  # column slices in which a part of a cut tile is kept
    world: int
    lanes: int  # world, rounded up to a power of two
    rows: int  # of a block that is copied at a time
    columns: int
    dtype: Any  # element type of what is staged
    acc: Any  # element type of accumulators
    widen: bool  # operands to fp32 before a product (interpreter)
    precision: str
    promote: int | None = None  # fp8: steps after which sums go to fp32
    weights: int = 1
    by_columns: bool = False  # what is gathered are parts of the contracted dim
    zipped: int = 1  # weights that share one epilogue
    a_mode: int = 0
    b_mode: int = 0
    out_tma: bool = False
    announced: bool = False  # other ranks wait for tiles
    awaited: bool = False  # other ranks wait for this rank's sums
    engine: bool = False  # the copy engine sends to other ranks
    meet: bool = False  # a shard is empty: wait for all members all the same
    one_shot: bool = False  # sums: parts go to all members
    norm: int = 0  # sums: RMSNorm of them too; 2 with a weight
    communication: int = 0  # programs that communicate; 0: all

    @classmethod
    def of(
        cls, config: GemmConfig, world: int, K: int, dtype: torch.dtype, interpreted: bool
    ) -> "Tiling":
        """The tiling for operands of ``dtype``, which are staged in rows of ``K`` elements."""
        columns = min(1024, config.copy, max(16, 1 << max(0, K - 1).bit_length()))
        tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
        return cls(
            config.block_m,
            config.block_n,
            config.block_k,
            config.pieces,
            max(1, min(8, config.block_n // 32)),
            world,
            max(2, 1 << (world - 1).bit_length()),
            max(1, config.copy // columns),
            columns,
            TRITON_DTYPES[dtype],
            tl.int32 if dtype == torch.int8 else tl.float32,
            interpreted and dtype.is_floating_point and dtype.itemsize < 4,
            "tf32" if tf32 else "ieee",
            config.block_k if dtype in FP8 and not config.fast else None,
            communication=config.communication,
        )

    def staged(self, part: torch.dtype, rows: int, columns: int) -> "Tiling":
        """The same, for results that travel as ``part`` in blocks [rows, columns]."""
        return replace(self, dtype=TRITON_DTYPES[part], rows=rows, columns=columns)

    def with_modes(self, **modes: Any) -> "Tiling":
        """The same with other fields."""
        return replace(self, **modes)
