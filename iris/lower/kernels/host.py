"""What every stage has on the host: its launch, operands for kernels, the schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from iris.lower.kernels.config import TRITON_DTYPES, GemmConfig, Tiling
from iris.lower.kernels.schedule import make_schedule, tile_order
from iris.lower.kernels.workspace import Workspace

POINTERS, TMA_K, TMA_R = 0, 1, 2  # as in gemm.py


class GroupLike(Protocol):
    """What a stage needs of a group of ranks (`iris.runtime.groups.Group`)."""

    ranks: tuple[int, ...]
    index: int
    size: int

    def sync(self, what: str) -> int: ...


def shard_rows(rows: int, members: int) -> int:
    """Rows of a full shard by torch.chunk's rule: the last shards may be smaller or empty."""
    return max(1, -(-rows // members))


def rows_of(rows: int, members: int, index: int) -> int:
    """Rows that member ``index`` holds."""
    shard = shard_rows(rows, members)
    return max(0, min(shard, rows - index * shard))


def interpreted() -> bool:
    """Whether kernels of this process run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


class Turns:
    """Who compiles a kernel that several ranks are about to load.

    Members meet the same kernels in the same order, and each compiles every W-th: the others find
    it in Triton's cache on disk. Pass it as ``dry`` to every stage; then `Group.sync`; then load.
    """

    def __init__(self, group: GroupLike) -> None:
        self.group = group
        self.seen: set[Any] = set()

    def mine(self, variant: Any) -> bool:
        """Whether this member compiles ``variant``: the first time that it is asked for."""
        number = len(self.seen)
        self.seen.add(variant)
        return number < len(self.seen) and number % self.group.size == self.group.index


def launch(kernel: Any, programs: int, dry: "int | Turns", *arguments: Any, **options: int) -> None:
    """Launch a stage's kernel: to run it (``dry`` 0), to load it (1), or to compile it in turns."""
    if not isinstance(dry, Turns):
        kernel[(programs,)](dry, *arguments, **options)
    else:
        names = getattr(kernel, "arg_names", ())[1:]
        loose = getattr(kernel, "do_not_specialize", ())
        kinds = [
            type(argument) if name in loose else _kind(argument)
            for name, argument in zip(names, arguments, strict=True)
        ]
        if dry.mine((id(kernel), *kinds, *options.values())):
            kernel.warmup(1, *arguments, grid=(programs,), **options)


class Stage:
    """A kernel with all that its launches share. See the package's docstring for its life.

    Subclasses give ``kernel``, ``programs``, ``options`` of the launch, and ``arguments(...)``: the
    kernel's, for the operands of one launch; None where there is nothing to launch for.
    """

    kernel: Any
    programs: int
    options: Mapping[str, int]
    workspace: Workspace

    def arguments(self, *operands: Any, **named: Any) -> Sequence[Any] | None:
        raise NotImplementedError

    def __call__(self, *operands: Any, dry: int | Turns = 0, **named: Any) -> None:
        """Launch on the current stream; ``dry``: see `launch`."""
        arguments = self.arguments(*operands, **named)
        if arguments is not None:
            launch(self.kernel, self.programs, dry, *arguments, **self.options)

    def warm(self, *operands: Any, **named: Any) -> None:
        """Compile and load the kernel for these operands without running it."""
        self(*operands, **named, dry=1)


def _kind(argument: Any) -> Any:
    """What of an argument makes Triton compile anew."""
    if isinstance(argument, tuple):
        return tuple(map(_kind, argument))
    if isinstance(argument, TensorDescriptor):
        return _kind(argument.base), tuple(argument.block_shape)
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return 1 if argument == 1 else (argument % 16 == 0, argument >> 31)
    return argument


def operand_mode(x: Tensor, tma: bool) -> int:
    """How to load an operand [rows, K]: by tensor descriptor if strides and address permit."""
    if not tma or 0 in x.shape or x.data_ptr() % 16 or x.dtype not in TRITON_DTYPES:
        return POINTERS
    item = x.element_size()
    for mode, (outer, inner) in ((TMA_K, x.stride()), (TMA_R, x.stride()[::-1])):
        # The matrix unit reads 2-byte types in either order, others only with the contracted dim
        # contiguous.
        if inner == 1 and outer > 0 and outer * item % 16 == 0 and (mode == TMA_K or item == 2):
            return mode
    return POINTERS


def operand(x: Tensor, mode: int, block_rows: int, block_k: int) -> Any:
    """What the kernel loads ``x`` [rows, K] from in this mode."""
    if mode == TMA_K:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [block_rows, block_k])
    if mode == TMA_R:
        return TensorDescriptor(x.T, list(x.T.shape), list(x.T.stride()), [block_k, block_rows])
    return x


def common_mode(operands: Sequence[Tensor], tma: bool) -> int:
    """The mode that all these operands can be loaded in."""
    modes = {operand_mode(x, tma) for x in operands}
    return modes.pop() if len(modes) == 1 else POINTERS


def can_store_tma(outs: Sequence[Tensor], tma: bool) -> bool:
    """Whether results can be stored through tensor descriptors."""
    return tma and all(operand_mode(out, tma) == TMA_K for out in outs)


def target(out: Tensor, T: Tiling) -> Any:
    """What the kernel stores results to."""
    if T.out_tma:
        return TensorDescriptor(
            out, list(out.shape), list(out.stride()), [T.block_m, T.block_n // T.pieces]
        )
    return out


def part_tiling(problem: Any, rows: int) -> tuple[Tiling, int]:
    """The tiling of a stage that sends parts and sums ``rows`` rows of all columns here.

    Sums are made of runs of blocks within a column tile: long runs, since each begins with a wait,
    but several a program. Returns the rows of a run too; kernels are not compiled for it.
    """
    config = problem.config
    T = Tiling.of(config, problem.group.size, 1, problem.dtype, interpreted())
    programs = config.programs
    across = max(1, -(-problem.N // T.block_n))
    wanted = max(1, 2 * programs // across)  # runs in a column of tiles
    each = max(1, min(T.block_m, rows // wanted))
    high = min(max(1, config.copy // 2 // T.block_n), 1 << (each.bit_length() - 1))
    run, wide = max(1, each // high) * high, T.block_n
    # Few rows are summed in wider blocks: one for each program.
    while (
        rows <= config.block_m
        and -(-rows // run) * -(-problem.N // wide) > programs
        and 4 * high * wide <= config.copy
    ):
        wide *= 2
    return T.staged(problem.part, high, wide), run


def product_modes(T: Tiling, x: Tensor, w: Tensor, config: GemmConfig) -> Tiling:
    """The tiling with the ways in which ``x`` [M, K] and ``w`` [K, N] can be loaded."""
    tma = config.tma and x.is_cuda
    return T.with_modes(a_mode=operand_mode(x, tma), b_mode=operand_mode(w.T, tma))


def tiles_of(M: int, N: int, T: Tiling) -> int:
    """Output tiles of a product."""
    return -(-M // T.block_m) * -(-N // T.block_n)


@dataclass(frozen=True)
class Share:
    """The schedule of a product on the device; ``scratch`` bytes hold the parts of cut tiles."""

    programs: int
    heads: Tensor
    table: Tensor
    scratch: int
    acc: torch.dtype
    counts: Tensor

    @classmethod
    def create(
        cls,
        config: GemmConfig,
        T: Tiling,
        M: int,
        columns: Sequence[int],
        K: int,
        first_row: int,
        device: torch.device,
    ) -> "Share":
        """Share the tiles of [M, columns[i]] results; rows from ``first_row`` come first."""
        programs = config.programs
        rows = -(-M // T.block_m)
        orders = [
            tile_order(
                rows, -(-n // T.block_n), config.group_m, first_row // T.block_m if rows else 0
            )
            for n in columns
        ]
        # One row of tiles reads each weight once: memory is the limit, and the few tiles of a last
        # wave have all of it to themselves.
        cut = config.cut and (rows > 1 or sum(map(len, orders)) < programs)
        schedule = make_schedule(orders, max(1, -(-K // T.block_k)), programs, cut)
        heads, table = schedule.pack(device)
        scratch = 4 * schedule.parts * T.zipped * T.block_m * T.block_n
        return cls(
            programs,
            heads,
            table,
            scratch,
            torch.int32 if T.acc == tl.int32 else torch.float32,
            torch.zeros(max(1, 2 * schedule.cuts), dtype=torch.int32, device=device),
        )
