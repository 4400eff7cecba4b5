"""The symmetric heap: blocks that every rank of a group has and its peers can address.

NOTE [Agreed reuse]
A block is free when every member has dropped it. A rank notes its own drops as they happen (its
garbage collector decides when) and announces them in the next allocation it takes part in; a block
that every member has announced is freed there, by all members in the same step. So the world's
layout is the same on all ranks, whatever the timing of any rank's collector.
"""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from iris import config
from iris.errors import CheckError, CollectiveMismatchError, HeapExhaustedError, IrisError
from iris.logging import logger
from iris.runtime.arena import Arena
from iris.runtime.callsite import user_line
from iris.runtime.devices import synchronize
from iris.runtime.groups import Group
from iris.runtime.guards import GUARD_BYTES, Guards
from iris.runtime.slabs import Slab

ALIGN = 256
_INTERNAL_BYTES = 4 << 20
_PAGE = 4096
_HOLDERS_SHOWN = 5
STRAY_STORE = "look for a store without a mask, or a workspace made for a smaller shape"

Key = tuple[int, int]  # (group key, number of the block in the group)


@dataclass(frozen=True)
class _Request:
    """What each member says when it allocates: what it wants, and what it has to report."""

    nbytes: int
    taken: int  # with padding and guards
    align: int
    internal: bool
    line: str
    what: str = ""  # that is to lie there
    lead: int = 0  # bytes of guard in front
    drops: tuple[Key, ...] = ()
    high_top: int = 0
    faults: tuple[str, ...] = ()  # what its guards found

    @property
    def wish(self) -> tuple[int, int, int, bool, str]:
        """The part that must be equal on all members."""
        return self.nbytes, self.taken, self.align, self.internal, self.what


@dataclass
class Record:
    """What the heap knows of a block, in use or waiting until all have dropped it."""

    request: _Request
    ranks: tuple[int, ...]
    offset: int
    peers: tuple[int, ...]
    owner: Callable[[], object | None]
    dropped_by: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        return self.request.nbytes

    @property
    def lead(self) -> int:
        return self.request.lead

    @property
    def line(self) -> str:
        return self.request.line


class Block:
    """``nbytes`` on the heap of every member of a group.

    ``offset`` is from this rank's slab base; ``ranks`` are the members, and ``peers[i]`` is the
    address, in this process, of member i's bytes. ``tensor`` is uint8[nbytes], this rank's own. The
    memory is in use as long as any rank holds the block or a tensor over it.
    """

    def __init__(self, slab: Slab, record: Record, owner: object) -> None:
        self.nbytes = record.request.nbytes
        self.offset = record.offset
        self.ranks = record.ranks
        self.peers = record.peers
        self.tensor = slab.tensor(owner)[: self.nbytes]
        self._slab = slab
        self._views: dict[int, Tensor] = {}

    def peer(self, index: int) -> Tensor:
        """Return uint8[nbytes] over member ``index``'s bytes. Valid while the block is in use."""
        if index not in self._views:
            rank = self.ranks[index]
            offset = self.peers[index] - self._slab.bases[rank]
            owner = self._slab.owner(rank, offset, max(1, self.nbytes))
            self._views[index] = self._slab.tensor(owner)[: self.nbytes]
        return self._views[index]


class Heap:
    """Cuts a slab into blocks: ``capacity`` bytes for the user, some for the library.

    ``bases[rank]`` is the address of that rank's slab in this process.
    """

    def __init__(self, slab: Slab, world: Group, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.device = device
        self.bases = slab.bases
        self._slab = slab
        self._world = world
        self._base = slab.bases[world.index]
        self._arenas = (Arena(capacity), Arena(_INTERNAL_BYTES))
        self._starts = (0, _internal_base(capacity))
        self._records: dict[Key, Record] = {}
        self._by_address: dict[int, Record] = {}
        self._made: dict[int, int] = {}
        self._dropped: deque[Key] = deque()
        self._guards = Guards(world.index, self._view) if config.check() else None

    def allocate(
        self,
        nbytes: int,
        group: Group | None = None,
        align: int = ALIGN,
        internal: bool = False,
        what: str = "",
    ) -> Block:
        """Return an uninitialised block. Collective over ``group`` (the world by default).

        ``what`` describes the tensor that is to lie there, alike on all members. ``internal``
        blocks hold the library's state and do not count against the user's capacity.
        Raises on every member: ``CollectiveMismatchError`` where sizes or ``what`` differ,
        ``HeapExhaustedError`` where any member has no room.
        """
        group = group or self._world
        self._check_usable()
        align = max(align, ALIGN)
        lead, guards = (align, align + GUARD_BYTES) if self._guards is not None else (0, 0)
        taken = _round_up(max(1, nbytes) + guards, ALIGN)
        request = _Request(nbytes, taken, align, internal, user_line(), what, lead)
        places: Sequence[int | None] = ()
        for attempt in range(2):
            if attempt:
                gc.collect()  # tensors in reference cycles hold blocks too
            highest = self._announce(group, request)
            places = self._agree(group, self._place(group, request, highest))
            if None not in places:
                return self._commit(group, request, [place or 0 for place in places])
        raise HeapExhaustedError(*self._exhausted(group, request, places))

    def holds(self, rank: int, start: int, end: int) -> bool:
        """Say whether addresses from ``start`` to before ``end`` are on the heap of ``rank``."""
        base = self.bases[rank]
        return base <= start <= end <= base + self._slab.nbytes

    def find(self, tensor: object) -> tuple[Block, int] | None:
        """Return the block of this rank's heap that holds ``tensor``, and its byte offset there.

        None for a tensor made elsewhere, also for an empty one.
        """
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return None
        record = self._by_address.get(tensor.untyped_storage().data_ptr())
        owner = None if record is None else record.owner()
        if record is None or owner is None:
            return None
        at = int(tensor.storage_offset()) * tensor.element_size()
        return Block(self._slab, record, owner), at

    def peer_tensor(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the tensor at the same place on another rank's heap.

        Raises ``IrisError`` for a tensor that is not on the heap, or not on that rank's.
        """
        found = self.find(tensor)
        if found is None:
            raise IrisError(
                "this tensor is not on the symmetric heap",
                help="create it with ctx.zeros(...) or copy it there with ctx.as_symmetric(tensor)",
            )
        self._world.board.check_open()
        block, at = found
        if rank not in block.ranks:
            raise IrisError(f"rank {rank} has no such tensor: ranks {block.ranks} allocated it")
        storage = block.peer(block.ranks.index(rank)).untyped_storage()
        peer = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return peer.set_(storage, at // tensor.itemsize, tensor.size(), tensor.stride())

    def faults(self) -> list[str]:
        """With ``IRIS_CHECK=1``, say beside which blocks of this rank something was written."""
        if self._guards is None:
            return []
        return self._guards.faults(self._records.values())

    def holder(self, offset: int) -> str:
        """Say which allocation of this rank has the byte at ``offset``."""
        for record in self._records.values():
            if 0 <= offset - record.offset < max(1, record.nbytes):
                start = offset - record.offset
                return f"byte {start} of {record.nbytes} bytes allocated at {record.line}"
        return f"offset {offset:#x}, which no allocation has"

    def _view(self, offset: int, nbytes: int) -> Tensor:
        owner = self._slab.owner(self._world.index, offset, max(1, nbytes))
        return self._slab.tensor(owner)[:nbytes]

    def close(self) -> None:
        """Let go of the slab; tensors of this rank stay usable."""
        self._slab.close()

    def _check_usable(self) -> None:
        self._world.board.check_usable()
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise IrisError(
                "the heap cannot allocate while a CUDA graph is captured",
                help="allocate before the capture, and reuse the tensor inside it",
            )

    def _announce(self, group: Group, request: _Request) -> int:
        """Tell the group what this rank wants and dropped, and free what all members dropped.

        Returns the largest ``high.top`` of all members.
        """
        drops = self._take_drops(group)
        if drops:
            synchronize(self.device)  # kernels in flight may still use what was dropped
        top = self._arenas[request.internal].high.top
        own = replace(request, drops=drops, high_top=top, faults=tuple(self.faults()))
        try:
            answers = group.exchange_object("allocate on the heap", own)
        except Exception:
            self._dropped.extendleft(reversed(drops))
            raise
        faults = [fault for answer in answers for fault in answer.faults]
        if faults:
            raise CheckError("\n".join(faults), help=STRAY_STORE)
        self._free(group, answers)
        if any(answer.wish != request.wish for answer in answers):
            lines = [
                f"  rank {rank}: {answer.nbytes} bytes{answer.what and ' of ' + answer.what} "
                f"at {answer.line}"
                for rank, answer in zip(group.ranks, answers, strict=True)
            ]
            raise CollectiveMismatchError(
                "ranks of one group allocate different tensors\n" + "\n".join(lines),
                help="allocation is collective: every rank must ask for the same shape and dtype",
            )
        return max(answer.high_top for answer in answers)

    def _take_drops(self, group: Group) -> tuple[Key, ...]:
        """Remove and return the drops this group may hear of: the world all, others their own."""
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        if group is self._world:
            return tuple(dropped)
        self._dropped.extend(key for key in dropped if key[0] != group.key)
        return tuple(key for key in dropped if key[0] == group.key)

    def _free(self, group: Group, answers: Sequence[_Request]) -> None:
        for rank, answer in zip(group.ranks, answers, strict=True):
            for key in answer.drops:
                record = self._records.get(key)
                if record is None:
                    continue  # a block of a group that this rank is not in
                record.dropped_by.add(rank)
                if len(record.dropped_by) == len(record.ranks):
                    self._release(key, record)

    def _release(self, key: Key, record: Record) -> None:
        internal, taken = record.request.internal, record.request.taken
        del self._records[key]
        self._by_address.pop(self._base + record.offset, None)
        low = record.ranks == self._world.ranks
        place = record.offset - record.lead - self._starts[internal]
        self._arenas[internal].release(place, taken, low)

    def _place(self, group: Group, request: _Request, highest: int) -> int | None:
        arena = self._arenas[request.internal]
        if group is self._world:
            return arena.place_low(request.taken, request.align, highest)
        return arena.place_high(request.taken, request.align)

    def _agree(self, group: Group, place: int | None) -> Sequence[int | None]:
        """Return every member's place: the world's are equal by construction, others are told."""
        if group is self._world:
            return [place] * group.size
        return group.exchange_object("place on the heap", place)

    def _commit(self, group: Group, request: _Request, places: Sequence[int]) -> Block:
        starts = [self._starts[request.internal] + place for place in places]
        self._slab.commit(group, starts, request.taken)
        offsets = [start + request.lead for start in starts]
        place, offset = places[group.index], offsets[group.index]
        self._arenas[request.internal].take(place, request.taken, group is self._world)
        number = self._made[group.key] = self._made.get(group.key, 0) + 1
        key = (group.key, number)
        owner = self._slab.owner(self._world.index, offset, request.taken - request.lead)
        weakref.finalize(owner, self._dropped.append, key).atexit = False
        peers = tuple(self.bases[rank] + o for rank, o in zip(group.ranks, offsets, strict=True))
        record = Record(request, group.ranks, offset, peers, weakref.ref(owner))
        self._records[key] = self._by_address[self._base + offset] = record
        if self._guards is not None:
            self._guards.put(record)
        if "heap" in config.log():
            where = f"{offset:#x} for ranks {group.ranks}, {request.line}"
            logger().debug("heap: %d bytes at %s", request.nbytes, where)
        return Block(self._slab, record, owner)

    def _exhausted(
        self, group: Group, request: _Request, places: Sequence[int | None]
    ) -> tuple[str, str]:
        """Return the message and the way out."""
        holes = self._arenas[request.internal].holes()
        full = [str(r) for r, place in zip(group.ranks, places, strict=True) if place is None]
        by_line: dict[str, list[int]] = {}
        for record in self._records.values():
            if not record.request.internal:
                by_line.setdefault(record.request.line, []).append(record.request.taken)
        holders = sorted(by_line.items(), key=lambda item: -sum(item[1]))[:_HOLDERS_SHOWN]
        lines = [
            f"heap exhausted at {request.line} on rank {', '.join(full)}",
            f"  requested  {request.nbytes} bytes",
            f"  free       {sum(holes)} bytes, largest hole {max(holes, default=0)} bytes",
            f"  capacity   {self.capacity} bytes a rank (this is rank {self._world.index})",
            *(f"  held       {sum(n)} bytes in {len(n)} blocks from {at}" for at, n in holders),
        ]
        way_out = f"raise heap_size in iris.iris(heap_size={self.capacity}), or drop tensors"
        return "\n".join(lines), way_out


def slab_bytes(capacity: int) -> int:
    """Return the size of the slab for a heap of ``capacity`` bytes: the user's, the library's."""
    return _internal_base(capacity) + _INTERNAL_BYTES


def _internal_base(capacity: int) -> int:
    return _round_up(capacity, _PAGE)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
