"""The copy engine's part of the Iris class: copies to peers that use no SM of the GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from iris import config
from iris.errors import ConfigError, UnsupportedError
from iris.runtime.callsite import user_line
from iris.runtime.copy_lanes import Mark, Op, Wait
from iris.runtime.rectangles import rectangles

if TYPE_CHECKING:
    from iris.runtime.copy_proxy import Engine
    from iris.runtime.heap import Heap

CHANNELS = 16
_FLAGS = (torch.int32, torch.int64, torch.uint32, torch.uint64)

Flag = Tensor | None
Place = Tensor | int


class CopyEngine:
    """Host methods that need ``engines=("sdma",)``. Without it each raises a RuntimeError.

    What goes to one peer on one channel happens in order, after the work of the current stream so
    far. ``async_op=False`` returns when it has happened, and with it all that went there before;
    otherwise ``quiet`` waits. In a capture nothing blocks: the capturing stream waits instead, and
    an ``async_op`` needs its ``quiet`` in the same capture.

    Flags have one element, int32, int64, uint32 or uint64, on the heap. ``wait_flag`` is this
    rank's: the copy begins when it is at or past ``wait_value``, by the difference, so values may
    wrap. ``signal_flag`` names the flag of ``to_rank``, which is set to ``signal_value`` when all
    of the data is there; with ``signal_op="add"`` that is added to it. Waits are bounded by
    ``IRIS_TIMEOUT``. Wrong arguments raise ``ConfigError``, a ValueError, that names all of them.
    """

    cur_rank: int
    num_ranks: int
    device: torch.device
    heap: "Heap"
    own_gpus: bool
    _engine: "Engine | None"

    @property
    def copies_beside_kernels(self) -> bool:
        """Whether copies and flags reach peers while a kernel of this rank holds every SM.

        Not where ``IRIS_CHECK=1`` looks for races: it does not see these copies.
        """
        apart = (self.own_gpus or self.device.type == "cpu") and not config.check()
        return self._engine is not None and apart and self._engine.lanes.needs_no_unit

    def get_copy_engine_ctx(self) -> Tensor | None:
        """Return what kernels pass on as ``copy_engine_ctx``: int64[num_ranks, 8], or None.

        Row r has the addresses of the queue to rank r, its read pointer, write pointer and
        doorbell, then the size of the queue. None without ``engines=("sdma",)``.
        """
        if self._engine is None:
            return None
        self._engine.check()
        self._engine.exposed = True
        self._engine.wake()
        return self._engine.context

    def put(
        self,
        from_tensor: Tensor,
        to_rank: int,
        to_tensor: Tensor | None = None,
        wait_flag: Flag = None,
        wait_value: int | None = None,
        signal_flag: Flag = None,
        signal_value: int = 1,
        async_op: bool = False,
        channel: int = 0,
        *,
        signal_op: str = "set",
    ) -> None:
        """Copy ``from_tensor`` to where ``to_rank`` has ``to_tensor`` (by default: itself).

        ``to_tensor`` is this rank's tensor on the heap, of the same shape and dtype; both may be
        strided, and have no memory in common. An empty copy does nothing but wait and signal. For
        the rest see ``CopyEngine``.

        Example::

            ctx = iris.iris(1 << 20, engines="sdma")
            x, ready = ctx.ones(8), ctx.zeros(1, dtype=torch.int32)
            ctx.put(x, to_rank=0, signal_flag=ready)
        """
        call = _Call(self, "put", to_rank, channel)
        call.same_layouts(from_tensor, from_tensor if to_tensor is None else to_tensor)
        call.flags(wait_flag, wait_value, signal_flag, signal_value, signal_op)
        call.submit(async_op)

    def put_tile(
        self,
        tile: Tensor,
        to_rank: int,
        to_ptr: Place,
        to_stride: int,
        wait_flag: Flag = None,
        wait_value: int | None = None,
        signal_flag: Flag = None,
        signal_value: int = 1,
        async_op: bool = False,
        channel: int = 0,
        *,
        signal_op: str = "set",
    ) -> None:
        """Copy a 2-D ``tile`` to rows that start every ``to_stride`` bytes from ``to_ptr``.

        ``to_ptr`` is an address on ``to_rank``, as this process maps it
        (``ctx.heap.peer_tensor(x, to_rank).data_ptr()``), or this rank's tensor whose place on
        ``to_rank`` is meant. For the rest see ``CopyEngine``.

        Example::

            ctx.put_tile(x[:64, :32], 1, to_ptr=y, to_stride=y.stride(0) * y.element_size())
        """
        call = _Call(self, "put_tile", to_rank, channel)
        call.tile("tile", tile, "to_ptr", to_ptr, to_stride)
        call.flags(wait_flag, wait_value, signal_flag, signal_value, signal_op)
        call.submit(async_op)

    def put_tiles(
        self,
        tiles: Sequence[Tensor],
        to_rank: int,
        to_ptrs: Sequence[Place],
        to_strides: Sequence[int],
        wait_flag: Flag = None,
        wait_value: int | None = None,
        signal_flag: Flag = None,
        signal_value: int = 1,
        async_op: bool = False,
        channel: int = 0,
        *,
        signal_op: str = "set",
    ) -> None:
        """Copy many tiles as ``put_tile`` does: one wait before all, one signal after all."""
        call = _Call(self, "put_tiles", to_rank, channel)
        call.lists(tiles=tiles, to_ptrs=to_ptrs, to_strides=to_strides)
        for i, place in enumerate(zip(tiles, to_ptrs, to_strides, strict=False)):
            call.tile(f"tiles[{i}]", place[0], f"to_ptrs[{i}]", place[1], place[2])
        call.flags(wait_flag, wait_value, signal_flag, signal_value, signal_op)
        call.submit(async_op)

    def quiet(self, to_rank: int | None = None, channel: int = 0) -> None:
        """Wait until what went to ``to_rank`` (None: any rank) on ``channel`` is there.

        Raises ``TimeoutError`` where a wait ran out.
        """
        peers = range(self.num_ranks) if to_rank is None else [to_rank]
        for peer in peers:
            call = _Call(self, "quiet", peer, channel)
            call.check()
            call.engine.finish((peer, channel))


class _Call:
    """One call on the way: its problems, and the operations that it comes to."""

    def __init__(self, ctx: CopyEngine, name: str, to_rank: int, channel: int) -> None:
        if ctx._engine is None:
            raise UnsupportedError(
                f"{name} needs the copy engine, which is disabled in this context",
                help='create it on every rank: iris.iris(engines=("sdma",))',
            )
        ctx._engine.check()
        self.engine = ctx._engine
        self.problems: list[str] = []
        self._ctx, self._name = ctx, name
        self._peer, self._channel = to_rank, channel
        self._copies: list[Op] = []
        self._before: list[Op] = []
        self._after: list[Op] = []
        self._used: list[Tensor] = []
        if not (_whole(to_rank) and 0 <= to_rank < ctx.num_ranks):
            self.problems.append(f"to_rank={to_rank!r}: ranks are 0 to {ctx.num_ranks - 1}")
            self._peer = ctx.cur_rank
        if not (_whole(channel) and 0 <= channel < CHANNELS):
            self.problems.append(f"channel={channel!r}: channels are 0 to {CHANNELS - 1}")

    def lists(self, **given: Any) -> None:
        """Note it if lengths of ``given`` differ; raise at once where one has none."""
        for name, value in given.items():
            if not hasattr(value, "__len__"):
                self.problems.append(f"{name}: {type(value).__name__} is no list")
        self.check()
        lengths = {name: len(value) for name, value in given.items()}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{length} {name}" for name, length in lengths.items())
            self.problems.append(f"lists of unequal length: {counts}")

    def same_layouts(self, source: Any, target: Any) -> None:
        """Add the copy of a tensor to the peer's place of another."""
        names = ("from_tensor",) if target is source else ("from_tensor", "to_tensor")
        with self._noted():
            for name, tensor in zip(names, (source, target), strict=False):
                self._check_here(name, tensor)
            if (source.shape, source.dtype) != (target.shape, target.dtype):
                shapes = f"{_kind(target)}, from_tensor is {_kind(source)}"
                raise ConfigError(f"to_tensor: {shapes}")
            if 0 in target.squeeze().stride():
                raise ConfigError(f"{names[-1]}: elements of {_kind(target)} share a place")
            dst = self._there(names[-1], target) if target.numel() else 0
            self._copy(dst, _strides(target), source)

    def tile(self, name: str, tile: Any, ptr_name: str, ptr: Any, stride: Any) -> None:
        """Add the copy of a tile."""
        with self._noted():
            self._check_here(name, tile)
            if tile.dim() != 2:
                raise ConfigError(f"{name}: {_kind(tile)} has not 2 dims")
            item, (rows, columns) = tile.element_size(), tile.shape
            if not _whole(stride) or (rows > 1 and stride < columns * item):
                row = f"a row of {_kind(tile)} has {columns * item} bytes"
                raise ConfigError(f"stride {stride!r} of {name}: {row}")
            span = (rows - 1) * stride + columns * item
            dst = self._address(ptr_name, ptr, tile, span) if tile.numel() else 0
            self._copy(dst, (stride, item), tile)

    def flags(self, wait: Flag, least: int | None, signal: Flag, value: int, op: str) -> None:
        """Add the wait before and the signal after."""
        with self._noted():
            if (wait is None) != (least is None):
                raise ConfigError("wait_flag and wait_value: give both or none")
            if wait is not None and least is not None:
                self._check_flag("wait_flag", wait, least)
                what = f"{self._name} of rank {self._ctx.cur_rank} to rank {self._peer}"
                self._before = [Wait(wait.data_ptr(), least, wait.itemsize == 8, what)]
        if op not in ("set", "add"):
            self.problems.append(f"signal_op={op!r}: it is 'set' or 'add'")
        if signal is not None:
            with self._noted():
                self._check_flag("signal_flag", signal, value)
                there = self._there("signal_flag", signal)
                self._after = [Mark(there, value, signal.itemsize == 8, op == "add")]

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep a problem for `check`, which raises all of them."""
        try:
            yield
        except ConfigError as error:
            self.problems.append(error.message)

    def check(self) -> None:
        """Raise ``ConfigError`` that lists all problems."""
        if self.problems:
            count = len(self.problems)
            misfit = f"{count} arguments do" if count > 1 else "1 argument does"
            lines = [
                f"{self._name}: {misfit} not fit",
                f"  at {user_line()}, rank {self._ctx.cur_rank} of {self._ctx.num_ranks}",
                *(f"  {problem}" for problem in self.problems),
            ]
            raise ConfigError(
                "\n".join(lines),
                help="copies go to this context's tensors (ctx.zeros, ctx.as_symmetric), element "
                "by element",
            )

    def submit(self, async_op: bool) -> None:
        """Hand the operations over, and unless ``async_op`` wait for them."""
        self.check()
        key = self._peer, self._channel
        ops = [*self._before, *self._copies, *self._after]
        if ops:
            self.engine.submit(key, ops, self._used)
            if not async_op:
                self.engine.finish(key)

    def _copy(self, dst: int, strides: Sequence[int], source: Tensor) -> None:
        self._used.append(source)
        src = source.data_ptr(), _strides(source)
        self._copies += rectangles(dst, strides, *src, source.shape, source.element_size())

    def _check_here(self, name: str, tensor: Any) -> None:
        """A tensor can be read by this rank's copy engine."""
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise ConfigError(f"{name}: {type(tensor).__name__} is no strided tensor")
        if tensor.device != self._ctx.device:
            raise ConfigError(f"{name}: on {tensor.device}, this rank is on {self._ctx.device}")
        if tensor.is_conj() or tensor.is_neg():
            view = "a view whose memory holds other values"
            raise ConfigError(f"{name}: {view}; pass .resolve_conj().resolve_neg()")

    def _there(self, name: str, tensor: Tensor, span: int = 0) -> int:
        """Address, in this process, of the peer's tensor at the same place, which has ``span``."""
        found = self._ctx.heap.find(tensor)
        if found is None:
            raise ConfigError(f"{name}: not on the symmetric heap")
        block, at = found
        if self._peer not in block.ranks:
            raise ConfigError(f"{name}: only ranks {block.ranks} allocated it")
        if at + span > block.nbytes:
            where = f"the {block.nbytes - at} that were allocated from there"
            raise ConfigError(f"{name}: {span} bytes are more than {where}")
        return block.peers[block.ranks.index(self._peer)] + at

    def _address(self, name: str, ptr: Any, tile: Tensor, span: int) -> int:
        """Address, in this process, of the ``span`` bytes of the peer that a tile goes to."""
        if isinstance(ptr, Tensor):
            self._check_here(name, ptr)
            if ptr.dtype != tile.dtype:
                raise ConfigError(f"{name}: {_kind(ptr)}, the tile is {_kind(tile)}")
            return self._there(name, ptr, span)
        if not _whole(ptr):
            raise ConfigError(f"{name}: {type(ptr).__name__} is neither an address nor a tensor")
        if not self._ctx.heap.holds(self._peer, int(ptr), int(ptr) + span):
            where = f"{span} bytes there are not all on the heap of rank {self._peer}"
            raise ConfigError(f"{name}={ptr:#x}: {where}")
        return int(ptr)

    def _check_flag(self, name: str, flag: Any, value: Any) -> None:
        self._check_here(name, flag)
        if flag.numel() != 1 or flag.dtype not in _FLAGS:
            kinds = "one int32, int64, uint32 or uint64"
            raise ConfigError(f"{name}: {_kind(flag)} is not {kinds}")
        bits = 8 * flag.itemsize
        if not _whole(value) or not -(1 << (bits - 1)) <= value < 1 << bits:
            title = name.replace("flag", "value")
            raise ConfigError(f"{title}={value!r}: no integer of {bits} bits")


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _strides(tensor: Tensor) -> list[int]:
    return [step * tensor.element_size() for step in tensor.stride()]
