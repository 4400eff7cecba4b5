"""Asking the copy engine for work from inside kernels (see NOTE [Copy queues] in copy_queue.py).

    iris.put(x + i, y + i, rank, peer, heap_bases, copy_engine_ctx=engine, use_copy_engine=True)
    iris.atomic_add(flag, 1, rank, peer, heap_bases, copy_engine_ctx=engine, use_copy_engine=True)
    iris.quiet(engine, peer)

``engine`` is ``ctx.get_copy_engine_ctx()``. What is asked for one peer happens in that order.
"""

import triton
import triton.language as tl

from iris.device import copy_queue
from iris.device.signals import wait
from iris.device.target import device_function, places, publish

QUEUE = tl.constexpr(copy_queue.QUEUE)
READ = tl.constexpr(copy_queue.READ)
DONE = tl.constexpr(copy_queue.DONE)
WRITE = tl.constexpr(copy_queue.WRITE)
BELL = tl.constexpr(copy_queue.BELL)
SLOTS = tl.constexpr(copy_queue.SLOTS)
RECORD = tl.constexpr(copy_queue.RECORD)
STAGE = tl.constexpr(copy_queue.STAGE)
ROW = tl.constexpr(copy_queue.ROW)
WORDS = tl.constexpr(copy_queue.WORDS)
COPY = tl.constexpr(copy_queue.COPY)
ADD = tl.constexpr(copy_queue.ADD)
SET = tl.constexpr(copy_queue.SET)


@device_function
def quiet(copy_engine_ctx, to_rank):
    """Wait until all that this rank's kernels have asked for ``to_rank`` is done there."""
    drain(_row(copy_engine_ctx, to_rank), to_rank)


@device_function
def drain(row, to_rank):
    """``quiet`` for the queue at ``row``."""
    asked = tl.atomic_add(_word(row + WRITE), 0, sem="acquire", scope="gpu")
    _wait_for(row + DONE, asked, row, to_rank, None)


@device_function
def enqueue(row, to_rank, op, dst, src, width, height, dst_pitch, src_pitch):
    """Append a descriptor to the queue at ``row``; waits while that is full."""
    slots = tl.load(row + SLOTS)
    ticket = tl.atomic_add(_word(row + WRITE), 1, sem="relaxed", scope="gpu")
    _wait_for(row + READ, ticket + 1 - slots, row, to_rank, _word(row + BELL) + 1)
    at = _word(row + QUEUE) + ticket % slots * WORDS
    tl.store(at + 1, tl.cast(op, tl.int64))
    tl.store(at + 2, tl.cast(dst, tl.int64))
    tl.store(at + 3, tl.cast(src, tl.int64))
    tl.store(at + 4, tl.cast(width, tl.int64))
    tl.store(at + 5, tl.cast(height, tl.int64))
    tl.store(at + 6, tl.cast(dst_pitch, tl.int64))
    tl.store(at + 7, tl.cast(src_pitch, tl.int64))
    publish(at, ticket + 1)
    tl.store(_word(row + BELL), ticket + 1)


@device_function
def put_rows(
    copy_engine_ctx, to_rank, target, source, width, height=1, target_pitch=0, source_pitch=0
):
    """Ask for a copy of ``height`` rows of ``width`` bytes, which start every so many bytes.

    ``target`` is an address on ``to_rank`` (``iris.translate``). For what is larger than a block.
    """
    row = _row(copy_engine_ctx, to_rank)
    dst = tl.cast(target, tl.int64)
    src = tl.cast(source, tl.int64)
    enqueue(row, to_rank, COPY, dst, src, width, height, target_pitch, source_pitch)


@device_function
def signal(copy_engine_ctx, to_rank, target, value, OP: tl.constexpr = SET):
    """Ask for the integer at ``target``, an address on ``to_rank``, to be set to ``value``."""
    ELEMENT: tl.constexpr = target.dtype.element_ty
    tl.static_assert(
        ELEMENT.is_int() and ELEMENT.primitive_bitwidth >= 32,
        "the copy engine changes int32, int64, uint32 or uint64",
    )
    tl.static_assert(not target.type.is_block(), "the copy engine changes one place at a time")
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    row = _row(copy_engine_ctx, to_rank)
    enqueue(row, to_rank, OP, tl.cast(target, tl.int64), tl.cast(value, tl.int64), SIZE, 1, 0, 0)


@device_function
def put(copy_engine_ctx, to_rank, target, source, mask):
    """Ask for a copy to ``target``, addresses on ``to_rank``; return false for an odd shape.

    A copy engine takes a rectangle: rows of consecutive elements, evenly apart on each side. The
    ``mask`` may cut it to a smaller one.
    """
    row = _row(copy_engine_ctx, to_rank)
    SIZE: tl.constexpr = (source.dtype.element_ty.primitive_bitwidth + 7) // 8
    if source.type.is_block():
        tl.static_assert(len(source.shape) <= 2, "the copy engine takes blocks of 1 or 2 dims")
        target = tl.broadcast_to(target, source.shape)
        address = source.to(tl.int64)
        inside = address == address
        if mask is not None:
            inside = inside & mask
        if len(source.shape) == 1:
            x, columns = _extent(inside.to(tl.int32))
            y = 0
            height = tl.minimum(columns, 1)
            within = (x >= 0) & (x < columns)
        else:
            y, height = _extent(tl.max(inside.to(tl.int32), axis=1))
            x, columns = _extent(tl.max(inside.to(tl.int32), axis=0))
            y = y[:, None]
            x = x[None, :]
            within = (y >= 0) & (y < height) & (x >= 0) & (x < columns)
        dst, dst_pitch, dst_odd = _rows(target, inside, y, x, height, columns, SIZE)
        src, src_pitch, src_odd = _rows(source, inside, y, x, height, columns, SIZE)
        holes = tl.max((within != inside).to(tl.int32))
        plain = dst_odd + src_odd + holes == 0
        width = columns * SIZE
    else:
        dst = tl.cast(target, tl.int64)
        src = tl.cast(source, tl.int64)
        height = tl.cast(1, tl.int32)
        if mask is not None:
            height = tl.cast(mask, tl.int32)
        width = tl.cast(SIZE, tl.int32)
        dst_pitch = tl.cast(SIZE, tl.int64)
        src_pitch = tl.cast(SIZE, tl.int64)
        plain = height >= 0
    if plain & (height > 0):
        enqueue(row, to_rank, COPY, dst, src, width, height, dst_pitch, src_pitch)
    return plain


@device_function
def _extent(some):
    """Places along a dim counted from the first one that is inside, and how many are."""
    place = places(some)
    first = tl.min(tl.where(some > 0, place, some.shape[0]), axis=0)
    return place - first, tl.sum(some, axis=0)


@device_function
def _rows(ptr, inside, y, x, height, columns, SIZE: tl.constexpr):
    """First address, bytes between rows, and whether any element is elsewhere."""
    address = ptr.to(tl.int64)
    first = tl.min(tl.where(inside, address, 0x7FFFFFFFFFFFFFFF))
    last = tl.max(tl.where(inside, address, 0))
    width = columns * SIZE
    # A single row has no pitch; one that is as wide as the row does.
    gaps = tl.maximum(height - 1, 1)
    pitch = tl.where(height > 1, (last - first + SIZE - width) // gaps, width)
    expected = first + y * pitch + x * SIZE
    odd = tl.max((inside & (address != expected)).to(tl.int32))
    odd = tl.maximum(odd, (pitch < width).to(tl.int32))
    return first, pitch, odd


@device_function
def _row(copy_engine_ctx, to_rank):
    tl.static_assert(
        copy_engine_ctx is not None,
        "the copy engine needs copy_engine_ctx=ctx.get_copy_engine_ctx() of a context that was "
        "created with engines=('sdma',)",
    )
    return copy_engine_ctx + to_rank * ROW


@device_function
def _word(entry):
    """The int64 at the address that is at ``entry``."""
    return tl.cast(tl.load(entry), tl.pointer_type(tl.int64))


@device_function
def _wait_for(counter, ticket, row, to_rank, source):
    record, stage = _word(row + RECORD), tl.load(row + STAGE)
    wait(_word(counter), ticket, record, stage, to_rank, source=source)


@triton.jit(do_not_specialize=["address", "value", "wide", "stage", "peer"])
def wait_kernel(address, value, wide, record, stage, peer):
    """Hold a stream until the flag at ``address`` is at or past ``value``."""
    if wide != 0:
        wait(tl.cast(address, tl.pointer_type(tl.int64)), value, record, stage, peer)
    else:
        wait(tl.cast(address, tl.pointer_type(tl.int32)), value, record, stage, peer)


@triton.jit(do_not_specialize=["address", "value", "wide", "add"])
def signal_kernel(address, value, wide, add):
    """Set the integer at ``address`` or add to it, after all before on the stream."""
    if wide != 0:
        word = tl.cast(address, tl.pointer_type(tl.int64))
        if add != 0:
            tl.atomic_add(word, value, sem="release", scope="sys")
        else:
            tl.atomic_xchg(word, value, sem="release", scope="sys")
    else:
        half = tl.cast(address, tl.pointer_type(tl.int32))
        small = value.to(tl.int32)
        if add != 0:
            tl.atomic_add(half, small, sem="release", scope="sys")
        else:
            tl.atomic_xchg(half, small, sem="release", scope="sys")
