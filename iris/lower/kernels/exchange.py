"""Plain collectives: every rank publishes its operand in its staging, and each takes what it needs
from the others'.

Each byte that a rank needs crosses a link once. One kernel serves them all; what differs are the
*pieces*, boxes of members' operands that become boxes of this rank's result, and whether members'
values are combined. See NOTE [Epochs] and NOTE [Progress] in protocol.py.
"""

import triton
import triton.language as tl

from iris.device import tracing
from iris.device.target import device_function
from iris.lower.kernels.protocol import enter, finished, leave, peer, publish, ticket, wait_members

PIECE_WORDS = tl.constexpr(17)  # `Piece.words` in boxes.py


@device_function
def _whole(x, V: tl.constexpr):
    """``x``, a multiple of V, for a compiler that was not told so: accesses stay 16 bytes wide.

    ``tl.multiple_of`` is lost on a kernel's own argument.
    """
    return x // V * V


@device_function
def _offsets(row, n1, n2, n3, s0, s1, s2, s3):
    """Where rows of a 5-D box begin, by the sizes of dims 1 to 3 and the strides of dims 0 to 3."""
    at = row % n3 * s3
    row = row // n3
    at += row % n2 * s2
    row = row // n2
    return at + row // n1 * s0 + row % n1 * s1


@device_function
def _publish_operand(x, box, staging, state, X: tl.constexpr):
    """Copy the operand, a 5-D box of any strides, to ``staging``, by ticket.

    Returns how many blocks this program copied, and how many there are.
    """
    V: tl.constexpr = X.vector
    rows, width, n1, n2, n3, s0, s1, s2, s3, s4 = box
    width = _whole(width, V)
    across = tl.cdiv(width, X.columns)
    total = tl.cdiv(rows, X.rows) * across
    copied = 0
    block = ticket(state, 0)
    while block < total:
        later = ticket(state, 0)
        r = (block // across).to(tl.int64) * X.rows + tl.arange(0, X.rows)
        c = (block % across).to(tl.int64) * X.columns + tl.arange(0, X.columns)
        mask = (r < rows)[:, None] & (c < width)[None, :]
        at = tl.multiple_of(_offsets(r, n1, n2, n3, s0, s1, s2, s3), V)
        value = tl.load(x + (at[:, None] + (c * s4)[None, :]), mask=mask)
        put = tl.multiple_of(r * width, V)
        tl.store(staging + (put[:, None] + c[None, :]), value, mask=mask)
        copied += 1
        block = later
    return copied, total


@device_function
def _combine(a, b, X: tl.constexpr):
    if X.op == "max":
        result = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif X.op == "min":
        result = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        result = a + b
    return result


@device_function
def _combined(staging, start, at, mask, X: tl.constexpr):
    """Elements ``at`` of all members' operands, combined in rank order."""
    W: tl.constexpr = X.world
    source = peer(staging, 0, X.dtype) + start
    total = tl.load(source + at, mask=mask, cache_modifier=".cg").to(X.acc)
    for member in tl.static_range(1, W):
        source = peer(staging, member, X.dtype) + start
        value = tl.load(source + at, mask=mask, cache_modifier=".cg").to(X.acc)
        total = _combine(total, value, X)
    if X.op == "avg":
        total = total / W if X.acc.is_floating() else total // W
    return total.to(X.dtype)


@device_function
def _reduce_share(first, size, start, staging, sums, state, X: tl.constexpr):
    """Combine elements ``first .. first + size`` into this rank's ``sums``, by ticket."""
    BLOCK: tl.constexpr = X.rows * X.columns
    total = tl.cdiv(size, BLOCK).to(tl.int32)
    done = 0
    block = ticket(state, 1)
    while block < total:
        later = ticket(state, 1)
        i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = _combined(staging, start, first + i, i < size, X)
        tl.store(sums + i, value, mask=i < size)
        done += 1
        block = later
    return done, total


@device_function
def _take_pieces(out, pieces, blocks, start, source, number, state, X: tl.constexpr):
    """Fill ``out`` from the pieces. Nobody waits for this: program p begins with block p."""
    V: tl.constexpr = X.vector
    piece = 0
    block = number
    while block < blocks:
        later = ticket(state, 2) + tl.num_programs(0)
        at = pieces + piece * PIECE_WORDS
        while block >= tl.load(at + PIECE_WORDS + 16):
            piece += 1
            at += PIECE_WORDS
        member = tl.load(at).to(tl.int32)
        rows = tl.load(at + 1)
        width = tl.multiple_of(tl.load(at + 2), V)
        n1 = tl.load(at + 3)
        n2 = tl.load(at + 4)
        n3 = tl.load(at + 5)
        across = tl.cdiv(width, X.columns)
        local = block - tl.load(at + 16)
        r = local // across * X.rows + tl.arange(0, X.rows)
        c = local % across * X.columns + tl.arange(0, X.columns)
        mask = (r < rows)[:, None] & (c < width)[None, :]
        take = _offsets(
            r, n1, n2, n3, tl.load(at + 7), tl.load(at + 8), tl.load(at + 9), tl.load(at + 10)
        )
        put = _offsets(
            r, n1, n2, n3, tl.load(at + 12), tl.load(at + 13), tl.load(at + 14), tl.load(at + 15)
        )
        take = tl.multiple_of(tl.load(at + 6) + take, V)[:, None] + c[None, :]
        put = tl.multiple_of(tl.load(at + 11) + put, V)[:, None] + c[None, :]
        if X.op == "" or X.two_shot:
            base = peer(source, member, X.dtype) + start
            value = tl.load(base + take, mask=mask, cache_modifier=".cg")
        else:
            value = _combined(source, start, take, mask, X)
        tl.store(out + put, value, mask=mask)
        block = later


# All numbers but the last stride: see ``_whole``.
_LOOSE = ["dry", "rank", "stage", "blocks", "numel", "share", "half", "half_sums", "rows", "width"]
_LOOSE += ["n1", "n2", "n3", "s0", "s1", "s2", "s3"]


@triton.jit(do_not_specialize=_LOOSE)
def exchange_kernel(
    dry, x, rows, width, n1, n2, n3, s0, s1, s2, s3, s4, out, pieces, blocks, numel, share,
    staging, sums, flags, state, record, stage, trace, rank, half, half_sums, X: tl.constexpr,
):  # fmt: skip
    if dry == 0:
        epoch, turn, number = enter(state)
        parity = (turn & 1).to(tl.int64)
        share = _whole(share, 16)
        start = parity * _whole(half, 16)
        mine = peer(flags, rank, tl.int32)
        box = (rows, width, n1, n2, n3, s0, s1, s2, s3, s4)
        own = peer(staging, rank, X.dtype) + start
        watch = (record, stage, trace)
        since = tracing.begin(watch)
        copied, total = _publish_operand(x, box, own, state, X)
        tracing.end(watch, since, tracing.PUSH, nbytes=tracing.block_bytes(copied, X))
        if finished(state, 0, copied, total, number):
            publish(flags, rank, epoch, X.world, X.lanes)
        wait_members(mine, 0, X.world - 1, epoch, watch, X.lanes)
        if X.two_shot:
            start_sums = parity * _whole(half_sums, 16)
            first = _whole(tl.minimum(rank.to(tl.int64) * share, numel), X.vector)
            size = _whole(tl.minimum(numel - first, share), X.vector)
            own = peer(sums, rank, X.dtype) + start_sums
            since = tracing.begin(watch)
            done, total = _reduce_share(first, size, start, staging, own, state, X)
            tracing.end(watch, since, tracing.SUM)
            if finished(state, 1, done, total, number):
                publish(flags, X.world + rank, epoch, X.world, X.lanes)
            mine += X.world
            wait_members(mine, 0, X.world - 1, epoch, watch, X.lanes)
            since = tracing.begin(watch)
            _take_pieces(out, pieces, blocks, start_sums, sums, number, state, X)
        else:
            since = tracing.begin(watch)
            _take_pieces(out, pieces, blocks, start, staging, number, state, X)
        tracing.end(watch, since, tracing.COLLECT)
        leave(state, epoch, turn, rank, watch, X)
