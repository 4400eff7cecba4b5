"""Events of kernels: what a program did, from when to when, on which SM, and with which peers.

A kernel takes the time, works, and then writes one event. Nothing is counted or written before the
work, so recording disturbs it little, and an event is whole or not there at all. ``watch`` is what
waits take: (record, stage, trace). ``trace`` is a pointer to the trace fields below, or None, with
which all of this compiles to nothing::

    since = tracing.begin(watch)
    ...
    tracing.end(watch, since, tracing.COPY, peer_bits(peer), nbytes)

On the host, `iris.runtime.tracing` owns the fields and the buffer.
"""

import triton
import triton.language as tl

from iris.device.target import device_function, multiprocessor, now

# The trace fields (int64), which follow the heap bases in the context tensor.
ENABLED = tl.constexpr(0)
MAX_EVENTS = tl.constexpr(1)
COUNTER = tl.constexpr(2)  # address of an int64: events so far, with those that found no room
BUFFER = tl.constexpr(3)  # address of int64[max_events, EVENT_WORDS]
FIELDS = tl.constexpr(4)

# Words of an event: kind, stage (a number of ``ctx.watch.stage``), peers (bit i: member i of the
# stage's ranks), bytes, detail (free), program and SM, begin, end.
EVENT_WORDS = tl.constexpr(8)

# What an event can be. Numbers from len(KINDS) on are for users: ``ctx.tracing.kind("name")``.
KINDS = (
    *("load", "store", "get", "put", "copy", "atomic", "signal", "wait", "barrier"),
    *("push", "tile", "emit", "sum", "collect"),
)
LOAD, STORE, GET, PUT, COPY, ATOMIC, SIGNAL, WAIT, BARRIER = map(tl.constexpr, range(9))
PUSH = tl.constexpr(9)  # this rank's operand to the peers' staging
TILE = tl.constexpr(10)  # the products of a tile, or of a part of one; detail: row, column
EMIT = tl.constexpr(11)  # a finished tile's epilogue, and its stores, here or to peers
SUM = tl.constexpr(12)  # of the members' parts, waits included
COLLECT = tl.constexpr(13)  # what peers sent, from staging to the result, waits included


@device_function
def begin(watch):
    """The time, for ``end``."""
    since = tl.cast(0, tl.int64)
    if watch[2] is not None:
        since = now()
    return since


@device_function
def peer_bits(peer):
    """The ``peers`` of an event with one peer; -1 is none."""
    peer = tl.cast(peer, tl.int64)
    return tl.where(peer >= 0, tl.cast(1, tl.int64) << tl.maximum(peer, 0), 0)


@device_function
def member_bits(members, valid):
    """The ``peers`` of an event with those of ``members`` (a 1-D block) that are ``valid``."""
    return tl.reduce_or(tl.where(valid, tl.cast(1, tl.int64) << members, 0), axis=0)


@device_function
def bytes_at(pointer, mask):
    """Bytes of the elements at ``pointer``, a scalar or a block, that ``mask`` lets through."""
    SIZE: tl.constexpr = (pointer.dtype.element_ty.primitive_bitwidth + 7) // 8
    count = 1
    if mask is not None:
        count = tl.where(mask, 1, 0)
        if pointer.type.is_block():
            count = tl.sum(tl.ravel(tl.broadcast_to(count, pointer.shape)))
    elif pointer.type.is_block():
        count = pointer.numel
    return count * SIZE


@device_function
def block_bytes(count, T: tl.constexpr):
    """Bytes of ``count`` blocks of [T.rows, T.columns]; those at an edge count whole."""
    return count.to(tl.int64) * (T.rows * T.columns * T.dtype.primitive_bitwidth // 8)


@device_function
def end(watch, since, kind, peers=0, nbytes=0, detail=0):
    """Record what was done since ``since``."""
    if watch[2] is not None:
        _write(watch, since, kind, peers, nbytes, detail)


@device_function
def _write(watch, since, kind, peers, nbytes, detail):
    _, stage, trace = watch
    until = now()
    if tl.load(trace + ENABLED) != 0:
        counter = tl.cast(tl.load(trace + COUNTER), tl.pointer_type(tl.int64))
        place = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
        if place < tl.load(trace + MAX_EVENTS):
            at = tl.cast(tl.load(trace + BUFFER), tl.pointer_type(tl.int64)) + place * EVENT_WORDS
            program = tl.program_id(0) + tl.num_programs(0) * (
                tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
            )
            tl.store(at, tl.cast(kind, tl.int64))
            tl.store(at + 1, tl.cast(stage, tl.int64))
            tl.store(at + 2, tl.cast(peers, tl.int64))
            tl.store(at + 3, tl.cast(nbytes, tl.int64))
            tl.store(at + 4, tl.cast(detail, tl.int64))
            tl.store(at + 5, (tl.cast(multiprocessor(), tl.int64) << 32) | program)
            tl.store(at + 6, since)
            tl.store(at + 7, until)


@triton.jit(do_not_specialize=["rounds"])
def clock_kernel(mail, rounds, LIMIT: tl.constexpr):
    """Answer ``mail[0] = i`` with the time in ``mail[i]``, for i = 1 .. ``rounds``.

    ``mail`` is pinned host memory. It leaves ``LIMIT`` nanoseconds after it has started.
    """
    started = now()
    i = 1
    while (i <= rounds) & (now() - started < LIMIT):
        if tl.load(mail, volatile=True) == i:
            tl.store(mail + i, now())
            i += 1
