"""Partial results on their way: to the rank that sums them or to all ranks, and the sum in rank order.

Staging of a rank is [halves, members, rows, ld]: one slot for each member's part. A part is rounded to the staging's element type
before it is sent. Flags are [members] for launches that must ``meet``, then [members, tiles]. Sums are fp32 (int32 for integers), in rank order, so every rank and every run gets the same bits.
"""

import triton.language as tl

from iris.device.target import device_function
from iris.lower.kernels.protocol import peer, publish_to, ticket, wait


@device_function
def send_piece(
    value, row, column, slot, shard, M, N, ld, staging, ALL: tl.constexpr, T: tl.constexpr
):
    """Store a [block_m, C] piece of a part in slot row ``slot`` of the staging of each row's owner, or of all members."""
    BM: tl.constexpr = T.block_m
    C: tl.constexpr = T.block_n // T.pieces
    W: tl.constexpr = T.world
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, C)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    part = value.to(T.dtype)
    if ALL:
        at = (slot + rows.to(tl.int64))[:, None] * ld + columns[None, :]
        for member in tl.static_range(W):
            tl.store(peer(staging, member, T.dtype) + at, part, mask=mask)
    else:
        owner = rows // shard
        base = tl.cast(tl.load(staging + owner, mask=rows < M, other=0), tl.pointer_type(T.dtype))
        start = base + (slot + (rows - owner * shard).to(tl.int64)) * ld
        start = tl.multiple_of(start[:, None], [16, 16])
        tl.store(start + columns[None, :], part, mask=mask)


@device_function
def announce_tile(row, column, rank, shard, M, N, flags, epoch, ALL: tl.constexpr, T: tl.constexpr):
    """Tell the owners of a tile's rows, or all members, that this rank's part of it is there."""
    across = tl.cdiv(N, T.block_n)
    tile = row // T.block_m * across + column // T.block_n
    index = T.world + rank * (tl.cdiv(M, T.block_m) * across) + tile
    first = row // shard
    last = (tl.minimum(row + T.block_m, M) - 1) // shard
    if ALL:
        first = row * 0
        last = first + (T.world - 1)
    publish_to(flags, first, last, index, epoch, T.lanes)


@device_function
def wait_tiles(row, last_row, column, M, N, mine, epoch, watch, T: tl.constexpr):
    """Wait for all members' parts of the tiles that hold output rows ``row .. last_row`` at ``column``."""
    LANES: tl.constexpr = T.lanes
    across = tl.cdiv(N, T.block_n)
    tiles = tl.cdiv(M, T.block_m) * across
    members = tl.arange(0, LANES)
    tile_row = row // T.block_m
    while tile_row <= last_row // T.block_m:
        at = T.world + members * tiles + (tile_row * across + column // T.block_n)
        wait(mine + at, members, members < T.world, epoch, watch)
        tile_row += 1


@device_function
def sum_parts(slots, stride, at, mask, T: tl.constexpr):
    """The sum over members of the elements ``at`` of their slots, which are ``stride`` elements apart."""
    W: tl.constexpr = T.world
    total = tl.load(slots + at, mask=mask, cache_modifier=".cg").to(T.acc)
    for member in tl.static_range(1, W):
        total += tl.load(slots + member * stride + at, mask=mask, cache_modifier=".cg").to(T.acc)
    return total


@device_function
def sum_rows(
    number,
    m,
    first_row,
    slots,
    slot_rows,
    M,
    N,
    ld,
    mine,
    epoch,
    state,
    watch,
    store,
    summed,
    env,
    after,
    T: tl.constexpr,
):
    """Sum rows ``first_row .. first_row + m`` of the product, by ticket, as their parts arrive.

    Row ``first_row`` is row 0 of each member's slot; slots begin at ``slots`` and have ``slot_rows`` rows. An item is ``T.run`` blocks
    of [T.rows, T.columns], one below the other: one wait for all. Every block goes to ``store(env, total, row, column, after, T)``, with
    its row within the ``m``; then ``summed(env, item, T)`` is called.
    """
    RUN: tl.constexpr = T.run * T.rows
    across = tl.cdiv(N, T.columns)
    items = tl.cdiv(m, RUN) * across
    # Others may wait for what a program takes by ticket; where nobody does, program p begins with item p.
    if T.awaited:
        item = ticket(state, 0)
    else:
        item = number
    while item < items:
        row = item // across * RUN
        column = item % across * T.columns
        end = tl.minimum(row + RUN, m)
        wait_tiles(first_row + row, first_row + end - 1, column, M, N, mine, epoch, watch, T)
        columns = column + tl.arange(0, T.columns)
        while row < end:
            rows = row + tl.arange(0, T.rows)
            mask = (rows < m)[:, None] & (columns < N)[None, :]
            at = rows.to(tl.int64)[:, None] * ld + columns[None, :]
            total = sum_parts(slots, tl.cast(slot_rows, tl.int64) * ld, at, mask, T)
            store(env, total, row, column, after, T)
            row += T.rows
        summed(env, item, T)
        item = ticket(state, 0)
        if not T.awaited:
            item += tl.num_programs(0)


@device_function
def no_news(env, item, T: tl.constexpr):
    """For sums that nobody waits for."""


@device_function
def finish_sum(env, total, row, column, after, T: tl.constexpr):
    """Store ``after`` of a block of sums; ``env = (target, row stride, column stride, rows, columns, args)``."""
    out, out_row, out_column, m, N, args = env
    rows = row + tl.arange(0, T.rows)
    columns = column + tl.arange(0, T.columns)
    # What is rounded once where sums are sent on is rounded here too, so that all ways of summing give the same bits.
    total = total.to(T.dtype).to(T.acc)
    value = after((total, total), rows, columns, m, N, args)
    at = rows[:, None].to(tl.int64) * out_row + columns[None, :].to(tl.int64) * out_column
    tl.store(
        out + at, value.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (columns < N)[None, :]
    )
