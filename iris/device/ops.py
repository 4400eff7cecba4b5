"""Memory operations on peers, for use inside ``@triton.jit`` kernels.

Every function takes a pointer into this rank's symmetric memory and the ranks concerned, and works
on the same place of another rank. ``heap_bases`` is ``ctx.get_heap_bases()``; ``peer_bases``, the
table that ``ctx.allocate_symmetric`` returns with a tensor, serves as well: all that counts is that
entry r is where rank r has what this rank has at its own entry.

    @triton.jit
    def pull(x, y, heap_bases, rank: tl.constexpr, peer: tl.constexpr, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(y + i, iris.load(x + i, rank, peer, heap_bases))

Common arguments: ``mask``, ``other``, ``volatile`` and the cache modifiers are those of ``tl.load``
and ``tl.store``. ``hint`` (a number, or one for each dim) says that the pointers are multiples of
it and run on for as many elements; it is needed only where Triton cannot see that for itself.
"""

import triton.language as tl

from iris.device import copy_engine
from iris.device.target import device_function

# Two entries of a table differ by a multiple of this many bytes: allocations are aligned to more.
TABLE_ALIGN = tl.constexpr(16)


@device_function
def translate(ptr, bases, cur_rank, to_rank, hint: tl.constexpr = None):
    """Return the place on ``to_rank`` of what ``ptr`` points to on ``cur_rank``.

    ``bases`` has an address for each rank.
    """
    return _moved(ptr, tl.load(bases + cur_rank), tl.load(bases + to_rank), hint)


@device_function
def _moved(ptr, here, there, hint: tl.constexpr):
    """Return ``ptr`` moved by the bytes from ``here`` to ``there``.

    The move is counted in elements, and said to be aligned, so that Triton's analysis of
    contiguity carries over and accesses stay as wide as on the local pointer. A cast of the pointer
    to bytes and back loses it. (The hints must sit on operations of this function.)
    """
    SIZE: tl.constexpr = (ptr.dtype.element_ty.primitive_bitwidth + 7) // 8
    distance = tl.multiple_of(there.to(tl.int64) - here.to(tl.int64), TABLE_ALIGN)
    if SIZE > 1:
        distance = tl.multiple_of(distance // SIZE, TABLE_ALIGN // SIZE)
    moved = ptr + distance
    if hint is not None:
        moved = tl.max_contiguous(tl.multiple_of(moved, hint), hint)
    return moved


@device_function
def load(
    pointer, to_rank, from_rank, heap_bases, mask=None, other=None,
    cache_modifier: tl.constexpr = None, volatile: tl.constexpr = False, hint: tl.constexpr = None,
):  # fmt: skip
    """Return what ``from_rank`` has at ``pointer``. ``to_rank`` is the calling rank."""
    source = translate(pointer, heap_bases, to_rank, from_rank, hint)
    return tl.load(source, mask=mask, other=other, cache_modifier=cache_modifier, volatile=volatile)


@device_function
def store(
    pointer, value, from_rank, to_rank, heap_bases, mask=None, cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):  # fmt: skip
    """Store ``value`` at ``pointer`` on ``to_rank``. ``from_rank`` is the calling rank."""
    target = translate(pointer, heap_bases, from_rank, to_rank, hint)
    tl.store(target, value, mask=mask, cache_modifier=cache_modifier)


@device_function
def put(
    from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None,
    load_cache_modifier: tl.constexpr = None, store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None, copy_engine_ctx=None, use_copy_engine: tl.constexpr = False,
):  # fmt: skip
    """Copy from ``from_ptr`` here to ``to_ptr`` on ``to_rank``. ``from_rank`` is the caller.

    With ``use_copy_engine`` it only asks for the copy, of what ``from_ptr`` points to until
    ``iris.quiet`` returns; a block that is no rectangle is copied at once all the same.
    """
    target = translate(to_ptr, heap_bases, from_rank, to_rank, hint)
    if use_copy_engine:
        if not copy_engine.put(copy_engine_ctx, to_rank, target, from_ptr, mask):
            value = tl.load(from_ptr, mask=mask, other=other, cache_modifier=load_cache_modifier)
            tl.store(target, value, mask=mask, cache_modifier=store_cache_modifier)
    else:
        value = tl.load(from_ptr, mask=mask, other=other, cache_modifier=load_cache_modifier)
        tl.store(target, value, mask=mask, cache_modifier=store_cache_modifier)


@device_function
def get(
    from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None,
    load_cache_modifier: tl.constexpr = None, store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):  # fmt: skip
    """Copy from ``from_ptr`` on the peer to ``to_ptr`` here.

    One of ``from_rank`` and ``to_rank`` is the calling rank and the other the peer, in either order
    (see NOTE [Which rank calls get]). ``DeviceContext.get`` need not find out which.
    """
    here, there = _caller_first(from_ptr, mask, from_rank, to_rank, heap_bases)
    source = _moved(from_ptr, here, there, hint)
    value = tl.load(source, mask=mask, other=other, cache_modifier=load_cache_modifier)
    tl.store(to_ptr, value, mask=mask, cache_modifier=store_cache_modifier)


# NOTE [Which rank calls get]
# The field documents get(from_ptr, to_ptr, source rank, calling rank), and implements, tests and
# uses get(from_ptr, to_ptr, calling rank, source rank). Programs of both kinds exist. The pointer
# tells: it lies in the caller's slab, and as slabs do not overlap, of two it lies in the one that
# starts last at or before it.
@device_function
def _caller_first(ptr, mask, rank_a, rank_b, bases):
    """Return the bases of both ranks, first of the one whose slab holds ``ptr``."""
    address = ptr.to(tl.int64)
    if mask is not None:
        address = tl.where(mask, address, 0x7FFFFFFFFFFFFFFF)
    if ptr.type.is_block():
        address = tl.min(address)
    a = tl.load(bases + rank_a).to(tl.int64)
    b = tl.load(bases + rank_b).to(tl.int64)
    in_a = (a <= address) & ((b > address) | (b < a))
    return tl.where(in_a, a, b), tl.where(in_a, b, a)


@device_function
def copy(
    src_ptr, dst_ptr, from_rank, to_rank, cur_rank, heap_bases, mask=None, other=None,
    load_cache_modifier: tl.constexpr = None, store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):  # fmt: skip
    """Copy from ``src_ptr`` on ``from_rank`` to ``dst_ptr`` on ``to_rank``.

    Both pointers are those of ``cur_rank``, which calls.
    """
    source = translate(src_ptr, heap_bases, cur_rank, from_rank, hint)
    target = translate(dst_ptr, heap_bases, cur_rank, to_rank, hint)
    value = tl.load(source, mask=mask, other=other, cache_modifier=load_cache_modifier)
    tl.store(target, value, mask=mask, cache_modifier=store_cache_modifier)
