"""Lanes: what carries out copies in order, one for each peer and channel.

GPU ranks have a stream for each lane, so that copies run on the GPU's copy engines. On CPU ranks
the engine's thread works lanes off, turn by turn: one that waits for a flag holds no other up.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from iris import config
from iris.errors import IrisError, TimeoutError
from iris.runtime.driver import Driver
from iris.runtime.rectangles import Rectangle

if TYPE_CHECKING:
    from iris.runtime.context import Iris

DEVICE = -1  # the channel of what kernels ask for

Key = tuple[int, int]  # peer, channel
Check = Callable[[], None]

_SPINS = 50
_PAUSE_SECONDS = 2e-5


@dataclass(frozen=True)
class Wait:
    """Go on when the integer at ``address``, here, is at or past ``value`` by the difference."""

    address: int
    value: int
    wide: bool
    what: str

    def behind(self, seen: int) -> int:
        """By how much ``seen`` is short: above 0 while there is something to wait for."""
        return signed(self.value - seen, self.wide)

    def late(self, seen: int) -> TimeoutError:
        """The error for a wait that ran out."""
        seconds = config.timeout()
        return TimeoutError(
            f"{self.what}: waited {seconds:g} s for its flag\n"
            f"  expected at least {self.value}, seen {seen}",
            help=f"look for what should set the flag; raise IRIS_TIMEOUT (now {seconds:g} s) if it "
            "is only slow",
        )


@dataclass(frozen=True)
class Mark:
    """Set the integer at ``address`` to ``value``, or add that, after all before in the lane."""

    address: int
    value: int
    wide: bool
    add: bool


@dataclass(frozen=True)
class _Keep:
    """Keeps tensors alive for what comes before it in the lane."""

    tensors: tuple[Tensor, ...]


Op = Wait | Rectangle | Mark


class Lanes(Protocol):
    """What a kind of rank implements."""

    needs_no_unit: bool  # for copies between GPUs, waits, and signals that set, outside of captures

    def submit(self, key: Key, ops: Sequence[Op], used: Sequence[Tensor]) -> None:
        """Append to a lane, after the work of the current stream so far.

        The memory of ``used`` stays as it is until then.
        """

    def finish(self, key: Key, check: Check) -> None:
        """Return when the lane is empty; in a capture, make the current stream wait for it.

        ``check`` raises when there is nothing to wait for any more.
        """

    def advance(self) -> bool:
        """Called again and again on the engine's thread. Return whether anything went on."""

    def enter_thread(self) -> None:
        """Called first on the engine's thread."""

    def perform(self, peer: int, ops: Sequence[Rectangle | Mark], now: bool = False) -> None:
        """Carry out what kernels asked for, in order, or ``now``; on the engine's thread."""

    def waiting(self) -> bool:
        """Return whether some lane waits for a flag."""

    def keys(self) -> Sequence[Key]:
        """Lanes that had work."""

    def give_up(self) -> None:
        """End all waits: nobody will look at the results any more."""

    def close(self) -> None:
        """Let go of what lanes are made of, when all are empty."""


def patiently(done: Callable[[], bool], check: Check, what: str) -> None:
    """Return when ``done()``. Raises what ``check`` raises, or ``TimeoutError``."""
    started, spins = time.monotonic(), 0
    while not done():
        check()
        spins += 1
        time.sleep(_PAUSE_SECONDS if spins > _SPINS else 0)  # lets the engine's thread run too
        # The engine's thread ends a wait after IRIS_TIMEOUT, and says for what it was.
        if time.monotonic() - started > config.timeout() + 5:
            raise TimeoutError(f"{what} did not end in {time.monotonic() - started:.1f} s")


@dataclass
class _Lane:
    ops: deque[Op | _Keep] = field(default_factory=deque)
    submitted: int = 0
    finished: int = 0
    since: float | None = None  # when the wait at its head began


class HostLanes:
    """Lanes of a CPU rank, over memory that all ranks have mapped."""

    needs_no_unit = True

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lanes: dict[Key, _Lane] = {}
        self._lock = threading.Lock()

    def submit(self, key: Key, ops: Sequence[Op], used: Sequence[Tensor]) -> None:
        with self._lock:
            lane = self._lanes.setdefault(key, _Lane())
            lane.ops.extend((*ops, _Keep(tuple(used))))
            lane.submitted += len(ops) + 1
        self._wake()

    def finish(self, key: Key, check: Check) -> None:
        lane = self._lanes.get(key)
        if lane is not None:
            last = lane.submitted
            patiently(lambda: lane.finished >= last, check, f"copies to rank {key[0]}")

    def waiting(self) -> bool:
        return any(lane.since is not None for lane in list(self._lanes.values()))

    def keys(self) -> Sequence[Key]:
        return list(self._lanes)

    def give_up(self) -> None:
        for lane in self._lanes.values():
            lane.ops.clear()

    def advance(self) -> bool:
        with self._lock:
            lanes = list(self._lanes.values())
        return sum(self._advance(lane) for lane in lanes) > 0

    def _advance(self, lane: _Lane) -> bool:
        before = lane.finished
        while lane.ops and self._try(lane, lane.ops[0]):
            lane.ops.popleft()
            lane.finished += 1
        return lane.finished > before

    def _try(self, lane: _Lane, op: Op | _Keep) -> bool:
        if isinstance(op, Wait):
            seen = _word(op.address, op.wide).value
            lane.since = lane.since or time.monotonic()
            if op.behind(seen) > 0:
                if time.monotonic() - lane.since > config.timeout():
                    raise op.late(seen)
                return False
            lane.since = None
        elif not isinstance(op, _Keep):
            _perform(op)
        return True

    def enter_thread(self) -> None:
        pass

    def perform(self, peer: int, ops: Sequence[Rectangle | Mark], now: bool = False) -> None:
        for op in ops:
            _perform(op)

    def close(self) -> None:
        self._lanes.clear()


def _perform(op: Rectangle | Mark) -> None:
    if isinstance(op, Mark):
        _mark(op)
        return
    for row in range(op.height):
        ctypes.memmove(op.dst + row * op.dst_pitch, op.src + row * op.src_pitch, op.width)


def signed(value: int, wide: bool) -> int:
    """``value`` in two's complement of 64 or 32 bits."""
    half = 1 << (63 if wide else 31)
    return (value + half) % (2 * half) - half


def _word(address: int, wide: bool) -> Any:
    return (ctypes.c_int64 if wide else ctypes.c_int32).from_address(address)


def _mark(op: Mark) -> None:
    """An atomic on shared memory, by the only means in reach: the one of Triton's interpreter."""
    from triton._C.libtriton import interpreter

    value = np.array([signed(op.value, op.wide)], dtype=np.int64 if op.wide else np.int32)
    address = np.array([op.address], dtype=np.uint64)
    what = interpreter.RMW_OP.ADD if op.add else interpreter.RMW_OP.XCHG
    order = interpreter.MEM_SEMANTIC.ACQUIRE_RELEASE
    interpreter.atomic_rmw(what, address, value, np.ones(1, dtype=np.bool_), order)


@dataclass
class _Pending:
    """A wait on a stream: its clock starts when all before it is done."""

    wait: Wait
    before: torch.cuda.Event
    after: torch.cuda.Event
    since: float | None = None


class StreamLanes:
    """Lanes of a GPU rank.

    Where the driver has them, waits and signals are memory operations of the stream, which take no
    SM; while a graph is captured, and for signals that add, they are kernels of one warp. The
    device bounds a kernel's wait (NOTE [Bounded waits] in watch.py); the other kind is bounded by
    ``advance``, which satisfies a wait that ran out, so that the stream is not stuck, and raises.

    Streams of one priority may share a hardware queue, where one that waits holds up the others. So
    lanes have a priority of their own, and so has the stream that gets them out of a wait.
    """

    def __init__(self, ctx: "Iris") -> None:
        from iris.device.copy_engine import signal_kernel, wait_kernel

        self._device = ctx.device
        self._driver = Driver.load()
        self._streams: dict[Key, torch.cuda.Stream] = {}
        self._pending: deque[_Pending] = deque()
        self._kept: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self._wait_kernel, self._signal_kernel = wait_kernel, signal_kernel
        self._watch = ctx.watch
        self._stages: dict[str, int] = {}
        self._urgent = self._new_stream(-2)
        self._old, self._new = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        self.needs_no_unit = False

    def prepare(self, flag: int) -> None:
        """Load the kernels, and see what the driver can do with the four words at ``flag``.

        The driver copies within a GPU by kernels of its own, which it loads when it first does.
        """
        stage = self._watch.stage("copy engine", ())
        with torch.cuda.stream(self._urgent):
            for value in (0, 1 << 40):  # Triton compiles for int32 and for int64
                self._signal(Mark(flag, value, True, True), self._urgent, kernel=True)
                self._wait_kernel[(1,)](flag, value, 1, self._watch.record, stage, -1, num_warps=1)
        handle = self._urgent.cuda_stream
        self._driver.copy(flag + 8, flag, 8, handle)
        self._driver.copy_rows(flag + 8, 16, flag, 16, 8, 2, handle)
        try:
            for wide in (False, True):
                self._driver.write(flag, 0, wide, handle)
                self._driver.wait(flag, 0, wide, handle)
            self.needs_no_unit = True
        except IrisError:
            pass  # the kernels do it
        self._urgent.synchronize()

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)
        self._driver.capture_mode()

    def close(self) -> None:
        for stream in (self._urgent, *self._streams.values()):
            self._driver.close_stream(stream.cuda_stream)
        self._streams.clear()
        self._kept.clear()

    def submit(self, key: Key, ops: Sequence[Op], used: Sequence[Tensor]) -> None:
        stream = self._stream(key)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        capturing = torch.cuda.is_current_stream_capturing()
        self.issue(stream, ops, capturing)
        if not capturing:  # a graph's tensors are kept by who replays it
            self._kept.append((stream.record_event(), tuple(used)))

    def perform(self, peer: int, ops: Sequence[Rectangle | Mark], now: bool = False) -> None:
        stream = self._urgent if now else self._stream((peer, DEVICE))
        self.issue(stream, ops, capturing=False)

    def issue(self, stream: torch.cuda.Stream, ops: Sequence[Op], capturing: bool) -> None:
        """Append ``ops`` to ``stream``."""
        handle = stream.cuda_stream
        for op in ops:
            if isinstance(op, Wait):
                self._wait(op, stream, capturing)
            elif isinstance(op, Mark):
                self._signal(op, stream, kernel=capturing or op.add or not self.needs_no_unit)
            elif op.width * op.height == 0:
                pass  # nothing to copy
            elif op.height == 1:
                self._driver.copy(op.dst, op.src, op.width, handle)
            else:
                pitches = op.dst, op.dst_pitch, op.src, op.src_pitch
                self._driver.copy_rows(*pitches, op.width, op.height, handle)

    def finish(self, key: Key, check: Check) -> None:
        stream = self._streams.get(key)
        if stream is None:
            return
        if torch.cuda.is_current_stream_capturing():
            current = torch.cuda.current_stream(self._device)
            with torch.cuda.stream(stream):
                joined = torch.cuda.is_current_stream_capturing()
            if joined:
                current.wait_stream(stream)
            return
        done = stream.record_event()
        patiently(done.query, check, f"copies to rank {key[0]}")

    def waiting(self) -> bool:
        return bool(self._pending)

    def keys(self) -> Sequence[Key]:
        return list(self._streams)

    def advance(self) -> bool:
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
        before = len(self._pending)
        for _ in range(before):
            item = self._pending.popleft()
            if item.after.query():
                continue
            if item.since is None and item.before.query():
                item.since = time.monotonic()
            if item.since is not None and time.monotonic() - item.since > config.timeout():
                seen = self._satisfy(item.wait)
                raise item.wait.late(seen)
            self._pending.append(item)
        return len(self._pending) < before

    def give_up(self) -> None:
        while self._pending:
            self._satisfy(self._pending.popleft().wait)

    def _stream(self, key: Key) -> torch.cuda.Stream:
        if key not in self._streams:
            self._streams[key] = self._new_stream(-1)
        return self._streams[key]

    def _new_stream(self, priority: int) -> torch.cuda.Stream:
        mode = self._driver.capture_mode()
        stream = self._driver.stream(priority)
        self._driver.capture_mode(mode)
        return torch.cuda.ExternalStream(stream, device=self._device)

    def _wait(self, op: Wait, stream: torch.cuda.Stream, capturing: bool) -> None:
        if capturing or not self.needs_no_unit:
            if op.what not in self._stages:
                self._stages[op.what] = self._watch.stage(op.what, ())
            stage = self._stages[op.what]
            with torch.cuda.stream(stream):
                place = op.address, signed(op.value, op.wide), int(op.wide)
                self._wait_kernel[(1,)](*place, self._watch.record, stage, -1, num_warps=1)
            return
        before = stream.record_event()
        self._driver.wait(op.address, op.value, op.wide, stream.cuda_stream)
        self._pending.append(_Pending(op, before, stream.record_event()))

    def _signal(self, op: Mark, stream: torch.cuda.Stream, kernel: bool) -> None:
        if not kernel:
            self._driver.write(op.address, op.value, op.wide, stream.cuda_stream)
            return
        with torch.cuda.stream(stream):
            place = op.address, signed(op.value, op.wide), int(op.wide)
            self._signal_kernel[(1,)](*place, int(op.add), num_warps=1)

    def _satisfy(self, op: Wait) -> int:
        """Put the awaited value into a flag, so that its stream goes on; return what was there."""
        self._new.fill_(signed(op.value, wide=True))  # of these bytes, an int32 is the first four
        old, new = self._old.data_ptr(), self._new.data_ptr()
        for dst, src in ((old, op.address), (op.address, new)):
            self._driver.copy(dst, src, 8 if op.wide else 4, self._urgent.cuda_stream)
        self._urgent.synchronize()
        return signed(int(self._old), op.wide)
