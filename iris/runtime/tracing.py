"""``ctx.tracing``: what the kernels of a rank recorded, on the host.

NOTE [One clock]
Events of a GPU carry the time of its own clock. That is mapped to the host's monotonic clock, which
all ranks of a host share, by Cristian's algorithm: the host writes a word at ``before``, a kernel
that waits for it answers with its time, and the host sees the answer at ``after``; so the GPU's
time was the host's ``(before + after) / 2``, give or take ``(after - before) / 2``. The quickest of
``_ROUNDS`` answers counts. This is done when recording starts and when events are read, so a clock
that drifts is followed in between. Ranks that share a GPU share its clock: they use the mapping of
the one that found the smallest uncertainty. CPU ranks read the host's clock itself.
"""

import itertools
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from iris import config
from iris.errors import IrisError
from iris.runtime.devices import synchronize
from iris.runtime.timeline import Event, Timeline, lanes

if TYPE_CHECKING:
    from iris.runtime.context import Iris

_ROUNDS = 64
_LIMIT_NS = 10**9  # for all rounds
CPU_CLOCK = "the host's monotonic clock, read by all ranks"
GPU_CLOCK = (
    "GPU clocks, mapped to the host's monotonic clock by Cristian's algorithm when recording "
    "starts and when it is read"
)


@dataclass(frozen=True)
class Anchor:
    """One moment on both clocks, in nanoseconds, give or take ``uncertainty``."""

    device: int = 0
    host: int = 0
    uncertainty: int = 0


@dataclass(frozen=True)
class Clock:
    """A device's clock between two moments: see NOTE [One clock]."""

    name: str
    first: Anchor
    last: Anchor

    @property
    def uncertainty(self) -> int:
        """Nanoseconds that a mapped time may be wrong, either way."""
        return max(self.first.uncertainty, self.last.uncertainty)

    def on_host(self, times: "np.ndarray[Any, Any]") -> list[int]:
        """Times of the device as times of the host."""
        span = self.last.device - self.first.device
        offset = self.first.host - self.first.device
        drift = self.last.host - self.last.device - offset
        passed = times - self.first.device
        shift = np.round(passed * (drift / span)).astype(np.int64) if span else 0
        found: list[int] = (passed + self.first.host + shift).tolist()
        return found


@dataclass(frozen=True)
class Record:
    """What one rank recorded, for others to read. ``words`` are its events, packed."""

    rank: int
    clock: Clock
    kinds: tuple[str, ...]
    stages: Mapping[int, tuple[str, tuple[int, ...]]]
    words: bytes
    count: int
    dropped: int

    def events(self, clock: Clock) -> list[Event]:
        """The events, with times of the host."""
        words = np.frombuffer(zlib.decompress(self.words), np.int64).reshape(-1, 8)
        words = _ordered(_nested(words))
        begins, ends = clock.on_host(words[:, 6]), clock.on_host(words[:, 7])
        tracks = _tracks(words)
        return list(map(self._event, words.tolist(), begins, ends, tracks))

    def _event(self, row: Sequence[int], begin: int, end: int, track: str) -> Event:
        kind, stage, bits, nbytes, detail, place = row[:6]
        what, ranks = self.stages.get(stage, ("", ()))
        members = [i for i in range(64) if bits >> i & 1]
        peers = [ranks[i] if i < len(ranks) else i for i in members]
        name = self.kinds[kind] if 0 <= kind < len(self.kinds) else f"kind {kind}"
        args: dict[str, Any] = {"stage": what, "program": place & 0xFFFFFFFF}
        args |= {"peers": peers} if peers else {}
        args |= {"bytes": nbytes} if nbytes else {}
        args |= {"row": detail >> 32, "column": detail & 0xFFFFFFFF} if name == "tile" else {}
        title = f"wait for {', '.join(map(str, peers))}" if name == "wait" and peers else name
        return Event(self.rank, title, begin, end, track, name, args)


class Tracing:
    """Events of this rank's kernels: stages of programs, and kernels of your own that say so.

    Kernels record while it is enabled. Those of programs are compiled again when it is switched on
    or off; without it nothing of it is in them. Your own record if their context is made by
    ``DeviceContext.initialize(context_tensor, rank, world_size, tracing=True)``.

    Example::

        ctx.tracing.enable(max_events=100_000)
        y = mlp(x, w_up, w_down)
        ctx.tracing.export("trace.json", merge=True)     # for ui.perfetto.dev
    """

    def __init__(self, ctx: "Iris") -> None:
        self.enabled = False
        self._ctx = ctx
        self._max_events = 0
        self.titles: dict[int, str] = {}  # of stages, by the numbers that waits have
        self._kinds: list[str] = []
        self._started = Anchor()

    @property
    def fields(self) -> Tensor:
        """int64[4] on the device: enabled, max_events, address of the counter, of the buffer."""
        return self._ctx.get_device_context()[2 + self._ctx.num_ranks :][:4]

    def enable(self, max_events: int = 1 << 17) -> None:
        """Begin to record, in room for ``max_events`` events of 64 bytes. Collective.

        What finds no room is dropped, and counted. Raises ``ConfigError`` for less than 1.
        """
        from iris.device.tracing import EVENT_WORDS, KINDS  # brings in triton

        device, count = self._ctx.device, config.whole("max_events", max_events, 1)
        if self._max_events != count:
            shape = (count, EVENT_WORDS.value)
            self._buffer = torch.zeros(shape, dtype=torch.int64, device=device)
            self._counter = torch.zeros(1, dtype=torch.int64, device=device)
            self._max_events = count
        if not self._kinds:
            self._kinds, self._clock = list(KINDS), _ClockReader(device)
        self._set(1)
        self.reset()
        self._ctx.world.sync("ctx.tracing.enable")

    def disable(self) -> None:
        """Record no more. What was recorded can still be exported. Collective."""
        self._set(0)
        self._ctx.world.sync("ctx.tracing.disable")

    def reset(self) -> None:
        """Forget all events."""
        self._check()
        synchronize(self._ctx.device)
        self._counter.zero_()
        self._started = self._clock()

    def kind(self, name: str) -> int:
        """Return the number that ``DeviceContext.trace_end`` takes for events called ``name``.

        The same on all ranks, where all make the same calls.
        """
        self._check()
        if name not in self._kinds:
            self._kinds.append(name)
        return self._kinds.index(name)

    def timeline(self, merge: bool = True) -> Timeline:
        """All ranks' events on one clock, or only this rank's. Collective.

        ``about`` says which clock, and for each rank: how many events, how many were dropped, and
        by how many microseconds its times may be wrong.
        """
        self._check()
        mine = self._record()
        sent = mine if merge else replace(mine, words=b"")
        what = f"ctx.tracing, merge={merge}"
        answers = self._ctx.world.exchange_object(what, sent)
        clocks = _shared([record.clock for record in answers])
        ranks = [
            {
                "rank": record.rank,
                "events": record.count,
                "dropped": record.dropped,
                "uncertainty_us": used.uncertainty / 1e3,
            }
            for record, used in zip(answers, clocks, strict=True)
        ]
        events = [
            event for r in (answers if merge else [mine]) for event in r.events(clocks[r.rank])
        ]
        clock = CPU_CLOCK if self._ctx.device.type == "cpu" else GPU_CLOCK
        return Timeline(events, {"clock": clock, "ranks": ranks})

    def export(self, path: str | os.PathLike[str], merge: bool = False) -> Path | None:
        """Write the events as a Chrome trace, for ui.perfetto.dev. Collective.

        One process a rank, one track an SM (on CPU ranks: a program). Each rank writes a file of
        its own, "trace-rank0.json" for "trace.json"; with ``merge`` rank 0 writes all into
        ``path``. Returns what this rank wrote, if anything. Times are aligned either way.
        """
        timeline = self.timeline(merge)
        rank, file = self._ctx.cur_rank, Path(path)
        if merge and rank != 0:
            return None
        if not merge:
            ends = "".join(file.suffixes[-2 if file.suffix == ".gz" else -1 :])
            file = file.with_name(f"{file.name.removesuffix(ends)}-rank{rank}{ends}")
        timeline.save(file)
        return file

    def _set(self, enabled: int) -> None:
        self._check()
        synchronize(self._ctx.device)
        addresses = self._counter.data_ptr(), self._buffer.data_ptr()
        self.fields.copy_(torch.tensor([enabled, self._max_events, *addresses]))
        self.enabled = bool(enabled)

    def _check(self) -> None:
        if self._max_events == 0:
            raise IrisError(
                "tracing was never enabled in this context", help="call ctx.tracing.enable() first"
            )

    def _record(self) -> Record:
        synchronize(self._ctx.device)
        count = int(self._counter)
        kept = min(count, self._max_events)
        if count > kept:
            self._ctx.warning(
                f"tracing: {count - kept} of {count} events were dropped; "
                f"raise max_events (now {self._max_events})"
            )
        words = zlib.compress(self._buffer[:kept].cpu().numpy().tobytes(), 1)
        device = self._ctx.device
        clock = Clock(_name(device), self._started, self._clock())
        kinds = tuple(self._kinds)
        stages = {
            number: (self.titles.get(number, what), ranks)
            for number, (what, ranks) in self._ctx.watch.stages.items()
        }
        return Record(self._ctx.cur_rank, clock, kinds, stages, words, kept, count - kept)


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "host"


def _shared(clocks: Sequence[Clock]) -> list[Clock]:
    """For each rank the best mapping of its device's clock."""
    best: dict[str, Clock] = {}
    for clock in clocks:
        if clock.name not in best or clock.uncertainty < best[clock.name].uncertainty:
            best[clock.name] = clock
    return [best[clock.name] for clock in clocks]


def _ordered(words: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """By start; of equal ones the longest first, then the one that ended last."""
    return words[np.lexsort((-np.arange(len(words)), -words[:, 7], words[:, 6]))]


def _nested(words: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Let an event that began within another of its program, and outlasts it, begin at its end.

    Such are the tiles of a pipelined loop: the first loads of one are in the last steps of another.
    """
    words = words.copy()
    ended: dict[int, list[tuple[int, int]]] = {}
    for row in np.argsort(words[:, 7], kind="stable"):
        place, start, end = words[row, 5:8].tolist()
        before = ended.setdefault(place, [])
        late = itertools.takewhile(lambda span: span[1] > start, reversed(before))  # noqa: B023
        cut = (other for first, other in late if first < start and other < end)
        words[row, 6] = next(cut, start)  # the last one to end
        before.append((int(words[row, 6]), end))
    return words


def _tracks(words: "np.ndarray[Any, Any]") -> list[str]:
    """The track of each event: its SM, and where programs shared one, which of them."""
    places = words[:, 5]
    tracks = [f"program {place & 0xFFFFFFFF}" for place in places.tolist()]
    for sm in np.unique(places >> 32).tolist():
        at = np.flatnonzero(places >> 32 == sm) if sm >= 0 else np.empty(0, np.int64)
        spans = zip(words[at, 6].tolist(), words[at, 7].tolist(), places[at].tolist(), strict=True)
        for index, lane in zip(at.tolist(), lanes(spans), strict=True):
            tracks[index] = f"SM {sm}" + (f" ({lane + 1})" if lane else "")
    return tracks


class _ClockReader:
    """Reads a device's clock beside the host's: see NOTE [One clock].

    What it needs is allocated and loaded at once: both can wait for a peer's kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self._mail = torch.zeros(_ROUNDS + 1, dtype=torch.int64, pin_memory=True)
            self._launch(0)
            torch.cuda.synchronize(device)

    def __call__(self) -> Anchor:
        if self._device.type == "cpu":
            return Anchor()
        words = self._mail.numpy()
        words[:] = 0
        self._launch(_ROUNDS)
        found = [anchor for number in range(1, _ROUNDS + 1) if (anchor := _ask(words, number))]
        torch.cuda.synchronize(self._device)
        if not found:
            raise IrisError("the GPU did not answer within a second when asked for its time")
        return min(found, key=lambda anchor: anchor.uncertainty)

    def _launch(self, rounds: int) -> None:
        from iris.device.tracing import clock_kernel  # brings in triton

        clock_kernel[(1,)](self._mail, rounds, LIMIT=_LIMIT_NS, num_warps=1)


def _ask(words: "np.ndarray[Any, Any]", number: int) -> Anchor | None:
    before = time.perf_counter_ns()
    words[0] = number
    while words[number] == 0:
        if time.perf_counter_ns() - before > _LIMIT_NS:
            return None
    after = time.perf_counter_ns()
    return Anchor(int(words[number]), (before + after) // 2, (after - before + 1) // 2)
