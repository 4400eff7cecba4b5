"""Collectives as kernels: `make_*` of `iris.lower.collectives`, one launch each, without the host.

Each function is collective: it allocates the workspace. The stage is then called as
``stage(x, out=result)``; it only launches. ``x`` may have any strides, ``result`` is contiguous.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import triton.language as tl
from torch import Tensor

from iris.errors import UnsupportedError
from iris.lower.collectives import REDUCTIONS, resized
from iris.lower.kernels.boxes import Piece, operand_box, pack_pieces
from iris.lower.kernels.config import TRITON_DTYPES, processors
from iris.lower.kernels.exchange import exchange_kernel
from iris.lower.kernels.host import GroupLike, Stage
from iris.lower.kernels.workspace import Workspace, round_up

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_LANGUAGE = TRITON_DTYPES | {
    torch.float64: tl.float64,
    torch.int64: tl.int64,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}
ONE_SHOT_BYTES = 256 << 10  # all_reduce of more than this goes in two steps
_BLOCK_BYTES = 32 << 10
_LEAST_BYTES = 4 << 10  # 16 for each of the 256 threads of a program


@dataclass(frozen=True)
class Moves:
    """What the exchange kernel is compiled for; it sees this as one constexpr, ``X``."""

    world: int
    lanes: int
    dtype: Any
    acc: Any
    op: str = ""  # "": values are moved, not combined
    two_shot: bool = False
    rows: int = 1
    columns: int = 1024
    vector: int = 1  # elements that every access begins at a multiple of


class Exchange(Stage):
    """A collective over a group: ``stage(x, out=result)``."""

    kernel = exchange_kernel
    options: ClassVar = {"num_warps": 8}

    def __init__(
        self,
        ctx: Any,
        group: GroupLike,
        what: str,
        shape: Sequence[int],
        pieces: Sequence[Piece],
        dtype: torch.dtype,
        op: str = "",
        two_shot: bool = False,
        largest: int | None = None,
    ) -> None:
        self.group, self.shape = group, tuple(shape)
        device = ctx.heap.device
        numel = max(math.prod(shape), largest or 0)
        self.carrier, moves = _carrier(dtype, op, group.size)
        itemsize = self.carrier.itemsize
        self.share = round_up(-(-numel // group.size), 16)
        if two_shot:
            pieces = [_share(numel, self.share, member) for member in _from_own(group)]
        # This rank may get nothing, but it sends its operand all the same.
        width = max([*shape[-1:], *(piece.words()[2] for piece in pieces)], default=1)
        most = max(numel, sum(math.prod(piece.shape) for piece in pieces))
        self.programs = _programs(most * itemsize, ctx)
        block = _block(most, itemsize, self.programs, device)
        columns = min(block, 1 << max(0, width - 1).bit_length())
        self.moves = replace(
            moves, two_shot=two_shot, rows=max(1, block // columns), columns=columns
        )
        self.pieces, self.blocks = pack_pieces(pieces, self.moves.rows, self.moves.columns, device)
        words = [word for p in pieces for word in (*p.words()[2:3], *p.words()[6:])]
        self.vector = math.gcd(16 // itemsize, *words)
        self.half = round_up(max(1, numel), 256)
        self.half_sums = round_up(self.share, 256) if two_shot else 0
        halves = self.half * itemsize, self.half_sums * itemsize
        self.workspace = Workspace(ctx, group, halves[0], (1, 1), what, halves[1])

    def arguments(self, x: Tensor, *, out: Tensor) -> list[Any]:
        """The kernel's arguments. ``out`` is contiguous and does not overlap ``x``."""
        work, box = self.workspace, operand_box(x)
        places = (x.data_ptr(), out.data_ptr())
        vector = math.gcd(self.vector, box[1], *box[5:9], *(at // x.itemsize for at in places))
        if any(at % x.itemsize for at in places) or box[9] != 1:
            vector = 1
        return [
            x.view(self.carrier), *box, out.view(self.carrier), self.pieces, self.blocks, x.numel(),
            self.share, work.staging, work.sums, work.flags, work.state, *work.watch,
            self.group.index, self.half, self.half_sums, replace(self.moves, vector=vector),
        ]  # fmt: skip


def _carrier(dtype: torch.dtype, op: str, world: int) -> tuple[torch.dtype, Moves]:
    """The type that elements travel as (integers where nothing is computed); the kernel's types."""
    lanes = max(2, 1 << (world - 1).bit_length())
    if not op or (dtype == torch.bool and op in ("max", "min")):
        if dtype.itemsize not in _INTEGERS:
            raise UnsupportedError(
                f"collectives do not move elements of {dtype.itemsize} bytes ({dtype})",
                help="send torch.view_as_real(x)",
            )
        carrier = torch.uint8 if op else _INTEGERS[dtype.itemsize]
        kind = _LANGUAGE[carrier]
        return carrier, Moves(world, lanes, kind, kind, op)
    if op not in REDUCTIONS or dtype not in _LANGUAGE:
        raise UnsupportedError(
            f"no reduction {op!r} of {dtype}",
            help=f"operations: {', '.join(REDUCTIONS)}; dtypes: {', '.join(map(str, _LANGUAGE))}",
        )
    acc = tl.float32 if dtype in _NARROW else _LANGUAGE[dtype]
    return dtype, Moves(world, lanes, _LANGUAGE[dtype], acc, op)


def _programs(nbytes: int, ctx: Any) -> int:
    """Programs that share the work: no more than have a few thousand bytes each."""
    return max(1, min(processors(ctx, 2), -(-nbytes // 4096)))


def _block(numel: int, itemsize: int, programs: int, device: torch.device) -> int:
    """Elements that a program moves at a time: two blocks for each program, full accesses."""
    each = max(1, numel // (2 * programs))
    least = _LEAST_BYTES // itemsize if device.type == "cuda" else 256
    return max(least, min(_BLOCK_BYTES // itemsize, 1 << (each.bit_length() - 1)))


def _from_own(group: GroupLike) -> list[int]:
    return [(group.index + step) % group.size for step in range(group.size)]


def _share(numel: int, share: int, member: int) -> Piece:
    first = min(member * share, numel)
    size = min(share, numel - first)
    return Piece(member, (size,), (share,), (numel,), put=first)


def all_gather(
    ctx: Any,
    group: GroupLike,
    shape: Sequence[int],
    sizes: Sequence[int],
    dim: int,
    dtype: torch.dtype,
    what: str = "all_gather",
) -> Exchange:
    """Concatenate along ``dim``; ``sizes[i]`` rows come from member i (uneven and zero allowed)."""
    shapes = [resized(shape, dim, size) for size in sizes]
    result = resized(shape, dim, sum(sizes))
    pieces = [
        Piece(m, shapes[m], shapes[m], result, put=sum(sizes[:m]), to_dim=dim)
        for m in _from_own(group)
    ]
    largest = max(map(math.prod, shapes))
    return Exchange(ctx, group, what, shapes[group.index], pieces, dtype, largest=largest)


def all_reduce(
    ctx: Any,
    group: GroupLike,
    shape: Sequence[int],
    op: str,
    dtype: torch.dtype,
    what: str = "all_reduce",
    two_shot: bool | None = None,
) -> Exchange:
    """Combine elementwise over members, in rank order: the same bits everywhere, whichever way.

    One-shot: each rank reads all operands. Two-shot: each combines a share, and reads the others'
    shares.
    """
    numel = math.prod(shape)
    if two_shot is None:
        two_shot = numel * dtype.itemsize > ONE_SHOT_BYTES and group.size > 2
    flat = (numel,)
    pieces = [Piece(group.index, flat, flat, flat)]
    return Exchange(ctx, group, what, shape, pieces, dtype, op, two_shot)


def reduce_scatter(
    ctx: Any,
    group: GroupLike,
    shape: Sequence[int],
    sizes: Sequence[int],
    dim: int,
    op: str,
    dtype: torch.dtype,
    what: str = "reduce_scatter",
) -> Exchange:
    """Combine over members and keep rows ``sizes[index]`` of ``dim``, in member order."""
    box = resized(shape, dim, sizes[group.index])
    take = sum(sizes[: group.index])
    piece = Piece(group.index, box, tuple(shape), box, take=take, from_dim=dim)
    return Exchange(ctx, group, what, shape, [piece], dtype, op)


def all_to_all(
    ctx: Any,
    group: GroupLike,
    shapes: Sequence[Sequence[int]],
    split_dim: int,
    splits: Sequence[int],
    concat_dim: int,
    dtype: torch.dtype,
    what: str = "all_to_all",
) -> Exchange:
    """Send piece i of ``split_dim`` (``splits[i]`` rows) to member i.

    What comes is joined along ``concat_dim``. ``shapes[i]`` is member i's operand.
    """
    mine = splits[group.index]
    boxes = [resized(shape, split_dim, mine) for shape in shapes]
    joined = [box[concat_dim] for box in boxes]
    result = resized(boxes[0], concat_dim, sum(joined))
    take = sum(splits[: group.index])
    pieces = [
        Piece(m, boxes[m], tuple(shapes[m]), result, take, sum(joined[:m]), split_dim, concat_dim)
        for m in _from_own(group)
    ]
    largest = max(map(math.prod, shapes))
    return Exchange(ctx, group, what, shapes[group.index], pieces, dtype, largest=largest)


def broadcast(
    ctx: Any,
    group: GroupLike,
    shape: Sequence[int],
    src: int,
    dtype: torch.dtype,
    what: str = "broadcast",
) -> Exchange:
    """Every member gets the tensor of member ``src`` (its place in the group)."""
    flat = (math.prod(shape),)
    return Exchange(ctx, group, what, shape, [Piece(src, flat, flat, flat)], dtype)


def ppermute(
    ctx: Any,
    group: GroupLike,
    shape: Sequence[int],
    perm: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    what: str = "ppermute",
) -> Exchange:
    """Member d gets the tensor of member s for each ``(s, d)`` in ``perm``.

    The result of a member that nothing is sent to is left as it is: fill it with zeros beforehand.
    """
    flat = (math.prod(shape),)
    sources = [s for s, d in perm if d == group.index]
    return Exchange(ctx, group, what, shape, [Piece(s, flat, flat, flat) for s in sources], dtype)
