"""The kernel of the device barrier (see barrier.py)."""

import triton
import triton.language as tl

from iris.device import signals, watch

PEERS = tl.constexpr(watch.PEERS)


@triton.jit(do_not_specialize=["members", "stage", "row", "rank", "world"])
def barrier_kernel(record, members, stage, row, rank, world, LANES: tl.constexpr):
    """One barrier of the ranks whose bit is set in ``members``, on their flags of ``row``.

    One program of one warp; a lane serves a rank.
    """
    lane = tl.arange(0, LANES)
    member = ((tl.cast(members, tl.int64) >> lane) & 1) != 0
    peer = tl.load(record + PEERS + lane, mask=member, other=0)
    first = 2 * (PEERS + world) + row * world  # int32 words from a record to its flags of this row
    there = tl.cast(peer, tl.pointer_type(tl.int32)) + first
    here = tl.cast(record, tl.pointer_type(tl.int32)) + first
    epoch = tl.load(here + rank, volatile=True).to(tl.int64) + 1
    signals.signal(there + rank, epoch.to(tl.int32), member)
    signals.wait(here + tl.where(member, lane, rank), epoch, record, stage, lane, member)
