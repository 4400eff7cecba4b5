"""The symmetric heap: symmetry, reuse, exhaustion, guards."""

import ctypes
import gc
import os
import random
import re
from pathlib import Path

import pytest
import torch

from iris.errors import CheckError, CollectiveMismatchError, HeapExhaustedError, IrisError
from iris.runtime.arena import Arena
from iris.runtime.context import iris

pytestmark = pytest.mark.ranks


def test_arena_coalesces_and_keeps_its_ends_apart():
    arena = Arena(1024)
    for start in (0, 256, 512):
        assert arena.place_low(256, 256, 0) == start
        arena.take(start, 256, low=True)
    assert arena.place_high(256, 256) == 768
    arena.take(768, 256, low=False)
    assert arena.place_low(256, 256, 256) is None
    assert arena.place_high(256, 256) is None
    arena.release(0, 256, low=True)
    assert arena.holes() == [256]
    arena.release(256, 256, low=True)
    assert arena.holes() == [512]
    assert arena.place_low(512, 256, 256) == 0
    arena.release(512, 256, low=True)
    arena.release(768, 256, low=False)
    assert arena.holes() == [1024]


def _churn(order, rounds):
    """Allocate and drop in a heap that holds four blocks; each rank drops in its own time."""
    ctx = iris(4 << 20)
    pick = random.Random(ctx.cur_rank if order == "random" else 0)
    held = []
    offsets = set()
    for _ in range(rounds):
        if len(held) == 3:
            place = {"lifo": -1, "fifo": 0, "random": pick.randrange(3)}[order]
            drop = held.pop(place)
            if order == "random":  # the same blocks in the end, in another order on each rank
                held.clear()
            del drop
        block = ctx.heap.allocate(1 << 20)
        offsets.add(block.offset)
        held.append(block.tensor)
        del block
    # In the order that gives one rank's block back last, at most four places were ever used.
    return sorted(offsets)


@pytest.mark.parametrize("order", ["lifo", "fifo", "random"])
@pytest.mark.parametrize(("world", "rounds"), [(1, 1_000), (2, 3_000)])
def test_dropped_blocks_are_reused(ranks, order, world, rounds):
    # ROCm/iris#72
    for offsets in ranks(world).run(_churn, order, rounds):
        assert set(offsets) <= {n << 20 for n in range(4)}


def _drop_on_one_rank_only():
    ctx = iris(1 << 20)
    x = ctx.full((128 << 10,), ctx.cur_rank, dtype=torch.float32)
    kept = x if ctx.cur_rank == 1 else None
    del x
    with pytest.raises(HeapExhaustedError):
        ctx.zeros(192 << 10)  # would need the place of x, which rank 1 still holds
    assert kept is None or kept.eq(1).all()
    del kept
    return ctx.zeros(192 << 10).numel()


def test_a_block_is_reused_only_when_all_ranks_dropped_it(ranks):
    assert ranks(3).run(_drop_on_one_rank_only) == [192 << 10] * 3


def _cycle():
    ctx = iris(1 << 20)
    gc.disable()
    try:
        holder = [ctx.zeros(160 << 10)]
        holder.append(holder)
        del holder
        return ctx.zeros(160 << 10).numel()
    finally:
        gc.enable()


def test_blocks_in_reference_cycles_are_found(ranks):
    assert ranks(2).run(_cycle) == [160 << 10] * 2


def _half_after_freeing_every_second():
    ctx = iris(1 << 20)
    small = [ctx.zeros(8 << 10) for _ in range(16)]  # half of the heap, in 32 KiB pieces
    del small[::2]
    half = ctx.zeros(128 << 10)
    again = [ctx.zeros(8 << 10) for _ in range(8)]  # fill the holes
    return half.numel(), len(again), ctx.heap.find(again[-1])[0].offset < 512 << 10


def test_holes_are_filled_and_large_blocks_pass_them(ranks):
    assert ranks(2).run(_half_after_freeing_every_second) == [(128 << 10, 8, True)] * 2


def _local_histories():
    ctx = iris(1 << 20)
    if ctx.cur_rank == 1:
        junk = [torch.zeros(1000 * n) for n in range(10)]
        del junk[::2]
    offsets = []
    for n in range(1, 20):
        x = ctx.zeros(100 * n)
        offsets.append(ctx.heap.find(x)[0].offset)
        target = ctx.heap.peer_tensor(x, (ctx.cur_rank + 1) % ctx.num_ranks)
        target.fill_(n + ctx.cur_rank)  # at once: the allocation is usable everywhere
        ctx.barrier()
        assert x.eq(n + (ctx.cur_rank - 1) % ctx.num_ranks).all()
        if n % 3:
            keep = x  # noqa: F841  some live longer
    return offsets


def test_offsets_are_equal_whatever_ranks_allocate_elsewhere(ranks):
    # pytorch/pytorch#190977
    offsets = ranks(3).run(_local_histories)
    assert offsets[0] == offsets[1] == offsets[2]


def _groups_and_world():
    """Blocks of groups and of the world share the heap, from both ends."""
    ctx = iris(1 << 20)
    pair = ctx.group([0, 2]) if ctx.cur_rank != 1 else None
    for n in range(30):
        world = ctx.full((1 << 15,), float(ctx.cur_rank))
        if pair:
            block = ctx.heap.allocate(100_000 + 1000 * n, pair)
            block.tensor.fill_(ctx.cur_rank + 1)
            ctx.barrier(group=pair.ranks)
            assert [int(block.peer(i)[-1]) for i in (0, 1)] == [1, 3]
            assert block.peers[pair.index] == block.tensor.data_ptr()
            ctx.barrier(group=pair.ranks)
        assert world.eq(ctx.cur_rank).all()
        world = block = None
    if pair:
        big = ctx.heap.allocate(600_000, pair)
    with pytest.raises(HeapExhaustedError, match="on rank 0, 1, 2"):
        ctx.zeros(600_000, dtype=torch.uint8)
    if pair:
        del big
    return ctx.zeros(600_000, dtype=torch.uint8).numel()


def test_groups_allocate_beside_the_world(ranks):
    assert ranks(3).run(_groups_and_world) == [600_000] * 3


def _exhaust():
    ctx = iris(1 << 20)
    held = [ctx.zeros(64 << 10) for _ in range(3)]
    small = ctx.ones(100)
    with pytest.raises(HeapExhaustedError) as caught:
        ctx.zeros(2 << 20, dtype=torch.uint8)
    assert ctx.zeros(1000).numel() == 1000
    assert len(held) + len(small) == 103
    return str(caught.value)


def test_exhaustion_says_all_and_a_smaller_allocation_works(ranks):
    # Sandia-OpenSHMEM/SOS#320
    lines = ranks(2).run(_exhaust)[1].splitlines()
    first = int(lines[0].split(":")[1].split()[0]) - 4
    here = "test_runtime_heap.py"
    assert lines == [
        f"heap exhausted at {here}:{first + 4} on rank 0, 1",
        "  requested  2097152 bytes",
        "  free       261632 bytes, largest hole 261632 bytes",
        "  capacity   1048576 bytes a rank (this is rank 1)",
        f"  held       786432 bytes in 3 blocks from {here}:{first + 1}",
        f"  held       512 bytes in 1 blocks from {here}:{first + 2}",
        "help: raise heap_size in iris.iris(heap_size=1048576), or drop tensors",
    ]


def _different_tensors():
    ctx = iris(1 << 20)
    rows, texts = torch.arange(6.0).reshape(2, 3), []
    for make in (
        lambda: ctx.zeros(100 + ctx.cur_rank),
        lambda: ctx.zeros(2, 3) if ctx.cur_rank else ctx.zeros(3, 2),
        lambda: ctx.empty(4, dtype=[torch.float32, torch.int32][ctx.cur_rank]),
        lambda: ctx.as_symmetric(rows if ctx.cur_rank else rows.T.contiguous().T),
    ):
        with pytest.raises(CollectiveMismatchError) as caught:
            make()
        texts.append(re.sub(r"py:\d+", "py:7", str(caught.value)))
        assert ctx.zeros(10).numel() == 10
    return texts


def test_different_tensors_are_refused_on_all_ranks(ranks):
    first, second = ranks(2).run(_different_tensors)
    assert first == second
    both = [
        ("400 bytes of float32[100]", "404 bytes of float32[101]"),
        ("24 bytes of float32[3, 2]", "24 bytes of float32[2, 3]"),
        ("16 bytes of float32[4]", "16 bytes of int32[4]"),
        ("24 bytes of float32[2, 3] with strides [1, 2]", "24 bytes of float32[2, 3]"),
    ]
    for text, (one, other) in zip(first, both, strict=True):
        assert text == (
            "ranks of one group allocate different tensors\n"
            f"  rank 0: {one} at test_runtime_heap.py:7\n"
            f"  rank 1: {other} at test_runtime_heap.py:7\n"
            "help: allocation is collective: every rank must ask for the same shape and dtype"
        )


def _whole_capacity(size):
    ctx = iris(size)
    x = ctx.empty(size, dtype=torch.uint8)
    x[-1] = ctx.cur_rank + 1
    ctx.barrier()
    return [int(ctx.heap.peer_tensor(x, rank)[-1]) for rank in range(ctx.num_ranks)]


@pytest.mark.parametrize("size", [256, 5 << 20, (4 << 30) + 512])
def test_all_of_the_heap_is_the_users(ranks, size):
    assert ranks(2).run(_whole_capacity, size) == [[1, 2]] * 2


def _foreign_and_empty():
    ctx = iris(1 << 20)
    x = ctx.zeros(4, 6)
    nothing = ctx.zeros(0, 5)
    assert nothing.shape == (0, 5)
    answers = [ctx.is_symmetric(t) for t in (x, x[1:, 2], x.T, nothing)]
    foreign = [ctx.is_symmetric(t) for t in (torch.empty(0), torch.zeros(3), x.clone())]
    with pytest.raises(IrisError, match="not on the symmetric heap"):
        ctx.heap.peer_tensor(torch.empty(0), 0)
    with pytest.raises(IrisError, match=r"out= must be a torch.float32 tensor of shape \(3,\)"):
        ctx.zeros(3, out=torch.empty(3))
    copy = ctx.as_symmetric(torch.arange(6).reshape(2, 3).T)
    assert ctx.is_symmetric(copy)
    assert copy.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert ctx.as_symmetric(copy) is copy
    mixed = x if ctx.cur_rank == 0 else x.clone()
    assert ctx.is_symmetric(ctx.as_symmetric(mixed))  # ranks agree to copy
    return answers, foreign


def test_what_is_on_the_heap(ranks):
    # ROCm/iris#516
    assert ranks(2).run(_foreign_and_empty) == [([True] * 4, [False] * 3)] * 2


def _stray(place, then):
    """Rank 1 writes beside a block of 100 bytes; then all do something that looks at guards."""
    os.environ["IRIS_CHECK"] = "1"
    ctx = iris(1 << 20)
    del os.environ["IRIS_CHECK"]
    x = ctx.zeros(100, dtype=torch.uint8)
    assert ctx.empty(3).isnan().all()  # memory without a value is NaN
    ctx.barrier()
    if ctx.cur_rank == 1:
        ctypes.memset(x.data_ptr() + place, 7, 1)
    with pytest.raises(CheckError) as caught:
        {"barrier": ctx.barrier, "allocation": lambda: ctx.zeros(5), "check": ctx.check}[then]()
    return str(caught.value)


@pytest.mark.parametrize(
    ("place", "then", "side"),
    [
        (100, "barrier", "past the end"),
        (-3, "allocation", "before the start"),
        (130, "check", "past the end"),
    ],
)
def test_guard_words_find_a_stray_store_on_all_ranks(ranks, place, then, side):
    first, second = ranks(2).run(_stray, place, then)
    assert first == second
    assert re.sub(r"py:\d+", "py:7", first) == (
        f"the heap of rank 1 was written {side} of a block: 100 bytes allocated at "
        f"test_runtime_heap.py:7, byte {place} is not as it was\n"
        "help: look for a store without a mask, or a workspace made for a smaller shape"
    )


def _tensors_outlive_the_context():
    with iris(1 << 20) as ctx:
        x = ctx.ones(1000)
    with pytest.raises(IrisError):
        ctx.zeros(1)
    return x.sum().item()


def test_closing_keeps_this_ranks_tensors(ranks):
    assert ranks(2).run(_tensors_outlive_the_context) == [1000, 1000]


def _slabs():
    gc.collect()
    return sum("memfd:iris-heap" in line for line in Path("/proc/self/maps").open())


def _mapped_after_close():
    before = _slabs()  # of programs that earlier tests left
    ctx = iris(1 << 20)
    kept = ctx.ones(3)
    mapped = [_slabs()]
    ctx.close()
    mapped.append(_slabs())
    assert kept.tolist() == [1, 1, 1]
    del kept
    return [count - before for count in (*mapped, _slabs())]


def test_a_closed_context_holds_no_memory(ranks):
    """Also while something still refers to it; a rank's own tensors keep only its own slab."""
    assert ranks(2).run(_mapped_after_close) == [[2, 1, 0]] * 2
