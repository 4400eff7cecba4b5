"""Writes down, on one CPU rank, every access to the heap and what orders it with others."""

import linecache
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
import triton
from triton._C.libtriton import interpreter as native

from iris.check.log import HOST, LOCAL, Access, Arrive, Atomic, Depart, Entry, Fork, Join, Wait
from iris.errors import TimeoutError

_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
_LIBRARIES = tuple(f"{Path(str(library.__file__)).parent}/" for library in (torch, triton))
_DEVICE = (_PACKAGE + "device/", _PACKAGE + "check/", *_LIBRARIES)
_LOCK_SECONDS = 60.0


class Tickets:
    """One counter of the world: ``lock, next ticket`` at ``address``, int64 words all can reach."""

    def __init__(self, address: int) -> None:
        self._lock = np.array([address], np.uint64)
        self._next = np.array([address + 8], np.uint64)

    @contextmanager
    def drawn(self) -> Iterator[int]:
        """Draw a ticket. No other rank draws one meanwhile: what is done inside has its place."""
        self._take()
        try:
            one, whole = np.array([1]), np.array([True])
            yield 1 + int(native.atomic_rmw(_ADD, self._next, one, whole, _ORDERED)[0])
        finally:
            native.atomic_rmw(_PUT, self._lock, np.array([0]), np.array([True]), _ORDERED)

    def _take(self) -> None:
        free, taken = np.array([0]), np.array([1])
        deadline = time.monotonic() + _LOCK_SECONDS
        while native.atomic_cas(self._lock, free, taken, _ORDERED)[0] != 0:
            os.sched_yield()
            if time.monotonic() > deadline:
                raise TimeoutError("IRIS_CHECK: a rank died while it held the lock of the log")


_ADD, _PUT, _ORDERED = (native.RMW_OP.ADD, native.RMW_OP.XCHG, native.MEM_SEMANTIC.ACQUIRE_RELEASE)


class Recorder:
    """The log of this rank. ``slabs[rank]`` is where that rank's heap is mapped here, and its end.

    ``slot`` is the task that runs. Accesses to ``hidden`` bytes of any heap are left out, and those
    to ``elsewhere``, addresses of memory that a thread of the host orders.
    """

    def __init__(
        self, slabs: Sequence[tuple[int, int]], tickets: Tickets, hidden: tuple[int, int]
    ) -> None:
        self.slot = HOST
        self.muted = False
        self._order = sorted(range(len(slabs)), key=lambda rank: slabs[rank])
        self._bases = np.array([slabs[rank][0] for rank in self._order], np.int64)
        self._ends = np.array([slabs[rank][1] for rank in self._order], np.int64)
        self._tickets = tickets
        self._hidden = hidden
        self.elsewhere = (0, 0)
        self._entries: list[Entry] = []
        self._launches = 0

    def take(self) -> list[Entry]:
        """Return what was written down, and begin again."""
        entries, self._entries = self._entries, []
        return entries

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Leave out what happens inside."""
        before, self.muted = self.muted, True
        try:
            yield
        finally:
            self.muted = before

    def touch(self, kind: str, addresses: np.ndarray, size: int) -> None:
        """Note an access to ``size`` bytes at each of ``addresses``."""
        if self.muted or not addresses.size:
            return
        at = np.sort(addresses, axis=None).astype(np.int64)
        ends = np.flatnonzero(np.diff(at) > size)
        starts = at[np.concatenate(([0], ends + 1))]
        stops = at[np.concatenate((ends, [-1]))] + size
        self.touch_ranges(kind, starts, stops)

    def touch_ranges(self, kind: str, starts: np.ndarray, stops: np.ndarray) -> None:
        """Note an access to bytes ``starts[i] .. stops[i]``."""
        noted = (starts < self.elsewhere[0]) | (starts >= self.elsewhere[1])
        starts, stops = starts[noted], stops[noted]
        places = np.searchsorted(self._bases, starts, side="right") - 1
        places[(places >= 0) & (starts >= self._ends[places])] = LOCAL
        where = _line()
        for place in np.unique(places):
            mine = places == place
            owner, base = self._owner(int(place))
            if self.slot == HOST and owner == LOCAL:
                continue
            a, b = starts[mine] - base, stops[mine] - base
            if owner != LOCAL:
                seen = (a < self._hidden[0]) | (a >= self._hidden[1])
                a, b = a[seen], b[seen]
            if len(a):
                self._entries.append(Access(kind, self.slot, owner, a, b, where))

    def _owner(self, place: int) -> tuple[int, int]:
        return (LOCAL, 0) if place < 0 else (self._order[place], int(self._bases[place]))

    def _place(self, address: int) -> tuple[int, int]:
        """Owner of an address, and the offset there."""
        place = int(np.searchsorted(self._bases, address, side="right")) - 1
        if place >= 0 and address >= self._ends[place]:
            place = -1
        owner, base = self._owner(place)
        return owner, address - base

    @contextmanager
    def ordered(self, addresses: np.ndarray) -> Iterator[int]:
        """Around an atomic on ``addresses``: a ticket, or 0 where no other rank can see them."""
        ranks = np.searchsorted(self._bases, addresses, side="right")
        if self.muted or not ranks.any():
            yield 0
            return
        with self._tickets.drawn() as ticket:
            yield ticket

    def change(
        self,
        ticket: int,
        addresses: np.ndarray,
        values: np.ndarray,
        size: int,
        *,
        acquires: bool,
        releases: bool,
        system: bool,
    ) -> None:
        """Note atomics that left ``values`` at ``addresses``."""
        if self.muted:
            return
        where = _line()
        for address, value in zip(addresses.tolist(), values.tolist(), strict=True):
            owner, offset = self._place(address)
            if owner != LOCAL and self._hidden[0] <= offset < self._hidden[1]:
                continue
            number = int(value)
            entry = Atomic(
                ticket, self.slot, owner, offset, size, number, acquires, releases, system, where
            )
            self._entries.append(entry)

    def waited(self, pointer: Any, epoch: Any, mask: Any) -> None:
        """Note that this program's wait for ``epoch`` at its flags has ended."""
        addresses = pointer.handle.data
        epochs, valid = (
            np.broadcast_to(_plain(value), addresses.shape).ravel().tolist()
            for value in (epoch, True if mask is None else mask)
        )
        size = pointer.dtype.element_ty.primitive_bitwidth // 8
        where = _line()
        with self._tickets.drawn() as ticket:
            for address, goal, there in zip(addresses.ravel().tolist(), epochs, valid, strict=True):
                if there:
                    owner, offset = self._place(address)
                    entry = Wait(ticket, self.slot, owner, offset, size, int(goal), where)
                    self._entries.append(entry)

    def fork(self, programs: int, kernel: str) -> None:
        """Note that the programs of a launch start."""
        self._launches += 1
        self._entries.append(Fork(programs, kernel, self._launches, _call()))

    def join(self) -> None:
        """Note that all programs of the launch have ended."""
        self._entries.append(Join())

    def arrive(self, group: int, epoch: int) -> None:
        """Note that the host comes to a meeting of a group."""
        if not self.muted:
            with self._tickets.drawn() as ticket:
                self._entries.append(Arrive(ticket, group, epoch))

    def depart(self, group: int, epoch: int, size: int) -> None:
        """Note that the host has met all ``size`` members."""
        if not self.muted:
            with self._tickets.drawn() as ticket:
                self._entries.append(Depart(ticket, group, epoch, size))


def _plain(value: Any) -> Any:
    """A kernel's value as numpy has it."""
    return value.handle.data if hasattr(value, "handle") else getattr(value, "value", value)


_lines: dict[tuple[CodeType, int], str] = {}  # "" for code that is not what made an access


def _line() -> str:
    """``file.py:line`` of the code that made the access: a kernel's or the user's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        key = frame.f_code, frame.f_lineno
        if key not in _lines:
            path = frame.f_code.co_filename
            _lines[key] = (
                "" if path.startswith(_DEVICE) else f"{os.path.basename(path)}:{frame.f_lineno}"
            )
        if _lines[key]:
            return _lines[key]
        frame = frame.f_back
    return "?"


def _call() -> str:
    """The step of the program that launches, or the user's line that does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if name.startswith("<iris "):
            step = linecache.getline(name, frame.f_lineno).strip()
            return f"step `{' '.join(step.split())}` of {code.co_name}"
        if not name.startswith((_PACKAGE, *_LIBRARIES)):
            return f"called at {os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
