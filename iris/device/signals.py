"""Signals: one rank tells another, on the device, that something is there.

A flag is an int32 or int64 word on the symmetric heap of the rank that waits, and has one writing
rank. Its value is an epoch that only grows and may wrap: a wait for ``epoch`` ends when the flag is
at or past it, by the difference in 32 bits. Nobody sets it back.

    signal(translate(flag, peer_bases, rank, peer), epoch)   # after the stores it stands for
    wait(flag, epoch, record, stage, peer)                   # before the loads

Waits are bounded: see NOTE [Bounded waits] in watch.py.
"""

import triton.language as tl

from iris.device import watch
from iris.device.target import (
    POLLS_PER_CHECK,
    carry_over,
    clock,
    device_function,
    jot,
    load_acquire,
    places,
    spread,
    together,
    waited,
)

STATE = tl.constexpr(watch.STATE)
LIMIT = tl.constexpr(watch.LIMIT)
HOST = tl.constexpr(watch.HOST)
STAGE = tl.constexpr(watch.STAGE)
PEER = tl.constexpr(watch.PEER)
EXPECTED = tl.constexpr(watch.EXPECTED)
SEEN = tl.constexpr(watch.SEEN)
RANK = tl.constexpr(watch.RANK)
WORLD = tl.constexpr(watch.WORLD)
PEERS = tl.constexpr(watch.PEERS)
TELL = tl.constexpr(watch.TELL)
SLOW = tl.constexpr(watch.SLOW)
LOOKS = tl.constexpr(watch.LOOKS)
TOLD_STAGE = tl.constexpr(watch.TOLD_STAGE)
TOLD_EPOCH = tl.constexpr(watch.TOLD_EPOCH)
ABORT = tl.constexpr(watch.ABORT)


@device_function
def signal(ptr, epoch, mask=None):
    """Set the flags at ``ptr``, on the ranks that wait, to ``epoch``: release at system scope.

    All that this program's threads stored before happens before what a waiter does after its wait.
    """
    together()
    tl.atomic_xchg(ptr, spread(epoch, ptr), mask=mask, sem="release", scope="sys")


@device_function
def arrive(ptr, count=1):
    """Add ``count`` to the flag at ``ptr``: ``signal`` for programs of a rank that share a flag."""
    together()
    tl.atomic_add(ptr, count, sem="release", scope="sys")


@device_function
def wait(ptr, epoch, record, stage=0, peer=-1, mask=None, source=None):
    """Wait until the flag at ``ptr`` is at or past ``epoch``: acquire at system scope.

    ``ptr`` may be a 1-D block with a ``mask``: then every flag in it. ``record`` is
    ``ctx.watch.record``; ``stage`` a number from ``ctx.watch.stage``; ``peer`` (a block for a
    block) the place, among that stage's ranks, of the rank that writes the flag. With ``source``, a
    word that the host writes, one flag follows that. Return true when the flags came, false when
    some rank's wait ran out: the host will then raise.
    """
    claim = _claim(stage)
    since = tl.cast(0, tl.int64)
    state = tl.cast(0, tl.int64)
    polls = tl.cast(0, tl.int32)
    was_clear = tl.cast(0, tl.int32)
    before = tl.load(record + STATE, volatile=True)
    seen = load_acquire(ptr, mask)
    while _any_short(seen, epoch, mask) & (state == 0):
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            now = clock(polls)
            since = tl.where(since == 0, now, since)
            late = now - since > tl.load(record + LIMIT)
            # Threads may differ on these. All see in ``state`` whether there is a claim now.
            asked = tl.load(_told(record) + ABORT, volatile=True)
            bid = tl.where(late, claim, asked)
            none = tl.cast(0, tl.int64)
            before_bid = tl.atomic_cas(record + STATE, none, bid, sem="relaxed", scope="sys")
            was_clear = tl.where(before_bid == 0, 1, was_clear)
            state = tl.atomic_cas(record + STATE, none, none, sem="relaxed", scope="sys")
            if now - since > tl.load(record + SLOW):
                _tell_slow(record, stage, epoch, polls)
        # Of a wait that is over, what was missing is kept, though it may come now.
        seen = tl.where(state == 0, _look(ptr, mask, source), seen)
    if (state == claim) & (was_clear != 0):  # claimed now, not by an earlier wait of this program
        _write(record, stage, peer, epoch, seen, mask)
    waited(ptr, epoch, mask, state)
    if (before != 0) | (state != 0):
        _tell_host(record)
    together()
    return state == 0


@device_function
def _look(ptr, mask, source):
    return load_acquire(ptr, mask) if source is None else carry_over(ptr, source)


@device_function
def _claim(stage):
    """Return a positive number for this program's waits in this stage, different from others'."""
    program = tl.program_id(0) + tl.num_programs(0) * (
        tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
    )
    return (tl.cast(stage, tl.int64) << 32) + program + 1


@device_function
def _short(seen, epoch, mask):
    """True where a flag has not come to ``epoch``."""
    behind = tl.cast(epoch, tl.int64) - tl.cast(seen, tl.int64)
    short = tl.cast(behind, tl.int32) > 0
    if mask is not None:
        short = short & mask
    return short


@device_function
def _any_short(seen, epoch, mask):
    short = _short(seen, epoch, mask)
    if seen.type.is_block():
        short = tl.max(short.to(tl.int32), axis=0) > 0
    return short


@device_function
def _write(record, stage, peer, epoch, seen, mask):
    """Write down what was waited for, and make every rank's waits end."""
    expected = tl.cast(epoch, tl.int64)
    reached = tl.cast(seen, tl.int64)
    awaited = tl.cast(peer, tl.int64)
    if seen.type.is_block():
        lanes = places(seen)
        last = lanes == tl.max(tl.where(_short(seen, epoch, mask), lanes, -1), axis=0)
        none = reached - reached
        expected = tl.sum(tl.where(last, expected, none), axis=0)
        awaited = tl.sum(tl.where(last, awaited, none), axis=0)
        reached = tl.sum(tl.where(last, reached, none), axis=0)
    tl.store(record + STAGE, tl.cast(stage, tl.int64))
    tl.store(record + PEER, awaited)
    tl.store(record + EXPECTED, expected)
    tl.store(record + SEEN, reached)
    mark = -1 - tl.load(record + RANK)
    world = tl.load(record + WORLD)
    rank = tl.cast(0, tl.int64)
    while rank < world:
        other = tl.cast(tl.load(record + PEERS + rank), tl.pointer_type(tl.int64))
        tl.atomic_cas(other + STATE, tl.cast(0, tl.int64), mark, sem="release", scope="sys")
        rank += 1


@device_function
def _tell_slow(record, stage, epoch, polls):
    """Write down for the host, in its own memory, what this wait is for.

    Scalars only: a block of flags would be kept in registers through the loop of a product.
    """
    tell = _told(record)
    jot(tell + TOLD_STAGE, tl.cast(stage, tl.int64))
    jot(tell + TOLD_EPOCH, tl.cast(epoch, tl.int64))
    jot(tell + LOOKS, tl.cast(polls, tl.int64))


@device_function
def _told(record):
    return tl.cast(tl.load(record + TELL), tl.pointer_type(tl.int64))


@device_function
def _tell_host(record):
    host = tl.load(record + HOST)
    if host != 0:
        tl.store(tl.cast(host, tl.pointer_type(tl.int64)), 1)
