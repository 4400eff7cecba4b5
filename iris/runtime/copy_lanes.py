"""Lanes: what carries out copies in order, one for each peer and channel.

NOTE [Lanes never wait]
A job begins when the work before it on its stream is done and its flag has come. The rank's own
thread finds that out by looking: nothing that waits is put on a copy stream. Streams share hardware
queues (with MPS, very few), and a stream that waits there holds up the others, until a copy cannot
start that some kernel needs to end. Nor is more put there than fits: the driver blocks a thread
whose stream is full, and copies within a GPU may wait for the SMs of kernels that wait. So lanes do
not hold each other up, and every wait is bounded by the thread. Only while a graph is captured are
waits recorded, as kernels of one warp.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from iris import config
from iris.errors import IrisError, TimeoutError, UnsupportedError
from iris.runtime.driver import Driver
from iris.runtime.rectangles import Rectangle

if TYPE_CHECKING:
    from iris.runtime.context import Iris

DEVICE = -1  # the channel of what kernels ask for

Key = tuple[int, int]  # peer, channel
Check = Callable[[], None]

# Priorities of streams. Each has hardware queues of its own; torch's streams go down to -3, and
# one of them may have a kernel that waits for a copy.
_COPIES, _URGENT = -4, -5
_SPINS = 50
_FLYING = 512  # operations on a stream at a time: streams hold 1024 on the GPUs that were tried
_PAUSE_SECONDS = 2e-5


@dataclass(frozen=True)
class Wait:
    """Go on when the integer at ``address``, here, is at or past ``value`` by the difference."""

    address: int
    value: int
    wide: bool
    what: str

    def behind(self, seen: int) -> bool:
        """Whether ``seen`` is short of the value."""
        return signed(self.value - seen, self.wide) > 0

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


Op = Wait | Rectangle | Mark


@dataclass
class _Job:
    """Operations that one call asked for; ``used`` must stay as it is until they are done."""

    ops: deque[Op]
    used: tuple[Tensor, ...]
    after: "torch.cuda.Event | None" = None  # what the stream had before it
    since: float | None = None  # when its wait began


@dataclass
class _Lane:
    lock: threading.Lock = field(default_factory=threading.Lock)
    jobs: deque[_Job] = field(default_factory=deque)
    submitted: int = 0
    finished: int = 0


def patiently(done: Callable[[], bool], check: Check) -> None:
    """Return when ``done()``. ``check`` raises when there is nothing to wait for any more."""
    spins = 0
    while not done():
        check()
        spins += 1
        time.sleep(_PAUSE_SECONDS if spins > _SPINS else 0)  # lets the engine's thread run too


class Lanes:
    """Lanes of a CPU rank, over memory that all ranks have mapped; ``StreamLanes`` of a GPU's.

    ``wake`` makes the engine's thread call ``advance`` soon, as it does again and again.
    """

    needs_no_unit = True  # for copies between GPUs and signals that set, outside of captures

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lanes: dict[Key, _Lane] = {}

    def submit(self, key: Key, ops: Sequence[Op], used: Sequence[Tensor]) -> None:
        """Append to a lane, after the work of the current stream so far."""
        job = _Job(deque(ops), tuple(used), self._now())
        lane = self._lanes.setdefault(key, _Lane())
        with lane.lock:
            lane.jobs.append(job)
            lane.submitted += 1
            if len(lane.jobs) == 1:
                self._advance(key, lane)
        if lane.jobs:
            self._wake()

    def finish(self, key: Key, check: Check) -> None:
        """Return when the lane is empty; in a capture, make the current stream wait for it."""
        lane = self._lanes.get(key)
        if lane is not None:
            last = lane.submitted
            patiently(lambda: lane.finished >= last, check)

    def advance(self) -> bool:
        """Do what can be done, on the engine's thread. Return whether anything was.

        Raises ``TimeoutError`` for a wait that ran out.
        """
        worked = False
        for key, lane in list(self._lanes.items()):
            if lane.jobs:
                with lane.lock:
                    worked |= self._advance(key, lane)
        return worked

    def perform(
        self, key: Key, ops: Sequence[Rectangle | Mark], used: tuple[Tensor, ...] = ()
    ) -> None:
        """Carry out or issue ``ops``, in order; ``used`` are kept until they are done."""
        for op in ops:
            if isinstance(op, Mark):
                _mark(op)
            else:
                for row in range(op.height):
                    dst, src = op.dst + row * op.dst_pitch, op.src + row * op.src_pitch
                    ctypes.memmove(dst, src, op.width)

    def full(self, key: Key) -> bool:
        """Whether no more should be issued for now."""
        return False

    def enter_thread(self) -> None:
        """Called first on the engine's thread."""

    def pending(self) -> bool:
        """Return whether some lane has a job that cannot begin yet."""
        return any(lane.jobs for lane in list(self._lanes.values()))

    def keys(self) -> Sequence[Key]:
        """Lanes that had work."""
        return list(self._lanes)

    def give_up(self) -> None:
        """Drop all jobs: nobody will look at the results any more."""
        self._lanes.clear()

    def close(self) -> None:
        """Let go of what lanes are made of, when all are empty."""

    def _advance(self, key: Key, lane: _Lane) -> bool:
        worked = False
        while lane.jobs and self._begins(key, lane.jobs[0]):
            job = lane.jobs[0]
            self.perform(key, list(job.ops), job.used)  # type: ignore[arg-type]  # its wait is over
            lane.jobs.popleft()
            lane.finished += 1
            worked = True
        return worked

    def _begins(self, key: Key, job: _Job) -> bool:
        if (job.after is not None and not job.after.query()) or self.full(key):
            return False
        wait = job.ops[0]
        if isinstance(wait, Wait):
            seen = self._read(wait)
            job.since = job.since or time.monotonic()
            if wait.behind(seen):
                if time.monotonic() - job.since > config.timeout():
                    raise wait.late(seen)
                return False
            job.ops.popleft()
        return True

    def _now(self) -> "torch.cuda.Event | None":
        return None

    def _read(self, wait: Wait) -> int:
        kind = ctypes.c_int64 if wait.wide else ctypes.c_int32
        return int(kind.from_address(wait.address).value)


def signed(value: int, wide: bool) -> int:
    """``value`` in two's complement of 64 or 32 bits."""
    half = 1 << (63 if wide else 31)
    return (value + half) % (2 * half) - half


def _mark(op: Mark) -> None:
    """An atomic on shared memory, by the only means in reach: the one of Triton's interpreter."""
    from triton._C.libtriton import interpreter

    value = np.array([signed(op.value, op.wide)], dtype=np.int64 if op.wide else np.int32)
    address = np.array([op.address], dtype=np.uint64)
    what = interpreter.RMW_OP.ADD if op.add else interpreter.RMW_OP.XCHG
    order = interpreter.MEM_SEMANTIC.ACQUIRE_RELEASE
    interpreter.atomic_rmw(what, address, value, np.ones(1, dtype=np.bool_), order)


class StreamLanes(Lanes):
    """Lanes of a GPU rank: a stream for each.

    Signals that set are memory operations of the stream where the driver has them, which take no
    SM; while a graph is captured, and for signals that add, they are kernels of one warp.
    """

    def __init__(self, ctx: "Iris", wake: Callable[[], None]) -> None:
        from iris.device.copy_engine import signal_kernel, wait_kernel

        super().__init__(wake)
        self._device = ctx.device
        self._driver = Driver.load()
        self._streams: dict[Key, torch.cuda.Stream] = {}
        self._flying: dict[Key, deque[tuple[torch.cuda.Event, int, tuple[Tensor, ...]]]] = {}
        self._flying_lock = threading.Lock()
        self._wait_kernel, self._signal_kernel = wait_kernel, signal_kernel
        self._watch = ctx.watch
        self._urgent = self._new_stream(_URGENT)  # for what must not queue behind copies
        self._seen = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._seen_lock = threading.Lock()
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
            self.needs_no_unit = True
        except IrisError:
            pass  # the kernel does it
        self._urgent.synchronize()

    def submit(self, key: Key, ops: Sequence[Op], used: Sequence[Tensor]) -> None:
        if not torch.cuda.is_current_stream_capturing():
            super().submit(key, ops, used)
            return
        lane = self._lanes.get(key)
        if lane is not None and lane.jobs:  # which would be captured too
            raise UnsupportedError(
                f"copies to rank {key[0]} on channel {key[1]} still wait for a flag or a stream, "
                "and a CUDA graph is captured",
                help="call ctx.quiet before the capture, or use another channel",
            )
        stream = self._stream(key)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for op in ops:
            if isinstance(op, Wait):
                stage = self._watch.stage(op.what, ())
                place = op.address, signed(op.value, op.wide), int(op.wide)
                with torch.cuda.stream(stream):
                    self._wait_kernel[(1,)](*place, self._watch.record, stage, -1, num_warps=1)
            else:
                self._issue(stream, op, capturing=True)

    def finish(self, key: Key, check: Check) -> None:
        stream = self._streams.get(key)
        if torch.cuda.is_current_stream_capturing():
            if stream is not None and _captures(stream):
                torch.cuda.current_stream(self._device).wait_stream(stream)
            return
        super().finish(key, check)
        stream = self._streams.get(key)
        if stream is not None:
            patiently(stream.record_event().query, check)

    def advance(self) -> bool:
        for key in list(self._flying):
            self.full(key)
        return super().advance()

    def perform(
        self, key: Key, ops: Sequence[Rectangle | Mark], used: tuple[Tensor, ...] = ()
    ) -> None:
        stream = self._stream(key)
        for op in ops:
            self._issue(stream, op)
        with self._flying_lock:
            flying = self._flying.setdefault(key, deque())
            flying.append((stream.record_event(), len(ops), used))

    def full(self, key: Key) -> bool:
        with self._flying_lock:
            flying = self._flying.get(key, deque())
            while flying and flying[0][0].query():
                flying.popleft()
            return sum(count for _, count, _ in flying) >= _FLYING

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)
        self._driver.capture_mode()

    def keys(self) -> Sequence[Key]:
        return list(self._streams.keys() | self._lanes.keys())

    def close(self) -> None:
        for stream in (self._urgent, *self._streams.values()):
            self._driver.close_stream(stream.cuda_stream)
        self._streams.clear()
        self._flying.clear()

    def _now(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def _read(self, wait: Wait) -> int:
        with self._seen_lock:
            self._seen.zero_()
            nbytes = 8 if wait.wide else 4
            handle = self._urgent.cuda_stream
            self._driver.copy(self._seen.data_ptr(), wait.address, nbytes, handle)
            self._urgent.synchronize()
            return signed(int(self._seen), wait.wide)

    def _issue(self, stream: torch.cuda.Stream, op: Any, capturing: bool = False) -> None:
        handle = stream.cuda_stream
        if isinstance(op, Mark):
            self._signal(op, stream, kernel=capturing or op.add or not self.needs_no_unit)
        elif op.height == 1 and op.width:
            self._driver.copy(op.dst, op.src, op.width, handle)
        elif op.height and op.width:
            pitches = op.dst, op.dst_pitch, op.src, op.src_pitch
            self._driver.copy_rows(*pitches, op.width, op.height, handle)

    def _signal(self, op: Mark, stream: torch.cuda.Stream, kernel: bool) -> None:
        if not kernel:
            self._driver.write(op.address, op.value, op.wide, stream.cuda_stream)
            return
        with torch.cuda.stream(stream):
            place = op.address, signed(op.value, op.wide), int(op.wide)
            self._signal_kernel[(1,)](*place, int(op.add), num_warps=1)

    def _stream(self, key: Key) -> torch.cuda.Stream:
        if key not in self._streams:
            self._streams[key] = self._new_stream(_COPIES)
        return self._streams[key]

    def _new_stream(self, priority: int) -> torch.cuda.Stream:
        mode = self._driver.capture_mode()
        stream = self._driver.stream(priority)
        self._driver.capture_mode(mode)
        return torch.cuda.ExternalStream(stream, device=self._device)


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
