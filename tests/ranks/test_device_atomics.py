"""Atomics on the memory of other ranks."""

import pytest
import torch
import triton
import triton.language as tl

import iris
import iris.device.pickling  # kernels of this file travel to the ranks
from iris.device import atomics
from iris.device.context import DeviceContext

pytestmark = pytest.mark.ranks

INTEGERS = [torch.int32, torch.int64, torch.uint32, torch.uint64]
WORDS = [*INTEGERS, torch.float32, torch.float64]
CASES = {
    "add": [*WORDS, torch.float16],
    "sub": [*WORDS, torch.float16],
    "min": [*INTEGERS, torch.float32],
    "max": [*INTEGERS, torch.float32],
    "and": INTEGERS,
    "or": INTEGERS,
    "xor": INTEGERS,
    "xchg": WORDS,
    "cas": WORDS,
}
EXPECTED = {
    "add": lambda old, new: old + new,
    "sub": lambda old, new: old - new,
    "min": min,
    "max": max,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "xchg": lambda old, new: new,
    "cas": lambda old, new: new if old == 12 else old,
}
PAIRS = [(12, 5), (19, 12), (100, 7)]  # old and new values


@triton.jit
def one_each(
    words, target, value, old, bases, rank: tl.constexpr, W: tl.constexpr, OP: tl.constexpr
):
    """Apply OP with each element of ``value`` to the peer, as a function and as a method."""
    ctx = DeviceContext.initialize(words, rank, W)
    peer: tl.constexpr = (rank + 1) % W
    i = tl.arange(0, 4)
    mask = i < 3
    new = tl.load(value + i)
    if OP == "add":
        got = atomics.atomic_add(target + i, new, rank, peer, bases, mask)
        again = ctx.atomic_add(target + 4 + i, new, peer, mask)
    elif OP == "sub":
        got = atomics.atomic_sub(target + i, new, rank, peer, bases, mask)
        again = ctx.atomic_sub(target + 4 + i, new, peer, mask)
    elif OP == "min":
        got = atomics.atomic_min(target + i, new, rank, peer, bases, mask)
        again = ctx.atomic_min(target + 4 + i, new, peer, mask)
    elif OP == "max":
        got = atomics.atomic_max(target + i, new, rank, peer, bases, mask)
        again = ctx.atomic_max(target + 4 + i, new, peer, mask)
    elif OP == "and":
        got = atomics.atomic_and(target + i, new, rank, peer, bases, mask)
        again = ctx.atomic_and(target + 4 + i, new, peer, mask)
    elif OP == "or":
        got = atomics.atomic_or(target + i, new, rank, peer, bases, mask)
        again = ctx.atomic_or(target + 4 + i, new, peer, mask)
    elif OP == "xor":
        got = atomics.atomic_xor(target + i, new, rank, peer, bases, mask)
        again = ctx.atomic_xor(target + 4 + i, new, peer, mask)
    elif OP == "xchg":
        got = atomics.atomic_xchg(target + i, new, rank, peer, bases, mask)
        again = ctx.atomic_xchg(target + 4 + i, new, peer, mask)
    else:  # no mask: the fourth element is compared with 12 too, and is not
        got = atomics.atomic_cas(target + i, 12, new, rank, peer, bases)
        again = ctx.atomic_cas(target + 4 + i, 12, new, peer)
    tl.store(old + i, got, mask=mask)
    tl.store(old + 4 + i, again, mask=mask)


def check_op(op, dtypes):
    ctx = iris.iris(1 << 20)
    for dtype in dtypes:
        olds, news = (torch.tensor([*column, 3]).to(dtype) for column in zip(*PAIRS, strict=True))
        target = ctx.empty(8, dtype=dtype)
        target.copy_(torch.cat([olds, olds]))
        old = torch.zeros(8, dtype=dtype, device=ctx.device)
        value = news.to(ctx.device)
        ctx.barrier()
        one_each[(1,)](
            ctx.get_device_context(),
            target,
            value,
            old,
            ctx.get_heap_bases(),
            ctx.cur_rank,
            ctx.num_ranks,
            op,
        )
        ctx.barrier()
        expected = [*(EXPECTED[op](*pair) for pair in PAIRS), 3]
        assert target.tolist() == expected * 2, (dtype, target)
        assert old.tolist() == [12, 19, 100, 0] * 2, (dtype, old)


@pytest.mark.parametrize("op", CASES)
def test_each_op_on_each_documented_dtype(ranks, op):
    # triton-lang/triton#4992
    ranks(2).run(check_op, op, CASES[op])


@triton.jit
def signed_extremes(target, bases, rank, peer):
    i = tl.arange(0, 2)
    low = tl.where(i == 0, -3, 4).to(target.dtype.element_ty)
    atomics.atomic_min(target + i, low, rank, peer, bases)
    atomics.atomic_max(target + 2 + i, low, rank, peer, bases)


def check_signs():
    ctx = iris.iris(1 << 20)
    for dtype in (torch.int32, torch.int64, torch.float32):
        target = ctx.empty(4, dtype=dtype)
        target.copy_(torch.tensor([-1, -2, -5, -6]).to(dtype))
        ctx.barrier()
        signed_extremes[(1,)](target, ctx.get_heap_bases(), ctx.cur_rank, 1 - ctx.cur_rank)
        ctx.barrier()
        assert target.tolist() == [-3, -2, -3, 4]


def test_minimum_and_maximum_of_negative_numbers(ranks):
    ranks(2).run(check_signs)


@triton.jit
def refused(target, bases, OP: tl.constexpr):
    if OP == "add":
        atomics.atomic_add(target, 1, 0, 0, bases)
    elif OP == "min":
        atomics.atomic_min(target, 1, 0, 0, bases)
    elif OP == "and":
        atomics.atomic_and(target, 1, 0, 0, bases)
    else:
        atomics.atomic_xchg(target, 1, 0, 0, bases)


def check_refusals():
    ctx = iris.iris(1 << 20)
    cases = [
        ("add", torch.int8, "atomic_add takes int32, int64, uint32"),
        ("min", torch.float64, "atomic_min takes int32, int64, uint32, uint64 or float32"),
        ("and", torch.float32, "atomic_and takes int32, int64, uint32 or uint64"),
        ("xchg", torch.bfloat16, "atomic_xchg takes int32, int64"),
    ]
    if ctx.device.type == "cpu":
        cases.append(("add", torch.bfloat16, "interpreter has no bfloat16 add; use float32"))
    for op, dtype, text in cases:
        with pytest.raises(Exception) as caught:  # noqa: PT011  (the compiler's, or the rule's own)
            refused[(1,)](ctx.zeros(1, dtype=dtype), ctx.get_heap_bases(), op)
        error, said = caught.value, ""
        while error is not None:  # the compiler wraps it in an error for every call
            said, error = f"{said}\n{error}", error.__cause__
        assert text in said


def test_other_dtypes_are_refused_by_name(ranks):
    ranks(1).run(check_refusals)


@triton.jit
def count_up(counters, bases, rank, W: tl.constexpr, times):
    done = 0
    while done < times:
        for peer in tl.static_range(W):
            atomics.atomic_add(counters, 1, rank, peer, bases, sem="relaxed")
            atomics.atomic_sub(counters + 1, 2, rank, peer, bases, sem="relaxed")
        done += 1


def count_everywhere(programs, times):
    ctx = iris.iris(1 << 20)
    counters = ctx.zeros(2, dtype=torch.int64)
    ctx.barrier()
    count_up[(programs,)](counters, ctx.get_heap_bases(), ctx.cur_rank, ctx.num_ranks, times)
    ctx.barrier()
    total = ctx.num_ranks * programs * times
    assert counters.tolist() == [total, -2 * total]


@pytest.mark.parametrize("world", [2, 4])
def test_no_increment_is_lost(ranks, world):
    programs, times = (64, 100) if torch.cuda.is_available() else (4, 10)
    ranks(world).run(count_everywhere, programs, times)


@triton.jit
def add_under_lock(lock, plain, bases, rank, times):
    done = 0
    while done < times:
        while atomics.atomic_cas(lock, 0, 1, rank, 0, bases, sem="acquire") != 0:
            pass
        address = atomics.translate(plain, bases, rank, 0)
        tl.store(address, tl.load(address, volatile=True) + 1)
        tl.debug_barrier()
        atomics.atomic_xchg(lock, 0, rank, 0, bases, sem="release")
        done += 1


def count_under_lock(programs, times):
    ctx = iris.iris(1 << 20)
    lock = ctx.zeros(1, dtype=torch.int32)
    plain = ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    add_under_lock[(programs,)](lock, plain, ctx.get_heap_bases(), ctx.cur_rank, times)
    ctx.barrier()
    if ctx.cur_rank == 0:
        assert int(plain) == ctx.num_ranks * programs * times


@pytest.mark.parametrize("world", [2, 4])
def test_a_spin_lock_protects_plain_stores(ranks, world):
    # triton-lang/triton#1421
    programs, times = (64, 100) if torch.cuda.is_available() else (2, 10)
    ranks(world).run(count_under_lock, programs, times)
