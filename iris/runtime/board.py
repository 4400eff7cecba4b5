"""The board: one small shared segment a rank, on which it tells its peers how far it is.

NOTE [One writer a word]
Every word has one writing rank, so no atomic read-modify-write is needed. Words are 8-byte
aligned and read whole. What a word announces is written before the word. On x86-64 stores become
visible in order; elsewhere ``fence`` makes it so (the kernel's scheduler passes a full memory
barrier, which is the cheapest one that Python reaches).
"""

import os
import platform
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from iris.errors import RESET, IrisError, PeerError, TimeoutError
from iris.runtime.segments import Address, Segment

if TYPE_CHECKING:
    from iris.check.recorder import Recorder
    from iris.runtime.groups import Group

SLOTS = 512
WHAT_BYTES = 1024
CHUNK_BYTES = 8192
_MESSAGE_BYTES = 8192
_HEADER_BYTES = 16384
_HALF_BYTES = WHAT_BYTES + 8 + CHUNK_BYTES
CALLS = 1024  # so many calls back a member is known: more launches do not wait on a GPU
_SLOT_BYTES = 64 + 2 * _HALF_BYTES + 8 * CALLS

OPEN, CLOSED, FAILED, LOST = range(4)  # LOST: gave up waiting, and may be reset
# Words of a page: `Iris.reset` calls so far; found slow by its watchdog; which logged that.
RESETS, SLOW, TOLD = 0, 1, 2
_STATUS_BYTES = 2048
_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")


def fence() -> None:
    """Make earlier writes visible before later ones (see NOTE [One writer a word])."""
    if not _ORDERED_STORES:
        os.sched_yield()


class Slot:
    """One rank's place in one group: two epoch words, for each parity a text and a mailbox, and
    the rank's last calls.

    ``words[parity]`` is ``tag << 32 | epoch``; half ``parity`` of the rest belongs to that epoch.
    ``calls[n % CALLS]`` is call number n: see NOTE [Calls] in `iris.runtime.groups`.
    """

    def __init__(self, segment: Segment, index: int) -> None:
        view = memoryview(segment.memory)
        start = _HEADER_BYTES + index * _SLOT_BYTES
        self.words = view[start + 8 : start + 24].cast("Q")
        self._halves = [
            view[start + 64 + p * _HALF_BYTES : start + 64 + (p + 1) * _HALF_BYTES] for p in (0, 1)
        ]
        end = start + _SLOT_BYTES
        self.calls = view[end - 8 * CALLS : end].cast("Q")

    def renew(self) -> None:
        """Start again at epoch 0."""
        self.words[0] = self.words[1] = 0
        self.calls[:] = memoryview(bytes(8 * CALLS)).cast("Q")

    def write_what(self, parity: int, what: str) -> None:
        data = what.encode()[:WHAT_BYTES].ljust(WHAT_BYTES, b"\0")
        self._halves[parity][:WHAT_BYTES] = data

    def read_what(self, parity: int) -> str:
        return bytes(self._halves[parity][:WHAT_BYTES]).rstrip(b"\0").decode(errors="replace")

    def post(self, parity: int, total: int, chunk: bytes | memoryview) -> None:
        """Put one chunk of a message of ``total`` bytes into the mailbox."""
        half = self._halves[parity]
        struct.pack_into("<q", half, WHAT_BYTES, total)
        half[WHAT_BYTES + 8 : WHAT_BYTES + 8 + len(chunk)] = chunk

    def fetch(self, parity: int, at: int) -> tuple[int, bytes]:
        """Return the message's length and its chunk that starts at byte ``at``."""
        half = self._halves[parity]
        (total,) = struct.unpack_from("<q", half, WHAT_BYTES)
        length = max(0, min(CHUNK_BYTES, total - at))
        return total, bytes(half[WHAT_BYTES + 8 : WHAT_BYTES + 8 + length])


class Page:
    """One rank's segment: its state, its last words, and its table of slots."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        view = memoryview(segment.memory)
        self._state = view[:16].cast("Q")  # state, number of slots in use
        self._keys = view[64 : 64 + 8 * SLOTS].cast("Q")
        self.words = view[16:40].cast("q")
        self._status = view[64 + 8 * SLOTS : 64 + 8 * SLOTS + _STATUS_BYTES]
        self._message = view[_HEADER_BYTES - _MESSAGE_BYTES : _HEADER_BYTES]

    @classmethod
    def create(cls) -> "Page":
        return cls(Segment.create(_HEADER_BYTES + SLOTS * _SLOT_BYTES, "board"))

    @property
    def state(self) -> int:
        return self._state[0]

    @property
    def message(self) -> str:
        return bytes(self._message).rstrip(b"\0").decode(errors="replace")

    def tell(self, message: str) -> None:
        """Leave a message for peers."""
        self._message[:] = message.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
        fence()

    def leave(self, state: int, message: str = "") -> None:
        """Tell peers that this rank will not answer any more. The first reason stands."""
        if self.state == OPEN:
            if not self.message:
                self.tell(message)
            self._state[0] = state

    @property
    def status(self) -> str:
        """Where the rank was when its watchdog last looked."""
        return bytes(self._status).rstrip(b"\0").decode(errors="replace")

    @status.setter
    def status(self, text: str) -> None:
        self._status[:] = text.encode()[:_STATUS_BYTES].ljust(_STATUS_BYTES, b"\0")

    def find(self, key: int) -> Slot | None:
        """Return the slot that the page's rank opened for the group with this key, if it did."""
        for index in range(self._state[1]):
            if self._keys[index] == key:
                return Slot(self.segment, index)
        return None

    def claim(self, key: int) -> Slot:
        """Open a slot for a group (own page only)."""
        found = self.find(key)
        if found is not None:
            return found
        index = self._state[1]
        if index == SLOTS:
            raise IrisError(
                f"this context has {SLOTS} groups already",
                help="use groups again, or close contexts that are no longer used",
            )
        self._keys[index] = key
        fence()
        self._state[1] = index + 1
        return Slot(self.segment, index)

    def renew(self) -> None:
        """Start again at epoch 0 in every group, as if nothing had failed."""
        self._message[:] = bytes(_MESSAGE_BYTES)
        for index in range(self._state[1]):
            Slot(self.segment, index).renew()
        self._state[0] = OPEN


@dataclass(frozen=True)
class Contact:
    """How one rank reaches another. ``started`` tells its process from a later namesake."""

    rank: int
    pid: int
    started: str
    address: Address


class Board:
    """All ranks' pages as this rank sees them, and whether the processes behind them still live."""

    def __init__(self, rank: int, page: Page) -> None:
        self.rank = rank
        self.page = page
        self.pid = os.getpid()
        self.closed = False
        self.pages: dict[int, Page] = {rank: page}
        self.alarm: Callable[[str], None] | None = None  # ends the kernels of all ranks
        self.observer: Recorder | None = None  # of the meetings of all groups
        self.recent: Group | None = None  # the group of this rank's last call
        self.waiting = ""  # what the host waits for, if not just since now
        self.contact = Contact(rank, self.pid, start_time(self.pid), page.segment.address)
        self._contacts: dict[int, Contact] = {rank: self.contact}

    def connect(self, contacts: list[Contact]) -> None:
        """Open every peer's page. Raises ``PeerError`` naming a peer that is already gone."""
        for contact in contacts:
            if contact.rank == self.rank:
                continue
            self._contacts[contact.rank] = contact
            if self._is_dead(contact.rank):
                raise PeerError(f"rank {contact.rank} (pid {contact.pid}) died in start-up")
            self.pages[contact.rank] = Page(Segment.open(contact.address, f"rank {contact.rank}"))

    def loss(self, rank: int) -> str | None:
        """Say how ``rank`` was lost (it failed or died), or None."""
        if rank == self.rank:
            return None
        page = self.pages[rank]
        if page.state == FAILED:
            return f"rank {rank} failed: {page.message}"
        if page.state == OPEN and self._is_dead(rank):
            return f"rank {rank} (pid {self._contacts[rank].pid}) died"
        return None

    def trouble(self, rank: int) -> str | None:
        """Say why ``rank`` will not answer any more, or None if it may."""
        if self.pages[rank].state == LOST:
            return f"rank {rank} gave up: {self.pages[rank].message}"
        if rank != self.rank and self.pages[rank].state == CLOSED:
            return f"rank {rank} closed its context"
        return self.loss(rank)

    def check_peers(self, what: str, ranks: Iterable[int]) -> None:
        """Raise ``PeerError`` if one of ``ranks``, which are to come to ``what``, never will."""
        reasons = [text for rank in ranks if (text := self.trouble(rank)) is not None]
        if reasons:
            waiting = f"\n  rank {self.rank} was waiting for it in: {what}"
            raise PeerError("; ".join(reasons) + waiting)

    def wait_until_alone(self, seconds: float) -> None:
        """Wait until every peer has left, for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        peers = [rank for rank in self.pages if rank != self.rank]
        while time.monotonic() < deadline and any(self.trouble(rank) is None for rank in peers):
            time.sleep(0.005)

    def _is_dead(self, rank: int) -> bool:
        contact = self._contacts[rank]
        return start_time(contact.pid) != contact.started

    def check_open(self) -> None:
        """Refuse to work in a process forked after the context was made, and when it is closed."""
        if os.getpid() != self.pid:
            raise IrisError(
                f"this iris context belongs to process {self.pid}, and this is a fork of it "
                f"(process {os.getpid()})",
                help="start ranks with iris.launch or torchrun; fork helpers before iris.iris()",
            )
        if self.closed:
            raise IrisError("this iris context is closed", help="create one with iris.iris()")

    def check_usable(self) -> None:
        """Refuse to work also after a lost wait."""
        self.check_open()
        if self.page.state == LOST:
            raise TimeoutError(
                "a wait of this context has run out before, and ranks are out of step since\n"
                + self.page.message,
                help=RESET,
            )

    def give_up(self, message: str) -> None:
        """Tell peers that a wait of this rank has run out."""
        if self.page.state == OPEN:
            self.page.tell(message)
            self.page.leave(LOST)

    def leave(self, state: int, message: str = "") -> None:
        """Tell peers that this rank will not answer any more, and why. The first reason stands."""
        if os.getpid() == self.pid:
            self.page.leave(state, message)


def start_time(pid: int) -> str:
    """Return when a running process started, in ticks; "" for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
