"""Groups of ranks: the host barrier that everything else is built on, and messages over it.

NOTE [Staging parity]
Everything a group shares is kept twice, by the parity of the epoch. A rank writes for epoch e + 2
only after it saw every member publish e + 1, and a member publishes e + 1 only when it has
finished reading e. So no second barrier is needed after reading.

NOTE [Calls]
A replayed program meets nobody on the host. So each rank writes down for its peers, call by call,
which program it runs (``launch``), and which meetings it is in, under one number: meetings so far
plus launches so far. The later of two ranks to come to a number sees what the earlier one did
there. Where that is not the same, it ends the kernels of all ranks and says so on all.
"""

import hashlib
import os
import pickle
import struct
import time
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from iris import config
from iris.errors import (
    RESET,
    SAME_CALLS,
    TRACE_FIRST,
    CollectiveMismatchError,
    IrisError,
    PeerError,
    TimeoutError,
)
from iris.runtime.board import CALLS, CHUNK_BYTES, CLOSED, LOST, Board, Slot, fence

if TYPE_CHECKING:
    from iris.runtime.heap import Block, Heap

T = TypeVar("T")

_LOW = 0xFFFFFFFF
_NUMBER, _LAUNCH = 0x7FFFFFFF, 1 << 32  # of a call; a launch, not a meeting
_SPINS = 400  # yields before the first sleep: about 100 us on an idle core
_CHECK_SECONDS = 0.01


@dataclass(frozen=True)
class Staging:
    """Two equal buffers on every member's heap, one a parity (see NOTE [Staging parity])."""

    block: "Block"
    nbytes: int

    def local(self, parity: int) -> Tensor:
        """Return this rank's buffer as uint8[nbytes]."""
        return self.block.tensor[parity * self.nbytes : (parity + 1) * self.nbytes]

    def peer(self, index: int, parity: int) -> Tensor:
        """Return the buffer of member ``index`` as uint8[nbytes], mapped here."""
        return self.block.peer(index)[parity * self.nbytes : (parity + 1) * self.nbytes]


class Group:
    """Some ranks of the world, in an order of their own; every method is collective over them.

    Groups are isolated from each other: a rank may be in many, and waits in one are never met by
    calls in another.

    Example::

        pair = ctx.group([0, 2])
        pair.sync("before the update")
        names = pair.exchange_object("names", socket.gethostname())
    """

    def __init__(self, board: Board, heap: "Heap | None", ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.index = self.ranks.index(board.rank)
        self.key = _key(self.ranks)
        self.epoch = 0
        self.heap = heap
        self.board = board
        self._slot = board.page.claim(self.key)
        self._slots: list[Slot | None] = [None] * self.size
        self._slots[self.index] = self._slot
        self._said = ["", ""]
        self._staging: Staging | None = None
        self._launches, self._calls = 0, self._slot.calls
        self._peers: list[memoryview] = []  # the members' calls
        self._texts: dict[int, str] = {}
        self.kept: dict[Hashable, Any] = {}  # what callers build once for this group

    def __repr__(self) -> str:
        return f"Group(ranks={self.ranks}, epoch={self.epoch})"

    def sync(self, what: str) -> int:
        """Wait until every member has called ``sync`` with this text; return the new epoch.

        Raises on every member ``CollectiveMismatchError`` where the texts differ (the group stays
        usable), ``PeerError`` where a member died, closed or failed, and ``TimeoutError`` after
        ``IRIS_TIMEOUT`` seconds; each quotes ``what``.
        """
        return self._sync(zlib.crc32(what.encode()), what)

    def _sync(self, tag: int, what: str) -> int:
        self.board.check_usable()
        epoch = self.epoch + 1
        parity = epoch & 1
        if self._said[parity] != what:
            self._slot.write_what(parity, what)
            self._said[parity] = what
        word = tag << 32 | (epoch & _LOW)
        observer = self.board.observer
        if observer is not None:
            observer.arrive(self.key, epoch)
        fence()
        self._slot.words[parity] = word
        self._write_call(tag, what)
        agreed = True
        for index, slot in enumerate(self._slots):
            if slot is None or slot.words[parity] != word:
                agreed &= self._wait(index, parity, word, what)
        fence()
        self.epoch = epoch
        if observer is not None:
            observer.depart(self.key, epoch, self.size)
        if not agreed:
            raise self._mismatch(parity)
        return epoch

    def know(self, text: str) -> int:
        """Return the 32-bit signature of a program to ``launch``; members know its text too."""
        signature = zlib.crc32(text.encode())
        self._texts[signature] = text
        return signature

    def launch(self, signature: int) -> int:
        """Note that this rank starts a program of all members, which meet on their devices; return
        the number of this launch.

        Raises ``CollectiveMismatchError`` where a member came to this call with another one.
        """
        board = self.board
        if board.page.state or os.getpid() != board.pid:
            board.check_usable()
        board.recent = self
        self._launches += 1
        number = (self.epoch + self._launches) & _NUMBER
        place, word = number % CALLS, number << 33 | _LAUNCH | signature
        self._calls[place] = word
        for calls in self._peers or self._find_peers():
            seen = calls[place]  # read once: the member may be writing it now
            if seen != word and seen >> 33 == number:
                raise self._quarrel(number)
        return self._launches

    def exchange(self, what: str, payload: bytes) -> list[bytes]:
        """Return every member's payload, in group order. Payloads may differ in length."""
        tag = zlib.crc32(b"exchange:" + what.encode())
        parts: list[list[bytes]] = [[] for _ in range(self.size)]
        longest, at = 1, 0
        while at < longest:
            parity = (self.epoch + 1) & 1
            self._slot.post(parity, len(payload), payload[at : at + CHUNK_BYTES])
            self._sync(tag, what)
            for slot, part in zip(self._slots, parts, strict=True):
                assert slot is not None  # sync has met every member
                total, chunk = slot.fetch(parity, at)
                part.append(chunk)
                longest = max(longest, total)
            at += CHUNK_BYTES
        return [b"".join(part) for part in parts]

    def exchange_object(self, what: str, obj: T) -> list[T]:
        """Return every member's object, in group order; they are pickled."""
        return [pickle.loads(data) for data in self.exchange(what, pickle.dumps(obj))]

    def staging(self, nbytes: int) -> Staging:
        """Return two symmetric buffers of at least ``nbytes`` each.

        Collective when they must grow; they never shrink.
        """
        if self._staging is None or self._staging.nbytes < nbytes:
            if self.heap is None:
                raise IrisError("this group has no heap")
            size = max(256, 1 << (nbytes - 1).bit_length())
            self._staging = Staging(self.heap.allocate(2 * size, self), size)
        return self._staging

    def renew(self) -> None:
        """Start again at epoch 0, when no member is in any wait (see ``RankPool``)."""
        self.epoch = self._launches = 0
        self._said = ["", ""]

    def _write_call(self, signature: int, text: str) -> None:
        """Note that this rank comes to a meeting."""
        self.board.recent = self
        number = (self.epoch + 1 + self._launches) & _NUMBER
        self._texts[signature] = text
        self._slot.calls[number % CALLS] = number << 33 | signature

    def last_call(self) -> str:
        """Say which call of this group was this rank's last one."""
        done = self.epoch + self._launches
        words = [self._slot.calls[(done + more) % CALLS] for more in (0, 1)]
        number, signature = max((word >> 33, word & _LOW) for word in words)
        return f"call {number} of ranks {self.ranks}, {self._texts.get(signature, 'a meeting')}"

    def deserted(self) -> str:
        """Say which member closed its context before the launch that this rank came to last.

        "" if none did.
        """
        number = (self.epoch + self._launches) & _NUMBER
        if self._calls[number % CALLS] >> 32 != number << 1 | 1:
            return ""  # a meeting, which looks after its members itself
        for rank in self.ranks:
            page = self.board.pages[rank]
            if rank == self.board.rank or page.state != CLOSED:
                continue
            slot = page.find(self.key)
            reached = 0 if slot is None else slot.calls[number % CALLS] >> 33
            if (reached - number) & _NUMBER > _NUMBER // 2:
                return f"rank {rank} closed its context and did not come to {self.last_call()}"
        return ""

    def _find_peers(self) -> list[memoryview]:
        pages = [self.board.pages[rank] for rank in self.ranks if rank != self.board.rank]
        peers = [slot.calls for page in pages if (slot := page.find(self.key)) is not None]
        if len(peers) == len(pages):
            self._peers = peers
        return peers

    def _quarrel(self, number: int) -> CollectiveMismatchError:
        """Tell all ranks that members are in different calls under one number."""
        slots = [self.board.pages[rank].find(self.key) for rank in self.ranks]
        calls = [self._call_text(slot, number) for slot in slots]
        lines = [f"  rank {rank}: {call}" for rank, call in zip(self.ranks, calls, strict=True)]
        text = _DIFFERENT + "\n" + "\n".join(lines)
        if self.board.alarm is not None:
            self.board.alarm(text)
        return CollectiveMismatchError(text, help=TRACE_FIRST)

    def _call_text(self, slot: Slot | None, number: int) -> str:
        word = 0 if slot is None else slot.calls[number % CALLS]
        if slot is None or word >> 33 != number:
            return "not there yet"
        signature = word & _LOW
        meetings = [slot.read_what(p) for p in (0, 1) if slot.words[p] >> 32 == signature]
        return self._texts.get(signature) or "".join(meetings[:1]) or "another call"

    def _wait(self, index: int, parity: int, word: int, what: str) -> bool:
        """Wait for one member to publish this epoch. Return whether its tag is the same."""
        for _ in range(_SPINS):
            seen = self._seen(index, parity)
            if (seen ^ word) & _LOW == 0:
                return seen == word
            os.sched_yield()
        epochs = f"epoch expected {word & _LOW}, seen {self._reached(index)}"
        self.board.waiting = f"waits in {what}, for rank {self.ranks[index]} ({epochs})"
        try:
            return self._wait_long(index, parity, word, what)
        finally:
            self.board.waiting = ""

    def _wait_long(self, index: int, parity: int, word: int, what: str) -> bool:
        started = checked = time.monotonic()
        while ((seen := self._seen(index, parity)) ^ word) & _LOW:
            now = time.monotonic()
            time.sleep(min(1e-3, 5e-5 + (now - started) / 100))
            if now - checked > _CHECK_SECONDS:
                checked = now
                self._check(parity, word, what, now - started)
        return seen == word

    def _seen(self, index: int, parity: int) -> int:
        slot = self._slots[index]
        if slot is None:
            slot = self._slots[index] = self.board.pages[self.ranks[index]].find(self.key)
        return 0 if slot is None else slot.words[parity]

    def _check(self, parity: int, word: int, what: str, waited: float) -> None:
        # A peer may publish and then leave: look at its state first and at its word after that.
        troubles = {rank: self.board.trouble(rank) for rank in self.ranks}
        missing = [
            rank
            for index, rank in enumerate(self.ranks)
            if (self._seen(index, parity) ^ word) & _LOW
        ]
        number = (self.epoch + 1 + self._launches) & _NUMBER
        if any(calls[number % CALLS] >> 32 == number << 1 | 1 for calls in self._find_peers()):
            raise self._quarrel(number)
        for rank in missing:
            if self.board.pages[rank].state == LOST:
                raise self._give_up(parity, self.board.pages[rank].message, RESET)
        reasons = [text for rank in missing if (text := troubles[rank]) is not None]
        me = self.board.rank
        if reasons:
            raise PeerError("; ".join(reasons) + f"\n  rank {me} was waiting for it in: {what}")
        if missing and waited > config.timeout():
            seen = ", ".join(str(self._reached(self.ranks.index(rank))) for rank in missing)
            raise self._give_up(
                parity,
                f"{what}: rank {me} waited {waited:.1f} s for {names(missing)}\n"
                f"  epoch: expected {word & _LOW}, seen {seen}",
                "every rank must make the same calls in the same order; "
                f"raise IRIS_TIMEOUT (now {config.timeout():g} s) if they are only slow; "
                "go on with ctx.reset()",
            )

    def _give_up(self, parity: int, text: str, help: str) -> TimeoutError:
        """Take back that this rank has come, so that nobody goes on without it."""
        self._slot.words[parity] = 0
        self.board.give_up(text)
        return TimeoutError(text, help)

    def _reached(self, index: int) -> int:
        """The last meeting that a member has come to."""
        self._seen(index, 0)
        slot = self._slots[index]
        return 0 if slot is None else max(slot.words[0] & _LOW, slot.words[1] & _LOW)

    def _mismatch(self, parity: int) -> CollectiveMismatchError:
        calls = [slot.read_what(parity) for slot in self._slots if slot]  # sync has met them all
        lines = [f"  rank {rank}: {call}" for rank, call in zip(self.ranks, calls, strict=True)]
        return CollectiveMismatchError(
            _DIFFERENT + "\n" + "\n".join(lines), help=SAME_CALLS, calls=calls
        )


_DIFFERENT = "ranks of one group are in different calls"


def names(ranks: Sequence[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"


def _key(ranks: Sequence[int]) -> int:
    """Return a number other than 0 that is different for different rank tuples."""
    packed = struct.pack(f"<{len(ranks)}q", *ranks)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") or 1
