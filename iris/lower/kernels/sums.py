"""Blocks of results on their way between ranks: sent, announced, summed in rank order, collected.

Staging of a rank is [halves, members, rows, ld]: a slot for what each member sends. A part is
rounded to the staging's element type before it is sent; sums are fp32 (int32 for integers) in rank
order, so every rank and every run gets the same bits. Flags are [members] for launches that must
``meet``, then [members, tiles].

Functions here take bundles: ``size = (M, N)`` of the whole result, ``line = (flags, epoch, state,
watch)`` of this rank, ``parts = (slots, rows of a slot, ld)``.
"""

import triton.language as tl

from iris.device.target import device_function, together
from iris.lower.kernels.protocol import (
    crew,
    first_item,
    first_ticket,
    peer,
    publish,
    publish_to,
    ticket,
    wait,
)


@device_function
def tiles_in(rows, columns, T: tl.constexpr):
    """Tiles of a [rows, columns] product."""
    return tl.cdiv(rows, T.block_m) * tl.cdiv(columns, T.block_n)


@device_function
def send_to_owners(value, row, column, slot, shard, size, ld, staging, T: tl.constexpr):
    """Store a piece of a part in slot row ``slot`` of the staging of each row's owner."""
    M, N = size
    rows = row + tl.arange(0, T.block_m)
    columns = column + tl.arange(0, T.block_n // T.pieces)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    owner = rows // shard
    base = tl.cast(tl.load(staging + owner, mask=rows < M, other=0), tl.pointer_type(T.dtype))
    start = base + (slot + (rows - owner * shard).to(tl.int64)) * ld
    start = tl.multiple_of(start[:, None], [16, 16])
    tl.store(start + columns[None, :], value.to(T.dtype), mask=mask)


@device_function
def send_to_all(value, rows, columns, slot, size, ld, staging, T: tl.constexpr):
    """Store a block, of a [M, N] result, at slot row ``slot`` of every member's staging."""
    W: tl.constexpr = T.world
    mask = (rows < size[0])[:, None] & (columns < size[1])[None, :]
    at = (slot + rows.to(tl.int64))[:, None] * ld + columns[None, :]
    for member in tl.static_range(W):
        tl.store(peer(staging, member, T.dtype) + at, value.to(T.dtype), mask=mask)


@device_function
def announce_to_owners(row, column, rank, shard, size, flags, epoch, T: tl.constexpr):
    """Tell the owners of a tile's rows that this rank's part of it is there."""
    M, N = size
    tile = row // T.block_m * tl.cdiv(N, T.block_n) + column // T.block_n
    index = T.world + rank * tiles_in(M, N, T) + tile
    last = (tl.minimum(row + T.block_m, M) - 1) // shard
    publish_to(flags, row // shard, last, index, epoch, T.lanes)


@device_function
def announce_to_all(row, column, first_flag, N, flags, epoch, T: tl.constexpr):
    """Tell all members that this rank's tile is there; its tiles' flags begin at ``first_flag``."""
    tile = row // T.block_m * tl.cdiv(N, T.block_n) + column // T.block_n
    publish(flags, first_flag + tile, epoch, T.world, T.lanes)


@device_function
def wait_tiles(row, last_row, column, size, line, T: tl.constexpr):
    """Wait for all members' parts of rows ``row .. last_row``, ``T.columns`` from ``column`` on."""
    flags, epoch, _, watch = line
    LANES: tl.constexpr = T.lanes
    across = tl.cdiv(size[1], T.block_n)
    lanes = tl.arange(0, LANES * (T.columns // T.block_n))
    members = lanes % LANES
    tile = column // T.block_n + lanes // LANES
    valid = (members < T.world) & (tile < across)
    first = flags + T.world + members * tiles_in(size[0], size[1], T) + tile
    tile_row = row // T.block_m
    while tile_row <= last_row // T.block_m:
        wait(first + tile_row * across, members, valid, epoch, watch)
        tile_row += 1


@device_function
def sum_parts(parts, at, mask, T: tl.constexpr):
    """The sum over members of the elements ``at`` of their slots."""
    W: tl.constexpr = T.world
    slots, slot_rows, ld = parts
    stride = tl.cast(slot_rows, tl.int64) * ld
    total = tl.load(slots + at, mask=mask, cache_modifier=".cg").to(T.acc)
    for member in tl.static_range(1, W):
        total += tl.load(slots + member * stride + at, mask=mask, cache_modifier=".cg").to(T.acc)
    return total


@device_function
def sum_rows(
    number, m, first_row, run, parts, size, line, store, env, summed, news, after, T: tl.constexpr
):
    """Sum rows ``first_row .. first_row + m`` of the result, as their parts arrive.

    Row ``first_row`` is row 0 of each member's slot. An item is ``run`` rows, in blocks of [T.rows,
    T.columns] one below the other: one wait for all. Every block goes to ``store(env, total, row,
    column, after, T)``, with its row within the ``m``; then ``summed(news, item, number of its
    rows, first row, end, T)`` is called. Others may wait for what a program takes by ticket; where
    nobody does (``T.awaited``), program p begins with item p.
    """
    across = tl.cdiv(size[1], T.columns)
    items = tl.cdiv(m, run) * across
    item = first_ticket(line[2], 0, number, T) if T.awaited else first_item(number, T)
    while item < items:
        later = ticket(line[2], 0)
        if not T.awaited:
            later += crew(T)
        row = item // across * run
        column = item % across * T.columns
        end = tl.minimum(row + run, m)
        wait_tiles(first_row + row, first_row + end - 1, column, size, line, T)
        columns = column + tl.arange(0, T.columns)
        while row < end:
            rows = row + tl.arange(0, T.rows)
            mask = (rows < m)[:, None] & (columns < size[1])[None, :]
            at = rows.to(tl.int64)[:, None] * parts[2] + columns[None, :]
            store(env, sum_parts(parts, at, mask, T), row, column, after, T)
            row += T.rows
        block = item // across
        summed(news, item, block, block * run, end, T)
        item = later


@device_function
def no_news(news, item, block, row, end, T: tl.constexpr):
    """For sums that nobody waits for."""


@device_function
def count_columns(news, item, block, row, end, T: tl.constexpr):
    """Note that some columns of a block of rows are stored, for ``norm_rows``."""
    if T.norm > 0:
        together()
        tl.atomic_add(news[0] + block, 1, sem="acq_rel", scope="gpu")


@device_function
def norm_rows(news, M, shard, run, state, T: tl.constexpr):
    """RMSNorm of all rows, each by the program that takes it, once all its columns are stored.

    ``T.norm`` is 2 with a weight, 1 without. Blocks are ``run`` rows of each ``shard``; what is
    counted in them was taken by ticket, so by programs that run.
    """
    counters, epoch, across, N, summed, summed_row, weight, eps, out, out_row = news
    C: tl.constexpr = 4096
    c = tl.arange(0, C)
    goal = across * (epoch + 1)
    row = ticket(state, 2)
    while row < M:
        later = ticket(state, 2)
        count = counters + (row // shard * tl.cdiv(shard, run) + row % shard // run)
        seen = tl.atomic_add(count, 0, sem="acquire", scope="gpu")
        while seen - goal < 0:
            seen = tl.atomic_add(count, 0, sem="acquire", scope="gpu")
        source = summed + row.to(tl.int64) * summed_row
        value = tl.load(source + c, mask=c < N, other=0, cache_modifier=".cg").to(tl.float32)
        squares = value * value
        first = row * 0 + C
        while first < N:
            there = first + c < N
            more = tl.load(source + first + c, mask=there, other=0, cache_modifier=".cg")
            squares += more.to(tl.float32) * more.to(tl.float32)
            first += C
        scale = tl.rsqrt(tl.sum(squares) / N + eps)
        target = out + row.to(tl.int64) * out_row
        _store_scaled(value, scale, weight, c, N, target, T)
        first = row * 0 + C
        while first < N:
            there = first + c < N
            more = tl.load(source + first + c, mask=there, other=0, cache_modifier=".cg")
            _store_scaled(more.to(tl.float32), scale, weight, first + c, N, target, T)
            first += C
        row = later


@device_function
def _store_scaled(value, scale, weight, columns, N, target, T: tl.constexpr):
    value = value * scale
    mask = columns < N
    if T.norm == 2:
        value = value * tl.load(weight + columns, mask=mask, other=0).to(tl.float32)
    tl.store(target + columns, value.to(target.dtype.element_ty), mask=mask)


@device_function
def finish_sum(env, total, row, column, after, T: tl.constexpr):
    """Store ``after`` of a block; ``env = (out, row stride, column stride, rows, columns, args)``.

    What is rounded once where sums are sent on is rounded here too: all ways give the same bits.
    """
    out, out_row, out_column, m, N, args = env
    rows = row + tl.arange(0, T.rows)
    columns = column + tl.arange(0, T.columns)
    total = total.to(T.dtype).to(T.acc)
    value = after((total, total), rows, columns, m, N, args)
    at = rows[:, None].to(tl.int64) * out_row + columns[None, :].to(tl.int64) * out_column
    mask = (rows < m)[:, None] & (columns < N)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@device_function
def collect(
    source, ld, first_flag, shard, run, size, line, rank, number, out, summed, news, after,
    T: tl.constexpr,
):  # fmt: skip
    """Store ``after`` of all members' rows of ``source`` [M, ld], own first, as they arrive.

    Items are those of ``sum_rows``, for each owner; their flags begin at ``first_flag``; ``summed``
    as there. Nobody waits for this but norms: without them program p begins with item p.
    """
    LANES: tl.constexpr = T.lanes
    flags, epoch, state, watch = line
    M, N = size
    across = tl.cdiv(N, T.columns)
    each = tl.cdiv(shard, run) * across
    lane = tl.arange(0, LANES)
    target, out_row, out_column, _, _, args = out
    place = first_ticket(state, 1, number, T) if T.norm > 0 else first_item(number, T)
    while place < each * T.world:
        later = ticket(state, 1)
        if T.norm == 0:
            later += crew(T)
        owner = (place // each + rank) % T.world
        item = place % each
        row = item // across * run
        column = item % across * T.columns
        first = owner * shard
        end = tl.minimum(row + run, tl.minimum(shard, M - first))
        begin = row
        if row < end:
            flag = flags + (first_flag + owner * each + item + lane)
            wait(flag, owner + lane, lane < 1, epoch, watch)
        columns = column + tl.arange(0, T.columns)
        # Rows beyond ``end`` may be the next owner's.
        sink = (target, out_row, out_column, first + end, N, args)
        while row < end:
            rows = first + row + tl.arange(0, T.rows)
            mask = (rows < first + end)[:, None] & (columns < N)[None, :]
            at = rows.to(tl.int64)[:, None] * ld + columns[None, :]
            value = tl.load(source + at, mask=mask, cache_modifier=".cg").to(T.acc)
            finish_sum(sink, value, first + row, column, after, T)
            row += T.rows
        if begin < end:
            block = owner * tl.cdiv(shard, run) + item // across
            summed(news, item, block, first + begin, first + end, T)
        place = later
