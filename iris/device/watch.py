"""The host's side of bounded waits: where a kernel that waited too long says for whom.

NOTE [Bounded waits]
Each rank has a record of int64 words on its heap. A wait that runs out claims its rank's record
(``STATE``: 0 -> its claim), writes what it waited for, and sets each other rank's ``STATE``, if it
is still 0, to -(1 + its rank). Every wait looks at its own rank's ``STATE`` now and then and leaves
when it is not 0, so all kernels of all ranks end soon after. A wait that finds ``STATE`` set, at
its start or later, sets a word of pinned host memory: the host finds out by reading it, without a
copy or a synchronisation while all is well. The state stays, for after a lost wait the ranks are
out of step, until all ranks reset theirs together.

A wait that lasts longer than ``SLOW`` says so from then on, look by look, in host memory at
``TELL``: a count of looks, the stage, and the epoch. The host reads the flags to see who is late.

The host ends waits by a store of its own in that memory, which they look at too: the driver takes
no work while another thread of the process is held up by a full stream.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from iris.errors import TRACE_FIRST, CollectiveMismatchError, PeerError, TimeoutError

if TYPE_CHECKING:
    from iris.runtime.board import Board
    from iris.runtime.context import Iris
    from iris.runtime.heap import Block

# Words of the record.
STATE = 0
LIMIT = 1  # nanoseconds a wait may last
HOST = 2  # address of this rank's pinned word, or 0 where the record itself is host memory
STAGE = 3
PEER = 4
EXPECTED = 5
SEEN = 6
RANK = 7
WORLD = 8
TELL = 9  # address of this rank's TOLD words of host memory
SLOW = 10  # nanoseconds from which a wait tells
PEERS = 11  # address of every rank's record, as mapped here

# At TELL: raised (on GPUs), looks, stage, epoch; what the host would have in STATE, or 0.
LOOKS, TOLD_STAGE, TOLD_EPOCH, ABORT, TOLD = 1, 2, 3, 4, 5

# After the addresses: the flags of barriers, int32[SLOTS + GROUPS, world]. Rank r writes column r.
SLOTS = 64  # rows of DeviceContext.barrier
GROUPS = 192  # rows of device_barrier, one a group


class Waiting(Protocol):
    """What has flags that its kernels wait for."""

    def late(self, epoch: int, read: "Callable[[Tensor], list[int]]") -> dict[int, int]:
        """The ranks that have not come to ``epoch``, and where they are."""


class Watch:
    """This rank's record, and the names of what its kernels wait in.

    Kernels get ``watch.record`` and a number from ``watch.stage``; the host calls ``check``
    wherever it looks at results. ``watch.flags`` are this rank's barrier flags.
    """

    def __init__(
        self, block: "Block", record: Tensor, told: Tensor, rank: int, board: "Board"
    ) -> None:
        words = 2 * record.numel()
        self.record = record
        self.flags = block.tensor.view(torch.int32)[words:].view(SLOTS + GROUPS, -1)
        self._block: Block | None = block
        self._told = told.numpy()
        self._raised = self._told if record.is_cuda else record.numpy()
        self._looks = 0
        self.flags_of: WeakValueDictionary[int, Waiting] = WeakValueDictionary()
        self._rank = rank
        self.stages: dict[int, tuple[str, tuple[int, ...]]] = {}  # by number
        self.board = board
        board.alarm = self.alarm
        self._reason: str | None = None
        # Made now: allocating either can wait for a kernel that waits for ``alarm``.
        self._mark = torch.tensor([-1 - rank], pin_memory=record.is_cuda)
        self._stream = torch.cuda.Stream(record.device) if record.is_cuda else None

    @property
    def hidden(self) -> tuple[int, int]:
        """Offsets of the record on every rank's heap: what races there is meant to."""
        return self._block.offset, self._block.offset + self.record.nbytes

    @classmethod
    def create(cls, ctx: "Iris", timeout: float, slow: float) -> "Watch":
        """Allocate and fill the record. Collective over the world; times are in seconds."""
        world = ctx.num_ranks
        nbytes = 8 * (PEERS + world) + 4 * (SLOTS + GROUPS) * world
        block = ctx.heap.allocate(nbytes, internal=True)
        block.tensor.zero_()
        record = block.tensor[: 8 * (PEERS + world)].view(torch.int64)
        on_gpu = record.is_cuda
        told = torch.zeros(TOLD, dtype=torch.int64, pin_memory=on_gpu)
        words = [0] * (PEERS + world)
        words[LIMIT] = round(timeout * 1e9)
        words[HOST] = told.data_ptr() if on_gpu else 0
        words[TELL], words[SLOW] = told.data_ptr(), round(slow * _TELLING * 1e9)
        words[RANK], words[WORLD] = ctx.cur_rank, world
        words[PEERS:] = block.peers
        record.copy_(torch.tensor(words))
        if on_gpu:
            torch.cuda.synchronize(record.device)
        ctx.world.sync("prepare bounded waits")
        return cls(block, record, told, ctx.cur_rank, ctx._board)

    def close(self) -> None:
        """Let go of the heap; what this rank's record said last is kept."""
        self.record, self.flags, self._block = self.record.clone(), self.flags[:0].clone(), None
        if self._stream is None:
            self._raised = self.record.numpy()

    def stage(self, what: str, ranks: Sequence[int], waiting: "Waiting | None" = None) -> int:
        """Return the number, equal on all ranks, of waits in ``what`` among ``ranks``.

        ``waiting`` can tell who is late; it is not kept alive.
        """
        number = zlib.crc32(f"{what}{tuple(ranks)}".encode()) >> 1
        self.stages[number] = (what, tuple(ranks))
        if waiting is not None:
            self.flags_of[number] = waiting
        return number

    def slow_wait(self) -> str:
        """Say what a kernel of this rank waits for, if one is slow; "" if none told since."""
        looks, number, epoch = self._told[LOOKS:ABORT].tolist()
        if looks == self._looks:
            return ""
        self._looks = looks
        what, _ = self.stages.get(number, _UNKNOWN)
        waiting = self.flags_of.get(number)
        late = {} if waiting is None else waiting.late(epoch, self._read)
        ranks = [
            f"rank {rank} (epoch expected {epoch}, seen {seen})" for rank, seen in late.items()
        ]
        return f"waits in {what}, for {', '.join(ranks) or f'epoch {epoch}'}"

    def _read(self, x: Tensor) -> list[int]:
        """Values of ``x`` now, while kernels run."""
        if self._stream is None:
            return x.tolist()
        with torch.cuda.stream(self._stream):
            return x.cpu().tolist()

    def renew(self) -> None:
        """Forget a lost wait, and set barrier flags back, when no rank is in any wait."""
        self._reason = None
        self.record[STATE] = 0
        self._told[ABORT] = 0
        self.flags.zero_()
        if self.record.is_cuda:
            self._told[0] = 0
            torch.cuda.synchronize(self.record.device)

    def check(self, synchronized: bool = False) -> None:
        """Raise ``TimeoutError`` if a wait of any rank ran out, ``PeerError`` after ``abort``.

        Reads one word of host memory, which this rank's next wait sets if another rank's ran out.
        ``synchronized`` says that the device is idle: then the record is looked at too.
        """
        if self._raised[0] == 0 and self._reason is None and not (synchronized and self.record[0]):
            return
        if self.record.is_cuda:
            torch.cuda.synchronize(self.record.device)  # waits end as soon as the state is set
        words = self.record.tolist()
        if words[STATE] < 0 and self._block is not None:
            culprit = -1 - words[STATE]
            words = self._block.peer(culprit)[: 8 * PEERS].view(torch.int64).tolist()
            told = self.board.pages[culprit].message
            if words[STATE] <= 0 and told and self._reason is None:
                raise CollectiveMismatchError(told, help=TRACE_FIRST)
        if words[STATE] <= 0:
            raise PeerError(self._reason or "a rank ended every wait")
        text, help = self._explain(words)
        self.board.give_up(text)
        raise TimeoutError(text, help)

    def abort(self, reason: str) -> None:
        """End every wait on this rank; ``check`` then raises ``PeerError(reason)``.

        For a watchdog that saw a peer lost, and for ``ctx.reset``.
        """
        self._reason = reason
        self._told[ABORT] = -1 - self._rank

    def alarm(self, reason: str) -> None:
        """End every wait on all ranks, of which each then raises ``CollectiveMismatchError``."""
        assert self._block is not None
        self.board.page.tell(reason)
        for rank in range(len(self._block.peers)):
            self._mark_record(self._block.peer(rank)[:8].view(torch.int64))

    def _mark_record(self, state: Tensor) -> None:
        if self._stream is None:
            state.copy_(self._mark)
            return
        with torch.cuda.stream(self._stream):
            state.copy_(self._mark, non_blocking=True)
        self._stream.synchronize()

    def _explain(self, words: list[int]) -> tuple[str, str]:
        """Return the message and the way out for a record."""
        what, ranks = self.stages.get(words[STAGE], _UNKNOWN)
        name = _name(ranks, words[PEER])
        seconds = words[LIMIT] / 1e9
        lines = [
            f"{what}: rank {words[RANK]} waited {seconds:g} s for {name}",
            f"  epoch: expected {words[EXPECTED]}, seen {words[SEEN]}",
        ]
        return "\n".join(lines), (
            f"look for the error or the missing call on {name}; "
            f"raise IRIS_TIMEOUT (now {seconds:g} s) if it is only slow; go on with ctx.reset()"
        )


_TELLING = 0.25  # of the time that counts as slow: a rank that came later has told by then too
_UNKNOWN: tuple[str, tuple[int, ...]] = ("a wait in a kernel", ())


def _name(ranks: Sequence[int], peer: int) -> str:
    """How messages call place ``peer`` among a stage's ranks."""
    awaited = ranks[peer] if 0 <= peer < len(ranks) else peer
    return "a peer" if awaited < 0 else f"rank {awaited}"
