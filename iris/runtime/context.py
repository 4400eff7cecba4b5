"""The Iris class: the symmetric heap and its peers, as seen from one rank."""

import atexit
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from iris import config
from iris.errors import ConfigError, IrisError
from iris.logging import RankLogging
from iris.runtime.board import CLOSED, FAILED, Board, Page
from iris.runtime.broadcast import broadcast
from iris.runtime.checks import Checks
from iris.runtime.contacts import meet
from iris.runtime.copy_engine import CopyEngine
from iris.runtime.copy_proxy import Engine
from iris.runtime.creation import Creation, Ranks
from iris.runtime.devices import Placement, compute_units, sharing, simulation, usable_units
from iris.runtime.groups import Group
from iris.runtime.heap import Heap, slab_bytes
from iris.runtime.recovery import Counting, Recovery
from iris.runtime.rendezvous import Rendezvous
from iris.runtime.slabs import create_slab
from iris.runtime.tracing import Tracing
from iris.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from iris.device.barrier import DeviceBarrier

_current: "Iris | None" = None


def iris(
    heap_size: int = 1 << 30, allocator_type: str = "torch", engines: str | Sequence[str] = ()
) -> "Iris":
    """Create the context of this rank, make it the current one until it is closed, and return it.

    Collective over the world.

    ``heap_size`` is in bytes for each rank. ``allocator_type`` is "torch", "vmem" or "symm_mem"
    (``IRIS_ALLOCATOR`` overrides it). ``engines=("sdma",)`` adds the copy engine (``ctx.put``), on
    all ranks or on none. Ranks are found from torch.distributed, from torchrun's or
    ``iris.launch``'s variables, or else this process is a world of one.

    Example::

        ctx = iris.iris(1 << 30)
        x = ctx.zeros(1024, 1024)
    """
    return Iris(heap_size, allocator_type, engines)


def current() -> "Iris":
    """Return the current context. Raises ``IrisError`` when there is none."""
    if _current is None:
        raise IrisError("there is no iris context", help="call ctx = iris.iris() on every rank")
    return _current


def synchronize() -> None:
    """Wait until this rank's GPU has done all it was given; see `Iris.synchronize`.

    Example::

        y = mlp(x, w_up, w_down)
        iris.synchronize()
    """
    current().synchronize()


def current_or_none() -> "Iris | None":
    """Return the current context, or None."""
    return _current


@contextmanager
def as_current(ctx: "Iris") -> Iterator[None]:
    """Make ``ctx`` the current context for a while. Raises ``IrisError`` where it is closed."""
    global _current
    ctx.check_usable()
    before, _current = _current, ctx
    try:
        yield
    finally:
        _current = _newest_open(before)


def _newest_open(ctx: "Iris | None") -> "Iris | None":
    """Return ``ctx``, or where that is closed the newest one before it that is open."""
    if ctx is None or not ctx._board.closed:
        return ctx
    earlier = (ref() for ref in reversed(ctx._before))
    return next((each for each in earlier if each is not None and not each._board.closed), None)


class Iris(Creation, CopyEngine, Recovery, RankLogging):
    """One rank's view of the world: its heap, its peers, barriers, tensors on the heap.

    Made by ``iris.iris()``. Leaving it as a context manager closes it.

    Example::

        with iris.iris(1 << 20) as ctx:
            x = ctx.ones(8)
            ctx.barrier()
    """

    def __init__(
        self,
        heap_size: int = 1 << 30,
        allocator_type: str = "torch",
        engines: str | Sequence[str] = (),
    ) -> None:
        """Meet the other ranks and build the heap. See ``iris.iris``."""
        heap_size, kind, engines = _checked(heap_size, allocator_type, engines)
        if _current is not None:
            _current._board.check_open()  # refuses a fork of a process that has a context
        rendezvous = Rendezvous.join()
        placement = Placement.choose(rendezvous.local_rank)
        self._board = Board(rendezvous.rank, Page.create())
        try:
            self._build(rendezvous, placement, heap_size, kind, engines)
        except BaseException as error:
            self._board.leave(FAILED, describe(error))
            raise

    def _build(
        self,
        rendezvous: Rendezvous,
        placement: Placement,
        heap_size: int,
        kind: str,
        engines: tuple[str, ...],
    ) -> None:
        from iris.device.barrier import prepare  # brings in triton
        from iris.device.watch import Watch

        board, self.device = self._board, placement.device
        self.cur_rank, self.num_ranks = rendezvous.rank, rendezvous.size
        shares = meet(rendezvous, board, placement)
        self.world = world = Group(board, None, range(rendezvous.size))
        _compare(world, f"heap_size={heap_size}, allocator_type={kind!r}", engines, self.device)
        board.page.segment.seal()
        gpus = len({share.uuid for share in shares if share.uuid != "cpu"})
        self.own_gpus = gpus == self.num_ranks  # whether every rank has a GPU to itself
        self.ranks_on_device = sharing(shares, shares[self.cur_rank].uuid)
        # Whether so many ranks share a GPU that kernels of two fill what a third one needs.
        self.crowded = (
            self.device.type == "cuda" and max(sharing(shares, share.uuid) for share in shares) > 2
        )
        self._usable_units = usable_units(shares)
        if not dist.is_initialized():
            rendezvous.init_process_group(self.own_gpus, board)
        slab = create_slab(kind, self.device, world, slab_bytes(heap_size))
        self.heap = world.heap = Heap(slab, world, heap_size, self.device)
        self.tracing = Tracing(self)
        self._groups: dict[tuple[int, ...], Group] = {world.ranks: world}
        self._tables: dict[str, Tensor] = {}
        self._barriers: dict[int, DeviceBarrier] = {}
        self.counting: weakref.WeakSet[Counting] = weakref.WeakSet()
        self._engine: Engine | None = None
        self.checks: Checks | None = None  # under IRIS_CHECK=1
        self.watch = Watch.create(self, config.timeout(), config.slow())
        self._watchdog = Watchdog(board, self.watch)
        self._watchdog.start()
        if self.device.type == "cuda":
            prepare(self)
        if engines:
            self._engine = Engine(self)
        if config.check():
            self.checks = Checks.create(world, self.heap, self.watch, self._engine)
            self.checks.start()
        self._become_current()
        if self.cur_rank == 0 and 0 < gpus < self.num_ranks:
            self.info(simulation(self.num_ranks, gpus))

    def group(self, ranks: Ranks = None) -> Group:
        """Return the group of ``ranks``: global ranks in any order, or a ProcessGroup.

        None is the world.

        The same object each time. Raises ``IrisError`` when this rank is not in it.
        """
        if ranks is None:
            return self.world
        key = _ranks_of(ranks)
        if key not in self._groups:
            self._board.check_usable()
            self._check_ranks(key)
            self._groups[key] = Group(self._board, self.heap, key)
        return self._groups[key]

    def synchronize(self) -> None:
        """Wait until this rank's GPU has done all it was given, and raise what its kernels found
        wrong.

        The GPU's copy engine counts as part of it. This is for one rank alone: ``barrier`` waits
        for the others too.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._engine is not None:
            self._engine.settle()
        self.watch.check(synchronized=True)

    def barrier(self, stream: "torch.cuda.Stream | None" = None, group: Ranks = None) -> None:
        """Wait for this rank's GPU (or only for ``stream``), then for every rank of ``group``.

        Raises ``PeerError`` for a rank that is gone and ``TimeoutError`` for one that does not
        come.
        """
        members = self.group(group)
        if stream is None:
            self.synchronize()
        elif hasattr(stream, "synchronize"):
            stream.synchronize()
        else:
            raise IrisError(
                f"barrier: stream={stream!r} is not a stream",
                help="name ranks as barrier(group=...)",
            )
        members.sync(f"barrier of ranks {members.ranks}")
        if self.checks is not None:
            self.checks.look(members, ordered=True)

    def broadcast(
        self, value: Any, src: int = 0, *, group: Ranks = None, as_tensor: bool = False
    ) -> Any:
        """Return rank ``src``'s value on every rank of ``group``.

        ``src`` is a global rank, also in a group; other ranks may pass None.

        Tensors and arrays come back as numpy arrays (bfloat16 and fp8, which numpy lacks, as
        float32 of the same values), or with ``as_tensor`` as a tensor of the sent dtype on this
        rank's device. Anything else is pickled and keeps its type.

        Example::

            seed = ctx.broadcast(42 if ctx.cur_rank == 0 else None, src=0)
        """
        return broadcast(self.group(group), value, src, as_tensor, self.device)

    def device_barrier(self, group: Ranks = None) -> None:
        """Make the current stream wait for every rank of ``group``, without the host.

        May be captured in a CUDA graph.

        A group's first call meets the members on the host, also during a capture; it allocates
        nothing.
        """
        from iris.device.barrier import DeviceBarrier  # brings in triton

        self._board.check_open()
        members = self.group(group)
        if members.key not in self._barriers:
            taken = [barrier.row for barrier in self._barriers.values()]
            self._barriers[members.key] = DeviceBarrier.create(self, members, taken)
        self._barriers[members.key]()

    def get_rank(self) -> int:
        """Return this process's rank, from 0."""
        return self.cur_rank

    def get_num_ranks(self) -> int:
        """Return how many ranks the world has."""
        return self.num_ranks

    def get_device(self) -> torch.device:
        """Return the device that the heap is on."""
        return self.device

    def get_device_id(self) -> int:
        """Return the ordinal of this rank's GPU in this process; 0 on CPU ranks."""
        return self.device.index or 0

    def get_cu_count(self) -> int:
        """Return the number of compute units (SMs) of this rank's GPU, or of CPU cores."""
        return compute_units(self.device)

    def get_usable_units(self) -> int:
        """Return how many compute units a persistent grid of this rank may fill.

        That is an equal part of the GPU where ranks share one, so that kernels of all of them that
        wait for each other fit at once; all of an MPS partition
        (``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE``), as which the driver reports it. The same number on
        all ranks.
        """
        return self._usable_units

    def get_heap_bases(self) -> Tensor:
        """Return uint64[num_ranks]: the address, in this process, of each rank's heap."""
        return self._table("bases", self.heap.bases, torch.uint64)

    def get_device_context(self) -> Tensor:
        """Return int64[7 + num_ranks] for ``DeviceContext.initialize``; the same one each time.

        Rank, world size, heap bases; then trace_enabled, max_events, and the addresses of the trace
        counter and buffer, which ``tracing.enable`` sets; then that of the record of lost waits.
        """
        record = self.watch.record.data_ptr()
        values = (self.cur_rank, self.num_ranks, *self.heap.bases, 0, 0, 0, 0, record)
        return self._table("context", values, torch.int64)

    def close(self) -> None:
        """Leave the world: tell peers, and free the heap.

        On GPUs it waits, for ``IRIS_TIMEOUT`` at most, until no peer can use this rank's memory.
        This rank's own tensors stay usable.
        """
        self._leave(CLOSED)

    def fail(self, message: str) -> None:
        """Tell peers that this rank failed: those that wait for it raise ``PeerError``."""
        self._board.leave(FAILED, message)

    def __enter__(self) -> "Iris":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._leave(FAILED, describe(error))

    def check_usable(self) -> None:
        """Raise ``IrisError`` in a forked process, where this context is closed, and after a lost
        wait.
        """
        self._board.check_usable()

    def _table(self, name: str, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._board.check_open()
        if name not in self._tables:
            self._tables[name] = torch.tensor(values, dtype=dtype, device=self.device)
        return self._tables[name]

    def _check_ranks(self, ranks: tuple[int, ...]) -> None:
        bad = [rank for rank in ranks if not 0 <= rank < self.num_ranks]
        if bad or len(set(ranks)) != len(ranks):
            raise IrisError(
                f"group {ranks}: ranks must be different numbers from 0 to {self.num_ranks - 1}"
            )
        if self.cur_rank not in ranks:
            raise IrisError(
                f"rank {self.cur_rank} is not in the group {ranks}",
                help="call it only on the ranks of the group",
            )

    def _become_current(self) -> None:
        global _current
        earlier = [] if _current is None else [*_current._before, weakref.ref(_current)]
        # Contexts that may be current again, the oldest first.
        self._before: list[weakref.ref[Iris]] = [ref for ref in earlier if ref() is not None]
        _current = self
        atexit.register(_leave_at_exit, weakref.ref(self))

    def _leave(self, state: int, message: str = "") -> None:
        global _current
        if self._board.closed or os.getpid() != self._board.pid:
            return
        if self._engine is not None:
            self._engine.close(abandon=state == FAILED)
        self._board.closed = True
        _current = _newest_open(_current)
        if self.checks is not None:
            self.checks.stop()
        self._watchdog.stop()
        if self.device.type == "cpu":
            self._board.leave(state, message)
            self._let_go()
        elif state == FAILED:
            self._board.leave(state, message)  # peers' kernels may still use this heap: keep it
        else:
            torch.cuda.synchronize(self.device)  # no kernel of this rank uses a peer any more
            self._board.leave(state)
            self._board.wait_until_alone(config.timeout())  # nor does a peer's use this rank
            self._let_go()

    def _let_go(self) -> None:
        self.watch.close()
        self.heap.close()


def _compare(world: Group, options: str, engines: tuple[str, ...], device: torch.device) -> None:
    """Meet all ranks, which must have called ``iris.iris`` with the same arguments."""
    if engines:
        options += f", engines={engines!r}"
    what = f"iris.iris({options}) on {device.type}" + ", IRIS_CHECK=1" * config.check()
    world.sync(what)


def _ranks_of(group: Sequence[int] | dist.ProcessGroup) -> tuple[int, ...]:
    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    try:
        return tuple(index(rank) for rank in group)
    except TypeError:
        raise IrisError(
            f"group={group!r} is not a group of this rank",
            help="use global ranks, as in group=[0, 2], or a ProcessGroup that this rank is in",
        ) from None


def describe(error: BaseException) -> str:
    """Return the error as one line and its message, as peers quote it."""
    return f"{type(error).__name__}: {error}"


def _leave_at_exit(ref: "weakref.ref[Iris]") -> None:
    """Say at interpreter exit why this rank leaves; peers that wait for it quote that."""
    self = ref()
    if self is None:
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        self._leave(FAILED, describe(error))
    else:
        self.close()


def _checked(
    heap_size: int, allocator_type: str, engines: str | Sequence[str]
) -> tuple[int, str, tuple[str, ...]]:
    """Check the arguments of ``iris`` and return them, with the kind of allocator in force."""
    heap_size = config.whole("heap_size", heap_size, 1)
    kind = config.allocator.read(allocator_type, "allocator_type")
    if config.allocator.is_set():
        kind = config.allocator()
    names = tuple(engines) if isinstance(engines, list | tuple) else (engines,)
    if any(name != "sdma" for name in names):
        raise ConfigError(f"engines={engines!r} is not allowed", help="use () or ('sdma',)")
    return heap_size, kind, names
