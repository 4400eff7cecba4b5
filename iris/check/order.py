"""Finds accesses that nothing orders, by vector clocks.

The happens-before order of all ranks' accesses is followed with a vector clock for each task, and
every access is compared with the last ones to the same bytes: Flanagan and Freund, *FastTrack:
Efficient and Precise Dynamic Race Detection*, PLDI 2009. Instead of one epoch a variable there is a
number a byte, task and kind of access, so that numpy compares whole blocks.

NOTE [What is proved]
An edge is only what holds in every run: launches and the host's own order, meetings of groups, and
atomics that acquire what others released. A wait for an epoch takes over what had happened when the
flag first reached it, not what a fast peer has published since. So what is found, or not found,
does not depend on how long any rank took. It does depend on which program took which item of work.
"""

from collections.abc import Iterator, Sequence
from heapq import merge
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from iris.check.log import (
    ATOMIC,
    ATOMIC_HERE,
    HOST,
    LOCAL,
    LOOK,
    READ,
    WRITE,
    Access,
    Arrive,
    Atomic,
    Depart,
    Entry,
    Fork,
    Join,
    Wait,
)

_CHUNK = 1 << 14  # bytes whose last accesses are kept together
_KEPT = 64  # values of a flag that a late wait may still ask for
_CHANGES = (WRITE, ATOMIC, ATOMIC_HERE)
_ATOMICS = (LOOK, ATOMIC, ATOMIC_HERE)

Clock = np.ndarray  # of each task, the last entry that has happened before


class Side(NamedTuple):
    """One of two accesses: what a task of a rank did, and where."""

    rank: int
    slot: int
    kind: str
    where: str
    launch: Fork | None

    @property
    def number(self) -> int:
        """Which launch of its rank it was in; 0 for the host."""
        return self.launch.number if self.launch else 0

    def __str__(self) -> str:
        text = f"rank {self.rank} {self.kind} at {self.where}"
        if self.launch is None:
            return text
        program = f"program {self.slot - 1} of {self.launch.programs}"
        call = self.launch.call and f", {self.launch.call}"
        return f"{text}: {self.launch.kernel}, launch {self.number}, {program}{call}"


class Race(NamedTuple):
    """Two accesses to bytes ``start .. stop`` of the memory of ``owner`` that nothing orders."""

    owner: int
    start: int
    stop: int
    first: Side
    second: Side

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for races of one cause."""
        return tuple(sorted(f"{side.kind} {side.where}" for side in self[3:]))

    @property
    def way_out(self) -> str:
        """What would order them."""
        first, second = self.first, self.second
        if first.rank == second.rank:
            return "let one program release by an atomic after it, and the other acquire before it"
        if ATOMIC_HERE in (first.kind, second.kind):
            return 'use scope="sys" for what other ranks look at'
        if first.kind in (READ, LOOK):
            return (
                f"let rank {first.rank} say that it has read (a signal, a barrier of both) before "
                f"rank {second.rank} writes, or use two buffers in turn"
            )
        return (
            f"let rank {first.rank} signal after it and rank {second.rank} wait before it, "
            "or put a barrier of both in between"
        )


# What a word has held: each value, and what had happened before, by who may see that (a rank, or
# None for all of them).
History = list[tuple[int, dict[int | None, Clock]]]


class Detector:
    """Follows all ranks' logs, and checks the accesses to what rank ``rank`` owns."""

    def __init__(self, world: int, rank: int) -> None:
        self._world = world
        self._rank = rank
        self.clear()

    def clear(self) -> None:
        """Forget everything: all that happened so far is before all that comes."""
        self._now = 0
        self._tasks = self._world
        self._clocks: dict[int, Clock] = {}
        # By owner, rank (of local memory) and chunk; then by the word's place in the chunk.
        self._words: dict[tuple[int, int, int], dict[int, History]] = {}
        self._chunks: dict[tuple[int, int], dict[tuple[str, int], np.ndarray]] = {}
        self._sides: dict[int, Side] = {}
        self._meetings: dict[tuple[int, int], tuple[Clock, int]] = {}
        self._launches: dict[int, Fork] = {}

    def follow(self, logs: Sequence[Sequence[Entry]]) -> list[Race]:
        """Take in what each rank wrote down since the last time; return what nothing orders."""
        found: dict[tuple[str, ...], Race] = {}  # one for each cause
        for _, rank, entry in merge(*map(_ticketed, range(len(logs)), logs), key=itemgetter(0)):
            self._now += 1
            for race in self._take(rank, entry):
                found.setdefault(race.key, race)
        return list(found.values())

    def _take(self, rank: int, entry: Entry) -> Iterator[Race]:
        if isinstance(entry, Access):
            if entry.kind == WRITE:
                self._overwrite(rank, entry)
            yield from self._access(rank, entry)
        elif isinstance(entry, Atomic | Wait):
            kind = LOOK if isinstance(entry, Wait) else ATOMIC if entry.system else ATOMIC_HERE
            start = np.array([entry.offset])
            touched = Access(kind, entry.slot, entry.owner, start, start + entry.size, entry.where)
            yield from self._access(rank, touched)
            self._atomic(rank, entry) if isinstance(entry, Atomic) else self._wait(rank, entry)
        elif isinstance(entry, Fork):
            self._fork(rank, entry)
        elif isinstance(entry, Join):
            self._join(rank)
        else:
            self._meet(rank, entry)

    def _task(self, rank: int, slot: int) -> int:
        task = slot * self._world + rank
        self._tasks = max(self._tasks, task + 1)
        return task

    def _clock(self, task: int) -> Clock:
        """The clock of a task, which has come to the present entry."""
        clock = self._clocks.get(task)
        if clock is None or len(clock) < self._tasks:
            clock = np.zeros(0, np.int64) if clock is None else clock
            clock = self._clocks[task] = np.pad(clock, (0, self._tasks - len(clock)))
        clock[task] = self._now
        return clock

    def _learn(self, task: int, other: Clock) -> None:
        clock = self._clock(task)
        np.maximum(clock[: len(other)], other, out=clock[: len(other)])

    def _fork(self, rank: int, entry: Fork) -> None:
        self._launches[rank] = entry
        tasks = [self._task(rank, slot) for slot in range(1 + entry.programs)]
        host = self._clock(tasks[HOST])
        for task in tasks[1:]:
            self._clocks[task] = host.copy()

    def _join(self, rank: int) -> None:
        host = self._task(rank, HOST)
        for slot in range(1, 1 + self._launches.pop(rank).programs):
            self._learn(host, self._clock(self._task(rank, slot)))
        # Nothing that this launch did to local memory can meet a later access.
        for words in [key for key in self._words if key[:2] == (LOCAL, rank)]:
            del self._words[words]
        if rank == self._rank:
            for chunk in [key for key in self._chunks if key[0] == LOCAL]:
                del self._chunks[chunk]

    def _meet(self, rank: int, entry: Arrive | Depart) -> None:
        host = self._task(rank, HOST)
        key = (entry.group, entry.epoch)
        clock, left = self._meetings.get(key, (np.zeros(0, np.int64), 0))
        if isinstance(entry, Arrive):
            mine = self._clock(host)
            both = mine.copy()
            np.maximum(both[: len(clock)], clock, out=both[: len(clock)])
            self._meetings[key] = (both, left)
            return
        self._learn(host, clock)
        self._meetings[key] = (clock, left + 1)
        if left + 1 == entry.size:
            del self._meetings[key]

    def _atomic(self, rank: int, entry: Atomic) -> None:
        task = self._task(rank, entry.slot)
        words, at = self._place(rank, entry)
        history = words.get(at, [])
        seen = history[-1][1] if history else {}
        if entry.acquires:
            for viewer in (rank, None) if entry.system else (rank,):
                if viewer in seen:
                    self._learn(task, seen[viewer])
        if entry.releases:
            seen = dict(seen)
            for viewer in (rank, None) if entry.system else (rank,):
                mine = self._clock(task).copy()
                old = seen.get(viewer, mine)
                np.maximum(mine[: len(old)], old, out=mine[: len(old)])
                seen[viewer] = mine
        words[at] = [*history[-_KEPT:], (entry.value, seen)]

    def _place(self, rank: int, entry: Atomic | Wait) -> tuple[dict[int, History], int]:
        """The words of a chunk, and the place of one of them."""
        chunk, at = divmod(entry.offset, _CHUNK)
        return self._words.setdefault((*_space(rank, entry.owner), chunk), {}), at

    def _overwrite(self, rank: int, entry: Access) -> None:
        """What a plain store replaces is no release any more."""
        for chunk, index in _by_chunk(entry.starts, entry.stops):
            words = self._words.get((*_space(rank, entry.owner), chunk), {})
            if words:
                gone = np.zeros(_CHUNK, bool)
                gone[index] = True
                for at in [at for at in words if gone[at]]:
                    del words[at]

    def _wait(self, rank: int, entry: Wait) -> None:
        """See NOTE [What is proved]."""
        words, at = self._place(rank, entry)
        for value, seen in words.get(at, ()):
            if (value - entry.epoch) & 0xFFFFFFFF < 1 << 31:
                for viewer in (rank, None):
                    if viewer in seen:
                        self._learn(self._task(rank, entry.slot), seen[viewer])
                return

    def _access(self, rank: int, entry: Access) -> Iterator[Race]:
        """Compare with the last accesses to the same bytes, and become one of them."""
        if entry.owner != self._rank and (entry.owner != LOCAL or rank != self._rank):
            return
        task = self._task(rank, entry.slot)
        clock = self._clock(task)
        launch = self._launches.get(rank) if entry.slot else None
        side = self._sides[self._now] = Side(rank, entry.slot, entry.kind, entry.where, launch)
        for chunk, index in _by_chunk(entry.starts, entry.stops):
            table = self._chunks.setdefault((entry.owner, chunk), {})
            for (kind, other), last in table.items():
                if other == task or not _conflict(entry.kind, kind, other % self._world == rank):
                    continue
                before = last[index]
                late = before > (clock[other] if other < len(clock) else 0)
                if late.any():
                    yield self._race(entry.owner, chunk, index, before, late, side)
            key = (entry.kind, task)
            if key not in table:
                table[key] = np.zeros(_CHUNK, np.int64)
            table[key][index] = self._now

    def _race(
        self,
        owner: int,
        chunk: int,
        index: "slice | np.ndarray",
        before: np.ndarray,
        late: np.ndarray,
        side: Side,
    ) -> Race:
        bytes_ = np.arange(_CHUNK)[index][late] + chunk * _CHUNK
        sides = [self._sides[int(before[late][0])], side]
        both = all(one.launch for one in sides)
        # What was meant to come first: of one launch, or where that is not known, the change.
        sides.sort(key=lambda one: (both and one.number, one.kind not in _CHANGES))
        return Race(owner, int(bytes_[0]), int(bytes_[-1]) + 1, *sides)


def _ticketed(rank: int, log: Sequence[Entry]) -> Iterator[tuple[int, int, Entry]]:
    """The entries of a log, each with the last ticket that its rank had drawn by then."""
    ticket = 0
    for entry in log:
        ticket = getattr(entry, "ticket", 0) or ticket
        yield ticket, rank, entry


def _space(rank: int, owner: int) -> tuple[int, int]:
    """A memory: each rank has its own local one."""
    return owner, rank if owner == LOCAL else 0


def _conflict(kind: str, other: str, same_rank: bool) -> bool:
    """Whether accesses of these kinds, by two tasks, must be ordered."""
    if kind not in _CHANGES and other not in _CHANGES:
        return False
    if kind in _ATOMICS and other in _ATOMICS:
        return not same_rank and ATOMIC_HERE in (kind, other)
    return True


def _by_chunk(starts: np.ndarray, stops: np.ndarray) -> Iterator[tuple[int, "slice | np.ndarray"]]:
    """Split ranges of bytes by chunk: its number, and which of its bytes."""
    if len(starts) == 1:
        start, stop = int(starts[0]), int(stops[0])
        while start < stop:
            chunk, at = divmod(start, _CHUNK)
            end = min(stop, (chunk + 1) * _CHUNK)
            yield chunk, slice(at, at + end - start)
            start = end
        return
    index = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])
    chunks = index // _CHUNK
    for chunk in np.unique(chunks):
        yield int(chunk), index[chunks == chunk] % _CHUNK
