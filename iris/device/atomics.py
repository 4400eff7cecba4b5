"""Atomic operations on the memory of any rank, for use inside ``@triton.jit`` kernels.

    old = iris.atomic_add(counter, 1, rank, peer, heap_bases)

``from_rank`` is the calling rank, ``to_rank`` the one whose memory changes. ``sem`` is "acq_rel"
(default), "acquire", "release" or "relaxed"; ``scope`` is "sys" (default: peers look at what
changes), "gpu" or "cta". All return the old value.

    add, sub                 int32 int64 uint32 uint64 float16 float32 float64, and bfloat16 on GPUs
    min, max                 int32 int64 uint32 uint64 float32
    and, or, xor             int32 int64 uint32 uint64
    xchg, cas                all of these of 32 and 64 bits

Any other dtype is refused at compile time.
"""

import triton.language as tl

from iris.device import copy_engine
from iris.device.ops import translate
from iris.device.target import INTERPRETED, SYSTEM, device_function, spread


@device_function
def atomic_add(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None,
    scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None, copy_engine_ctx=None,
    use_copy_engine: tl.constexpr = False,
):  # fmt: skip
    """Add ``val`` to what ``to_rank`` has at ``pointer``.

    With ``use_copy_engine`` it only asks for that, after what was asked for ``to_rank`` before: on
    one integer of 32 or 64 bits, without ``mask``, and it returns 0.
    """
    ELEMENT: tl.constexpr = pointer.dtype.element_ty
    tl.static_assert(
        ELEMENT.primitive_bitwidth >= 32 or ELEMENT.is_floating(),
        "atomic_add takes int32, int64, uint32, uint64, float16, bfloat16, float32 or float64",
    )
    tl.static_assert(
        not (INTERPRETED and ELEMENT.is_bf16()),
        "atomic_add: Triton's interpreter has no bfloat16 add; use float32 on CPU ranks",
    )
    target = translate(pointer, heap_bases, from_rank, to_rank, hint)
    if use_copy_engine:
        tl.static_assert(mask is None, "atomic_add: use_copy_engine takes no mask")
        copy_engine.signal(copy_engine_ctx, to_rank, target, val, copy_engine.ADD)
        old = tl.cast(0, ELEMENT)
    else:
        old = tl.atomic_add(target, spread(val, target), mask=mask, sem=sem, scope=scope)
    return old


@device_function
def atomic_sub(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None,
    scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
):  # fmt: skip
    """Subtract ``val`` from what ``to_rank`` has at ``pointer``."""
    negative = 0 - tl.cast(val, pointer.dtype.element_ty)
    return atomic_add(pointer, negative, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@device_function
def atomic_min(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None,
    scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
):  # fmt: skip
    """Lower what ``to_rank`` has at ``pointer`` to ``val`` where ``val`` is less."""
    _check_ordered(pointer, "atomic_min")
    target = translate(pointer, heap_bases, from_rank, to_rank, hint)
    return tl.atomic_min(target, spread(val, target), mask=mask, sem=sem, scope=scope)


@device_function
def atomic_max(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None,
    scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
):  # fmt: skip
    """Raise what ``to_rank`` has at ``pointer`` to ``val`` where ``val`` is greater."""
    _check_ordered(pointer, "atomic_max")
    target = translate(pointer, heap_bases, from_rank, to_rank, hint)
    return tl.atomic_max(target, spread(val, target), mask=mask, sem=sem, scope=scope)


@device_function
def atomic_and(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None,
    scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
):  # fmt: skip
    """Replace what ``to_rank`` has at ``pointer`` by its bitwise and with ``val``."""
    _check_integer(pointer, "atomic_and")
    target = translate(pointer, heap_bases, from_rank, to_rank, hint)
    return tl.atomic_and(target, spread(val, target), mask=mask, sem=sem, scope=scope)


@device_function
def atomic_or(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None,
    scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
):  # fmt: skip
    """Replace what ``to_rank`` has at ``pointer`` by its bitwise or with ``val``."""
    _check_integer(pointer, "atomic_or")
    target = translate(pointer, heap_bases, from_rank, to_rank, hint)
    return tl.atomic_or(target, spread(val, target), mask=mask, sem=sem, scope=scope)


@device_function
def atomic_xor(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None,
    scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
):  # fmt: skip
    """Replace what ``to_rank`` has at ``pointer`` by its bitwise exclusive or with ``val``."""
    _check_integer(pointer, "atomic_xor")
    target = translate(pointer, heap_bases, from_rank, to_rank, hint)
    return tl.atomic_xor(target, spread(val, target), mask=mask, sem=sem, scope=scope)


@device_function
def atomic_xchg(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None,
    scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
):  # fmt: skip
    """Put ``val`` in place of what ``to_rank`` has at ``pointer``."""
    ELEMENT: tl.constexpr = pointer.dtype.element_ty
    target = _words(translate(pointer, heap_bases, from_rank, to_rank, hint), "atomic_xchg")
    new = _bits(val, ELEMENT, target)
    return tl.atomic_xchg(target, new, mask=mask, sem=sem, scope=scope).to(ELEMENT, bitcast=True)


@device_function
def atomic_cas(
    pointer, cmp, val, from_rank, to_rank, heap_bases, sem: tl.constexpr = None,
    scope: tl.constexpr = SYSTEM, hint: tl.constexpr = None,
):  # fmt: skip
    """Put ``val`` in place of what ``to_rank`` has at ``pointer`` where its bits are ``cmp``'s."""
    ELEMENT: tl.constexpr = pointer.dtype.element_ty
    target = _words(translate(pointer, heap_bases, from_rank, to_rank, hint), "atomic_cas")
    old = _bits(cmp, ELEMENT, target)
    new = _bits(val, ELEMENT, target)
    return tl.atomic_cas(target, old, new, sem=sem, scope=scope).to(ELEMENT, bitcast=True)


@device_function
def _check_ordered(pointer, NAME: tl.constexpr):
    ELEMENT: tl.constexpr = pointer.dtype.element_ty
    tl.static_assert(
        ELEMENT.is_fp32() or (ELEMENT.is_int() and ELEMENT.primitive_bitwidth >= 32),
        NAME + " takes int32, int64, uint32, uint64 or float32",
    )


@device_function
def _check_integer(pointer, NAME: tl.constexpr):
    ELEMENT: tl.constexpr = pointer.dtype.element_ty
    tl.static_assert(
        ELEMENT.is_int() and ELEMENT.primitive_bitwidth >= 32,
        NAME + " takes int32, int64, uint32 or uint64",
    )


@device_function
def _words(pointer, NAME: tl.constexpr):
    """Return ``pointer`` as one to integers: not every backend exchanges or compares floats."""
    ELEMENT: tl.constexpr = pointer.dtype.element_ty
    tl.static_assert(
        ELEMENT.primitive_bitwidth >= 32,
        NAME + " takes int32, int64, uint32, uint64, float32 or float64",
    )
    WORD: tl.constexpr = tl.int32 if ELEMENT.primitive_bitwidth == 32 else tl.int64
    return tl.cast(pointer, tl.pointer_type(WORD))


@device_function
def _bits(value, ELEMENT: tl.constexpr, target):
    """Return ``value`` as ELEMENT, in the bits and the shape that ``target`` takes."""
    bits = tl.cast(value, ELEMENT).to(target.dtype.element_ty, bitcast=True)
    return spread(bits, target)
