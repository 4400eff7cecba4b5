"""DeviceContext: the memory operations of ``iris.device`` as methods that know their rank.

@triton.jit
def kernel(context_tensor, x, rank: tl.constexpr, world_size: tl.constexpr, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context_tensor, rank, world_size)
    i = tl.arange(0, N)
    ctx.store(x + i, ctx.load(x + i, from_rank=0), to_rank=(rank + 1) % world_size)
    ctx.barrier()
"""

import triton
import triton.language as tl

from iris.device import atomics, ops, signals, tracing, watch
from iris.device.target import SYSTEM, device_class, device_function

# Words of the context tensor: rank, world size, every rank's slab base, the fields of tracing, the
# watch's record.
BASES = tl.constexpr(2)
FIELDS = tl.constexpr(tracing.FIELDS)
PEERS = tl.constexpr(watch.PEERS)
SLOTS = tl.constexpr(watch.SLOTS)


@device_class
class DeviceContext:
    """What a kernel knows of the world: ``rank``, ``world_size``, ``heap_bases``.

    Made by ``initialize``. Pointers are this rank's; ranks are those of the world. For the other
    arguments see ``iris.load`` and its neighbours.

    With ``tracing`` every method records itself, while ``ctx.tracing`` is enabled on the host. A
    load or store is over, for the record, when it is issued.
    """

    rank: tl.constexpr
    world_size: tl.constexpr
    heap_bases: tl.tensor
    record: tl.tensor
    tracing: tl.constexpr

    @triton.constexpr_function
    def __init__(self, rank, world_size, heap_bases, record, tracing):
        self.rank = tl.constexpr(rank)
        self.world_size = tl.constexpr(world_size)
        self.heap_bases = heap_bases
        self.record = record
        self.tracing = tl.constexpr(tracing)

    @staticmethod
    @device_function
    def initialize(context_tensor, rank, world_size, tracing: tl.constexpr = False):
        """Return the context. ``context_tensor`` is ``ctx.get_device_context()``.

        Rank and size are compile-time numbers. ``tracing`` compiles in the record of events.
        """
        bases = context_tensor + BASES
        record = tl.cast(tl.load(bases + world_size + FIELDS), tl.pointer_type(tl.int64))
        return DeviceContext(rank, world_size, bases, record, tracing)

    @device_function
    def trace_begin(self):
        """Return the time, for ``trace_end``; nothing is compiled without ``tracing``."""
        since = tl.cast(0, tl.int64)
        if self.tracing:
            since = tracing.begin(self._watch())
        return since

    @device_function
    def trace_end(self, since, kind, peer=-1, nbytes=0):
        """Record an event of this program from ``since`` to now.

        ``kind`` is a number from ``ctx.tracing.kind(name)`` on the host.
        """
        if self.tracing:
            tracing.end(self._watch(), since, kind, tracing.peer_bits(peer), nbytes)

    @device_function
    def _watch(self):
        return self.record, 0, self.heap_bases + self.world_size

    @device_function
    def _moved(self, since, kind, peer, pointer, mask):
        """Record an access to the elements at ``pointer``."""
        if self.tracing:
            self.trace_end(since, kind, peer, tracing.bytes_at(pointer, mask))

    @device_function
    def _atomic(self, operation: tl.constexpr, pointer, val, to_rank, mask, sem, scope, hint):
        since = self.trace_begin()
        old = operation(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)
        self._moved(since, tracing.ATOMIC, to_rank, pointer, mask)
        return old

    @device_function
    def load(
        self, pointer, from_rank, mask=None, other=None, cache_modifier: tl.constexpr = None,
        volatile: tl.constexpr = False, hint: tl.constexpr = None,
    ):  # fmt: skip
        """Return what ``from_rank`` has at ``pointer``."""
        since = self.trace_begin()
        value = ops.load(
            pointer, self.rank, from_rank, self.heap_bases, mask, other, cache_modifier, volatile,
            hint,
        )  # fmt: skip
        self._moved(since, tracing.LOAD, from_rank, pointer, mask)
        return value

    @device_function
    def store(
        self, pointer, value, to_rank, mask=None, cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):  # fmt: skip
        """Store ``value`` at ``pointer`` on ``to_rank``."""
        since = self.trace_begin()
        ops.store(pointer, value, self.rank, to_rank, self.heap_bases, mask, cache_modifier, hint)
        self._moved(since, tracing.STORE, to_rank, pointer, mask)

    @device_function
    def get(
        self, from_ptr, to_ptr, from_rank, mask=None, other=None,
        load_cache_modifier: tl.constexpr = None, store_cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):  # fmt: skip
        """Copy from ``from_ptr`` on ``from_rank`` to ``to_ptr`` here."""
        since = self.trace_begin()
        ops.copy(
            from_ptr, to_ptr, from_rank, self.rank, self.rank, self.heap_bases, mask, other,
            load_cache_modifier, store_cache_modifier, hint,
        )  # fmt: skip
        self._moved(since, tracing.GET, from_rank, from_ptr, mask)

    @device_function
    def put(
        self, from_ptr, to_ptr, to_rank, mask=None, other=None,
        load_cache_modifier: tl.constexpr = None, store_cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):  # fmt: skip
        """Copy from ``from_ptr`` here to ``to_ptr`` on ``to_rank``."""
        since = self.trace_begin()
        ops.put(
            from_ptr, to_ptr, self.rank, to_rank, self.heap_bases, mask, other, load_cache_modifier,
            store_cache_modifier, hint,
        )  # fmt: skip
        self._moved(since, tracing.PUT, to_rank, from_ptr, mask)

    @device_function
    def copy(
        self, src_ptr, dst_ptr, from_rank, to_rank, mask=None, other=None,
        load_cache_modifier: tl.constexpr = None, store_cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):  # fmt: skip
        """Copy from ``src_ptr`` on ``from_rank`` to ``dst_ptr`` on ``to_rank``."""
        since = self.trace_begin()
        ops.copy(
            src_ptr, dst_ptr, from_rank, to_rank, self.rank, self.heap_bases, mask, other,
            load_cache_modifier, store_cache_modifier, hint,
        )  # fmt: skip
        self._moved(since, tracing.COPY, to_rank, src_ptr, mask)

    @device_function
    def atomic_add(
        self, pointer, val, to_rank, mask=None, sem: tl.constexpr = None,
        scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
    ):  # fmt: skip
        """Add ``val`` to what ``to_rank`` has at ``pointer``; return the old value."""
        return self._atomic(atomics.atomic_add, pointer, val, to_rank, mask, sem, scope, hint)

    @device_function
    def atomic_sub(
        self, pointer, val, to_rank, mask=None, sem: tl.constexpr = None,
        scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
    ):  # fmt: skip
        """Subtract ``val`` from what ``to_rank`` has at ``pointer``; return the old value."""
        return self._atomic(atomics.atomic_sub, pointer, val, to_rank, mask, sem, scope, hint)

    @device_function
    def atomic_cas(
        self, pointer, cmp, val, to_rank, sem: tl.constexpr = None, scope: tl.constexpr = SYSTEM,
        hint: tl.constexpr = None,
    ):  # fmt: skip
        """Put ``val`` where ``to_rank`` has ``cmp`` at ``pointer``; return the old value."""
        since = self.trace_begin()
        old = atomics.atomic_cas(
            pointer, cmp, val, self.rank, to_rank, self.heap_bases, sem, scope, hint
        )
        self._moved(since, tracing.ATOMIC, to_rank, pointer, None)
        return old

    @device_function
    def atomic_xchg(
        self, pointer, val, to_rank, mask=None, sem: tl.constexpr = None,
        scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
    ):  # fmt: skip
        """Put ``val`` in place of what ``to_rank`` has at ``pointer``; return the old value."""
        return self._atomic(atomics.atomic_xchg, pointer, val, to_rank, mask, sem, scope, hint)

    @device_function
    def atomic_and(
        self, pointer, val, to_rank, mask=None, sem: tl.constexpr = None,
        scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
    ):  # fmt: skip
        """Bitwise and of ``val`` into what ``to_rank`` has at ``pointer``; return the old value."""
        return self._atomic(atomics.atomic_and, pointer, val, to_rank, mask, sem, scope, hint)

    @device_function
    def atomic_or(
        self, pointer, val, to_rank, mask=None, sem: tl.constexpr = None,
        scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
    ):  # fmt: skip
        """Bitwise or of ``val`` into what ``to_rank`` has at ``pointer``; return the old value."""
        return self._atomic(atomics.atomic_or, pointer, val, to_rank, mask, sem, scope, hint)

    @device_function
    def atomic_xor(
        self, pointer, val, to_rank, mask=None, sem: tl.constexpr = None,
        scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
    ):  # fmt: skip
        """Bitwise xor of ``val`` into what ``to_rank`` has at ``pointer``; return the old value."""
        return self._atomic(atomics.atomic_xor, pointer, val, to_rank, mask, sem, scope, hint)

    @device_function
    def atomic_min(
        self, pointer, val, to_rank, mask=None, sem: tl.constexpr = None,
        scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
    ):  # fmt: skip
        """Lower what ``to_rank`` has at ``pointer`` to ``val``; return the old value."""
        return self._atomic(atomics.atomic_min, pointer, val, to_rank, mask, sem, scope, hint)

    @device_function
    def atomic_max(
        self, pointer, val, to_rank, mask=None, sem: tl.constexpr = None,
        scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
    ):  # fmt: skip
        """Raise what ``to_rank`` has at ``pointer`` to ``val``; return the old value."""
        return self._atomic(atomics.atomic_max, pointer, val, to_rank, mask, sem, scope, hint)

    @device_function
    def signal(self, pointer, epoch, to_rank):
        """Set the flag that ``to_rank`` has at ``pointer`` to ``epoch``, after stores so far."""
        since = self.trace_begin()
        signals.signal(ops.translate(pointer, self.heap_bases, self.rank, to_rank), epoch)
        self.trace_end(since, tracing.SIGNAL, to_rank)

    @device_function
    def wait(self, pointer, epoch, from_rank=-1):
        """Wait until the flag at ``pointer`` here, which ``from_rank`` writes, is at ``epoch``.

        Return true when it came, false when a wait of some rank ran out.
        """
        since = self.trace_begin()
        came = signals.wait(pointer, epoch, self.record, 0, from_rank)
        self.trace_end(since, tracing.WAIT, from_rank)
        return came

    @device_function
    def barrier(self, slot=0):
        """Meet the one program of every rank that calls with the same ``slot`` (0 to 63).

        What these programs stored before, on any rank, all of them see after. Programs of one
        launch that meet at the same time need slots of their own, and must all be able to run.
        """
        flags = (
            tl.cast(self.record + PEERS + self.world_size, tl.pointer_type(tl.int32))
            + slot * self.world_size
        )
        since = self.trace_begin()
        epoch = tl.load(flags + self.rank, volatile=True).to(tl.int64) + 1
        for i in tl.static_range(self.world_size):
            self.signal(flags + self.rank, epoch.to(tl.int32), (self.rank + i) % self.world_size)
        for peer in tl.static_range(self.world_size):
            self.wait(flags + peer, epoch, peer)
        self.trace_end(since, tracing.BARRIER)
