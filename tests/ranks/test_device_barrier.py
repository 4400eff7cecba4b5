"""The device barrier: its kernel (which CPU ranks interpret here), and ``ctx.device_barrier``."""

import random
import time

import pytest
import torch
import triton
import triton.language as tl

import iris
import iris.device.pickling  # kernels of this file travel to the ranks
from iris.device import atomics, ops, watch
from iris.device.barrier import DeviceBarrier, prepare
from iris.device.context import DeviceContext

pytestmark = pytest.mark.ranks


@triton.jit(do_not_specialize=["rank", "world"])
def count_arrival(counter, bases, rank, world):
    """Add one to the counter of every rank."""
    peer = 0
    while peer < world:
        tl.atomic_add(ops.translate(counter, bases, rank, peer), 1, scope="sys")
        peer += 1


def count(ctx, counter, alone=False):
    world = 0 if alone else ctx.num_ranks
    count_arrival[(1,)](counter, ctx.get_heap_bases(), ctx.cur_rank, world)


@triton.jit(do_not_specialize=["at"])
def read(counter, seen, at):
    tl.store(seen + at, tl.load(counter, volatile=True))


def nobody_is_early(rounds, epoch):
    """All arrive, meet by the kernel, look who has arrived, and meet again."""
    ctx = iris.iris(1 << 20)
    prepare(ctx)
    barrier = DeviceBarrier.create(ctx, ctx.world, taken=[])
    ctx.watch.flags[barrier.row].fill_((epoch + 2**31) % 2**32 - 2**31)
    ctx.barrier()
    counter = ctx.zeros(1, dtype=torch.int64)
    seen = torch.zeros(rounds, dtype=torch.int64, device=ctx.device)
    read[(1,)](counter, seen, 0)  # loads the kernel, before any rank waits
    count(ctx, torch.zeros_like(counter), alone=True)
    ctx.barrier()
    delays = random.Random(ctx.cur_rank)
    for at in range(rounds):
        if delays.random() < 0.3:
            time.sleep(delays.random() * 0.02)
        count(ctx, counter)
        barrier.launch(ctx.world.ranks)
        read[(1,)](counter, seen, at)
        barrier.launch(ctx.world.ranks)
    ctx.barrier()
    ctx.watch.check()
    assert seen.tolist() == [ctx.num_ranks * (at + 1) for at in range(rounds)]
    flags = ctx.watch.flags[barrier.row].tolist()
    assert flags == [(epoch + 2 * rounds + 2**31) % 2**32 - 2**31] * ctx.num_ranks


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_nobody_leaves_before_all_have_come(ranks, world):
    ranks(world).run(nobody_is_early, 10, 0)


@pytest.mark.parametrize("epoch", [2**31 - 3, 2**32 - 3], ids=["int32", "uint32"])
def test_epochs_wrap(ranks, epoch):
    # alibaba/rtp-llm#1418
    ranks(2).run(nobody_is_early, 5, epoch)


def two_groups(rounds):
    """Ranks 0 and 2 meet twice as often as all do; the kernel on CPU ranks too."""
    ctx = iris.iris(1 << 20)
    prepare(ctx)
    whole = DeviceBarrier.create(ctx, ctx.world, taken=[])
    pair = None
    if ctx.cur_rank in (0, 2):
        pair = DeviceBarrier.create(ctx, ctx.group([2, 0]), taken=[whole.row])
        assert pair.row != whole.row
    ctx.barrier()
    delays = random.Random(ctx.cur_rank)
    for _ in range(rounds):
        time.sleep(delays.random() * 0.01)
        if pair is not None:
            pair.launch([0, 2])
            pair.launch([0, 2])
        whole.launch(ctx.world.ranks)
    ctx.barrier()
    ctx.watch.check()
    assert ctx.watch.flags[whole.row].tolist() == [rounds] * 3
    if pair is not None:
        assert ctx.watch.flags[pair.row].tolist() == [2 * rounds, 0, 2 * rounds]


def test_groups_that_share_ranks_do_not_mix(ranks):
    # pytorch/pytorch#192581
    ranks(3).run(two_groups, 10)


def rows_differ():
    ctx = iris.iris(1 << 20)
    rows = {}
    for members in ([0, 1], [1, 2], [0, 2], [0, 1, 2]):
        if ctx.cur_rank in members:
            barrier = DeviceBarrier.create(ctx, ctx.group(members), taken=list(rows.values()))
            rows[tuple(members)] = barrier.row
    assert len(set(rows.values())) == len(rows)
    return rows


def test_members_agree_on_a_row_of_their_own(ranks):
    agreed = {}
    for rows in ranks(3).run(rows_differ):
        for members, row in rows.items():
            assert agreed.setdefault(members, row) == row


def flags_by_the_method(group, rounds):
    """H3: the method is a real barrier on every kind of rank."""
    ctx = iris.iris(1 << 20)
    prepare(ctx)
    flags = ctx.zeros(ctx.num_ranks, dtype=torch.int32)
    seen = torch.zeros(rounds + 1, ctx.num_ranks, dtype=torch.int32, device=ctx.device)
    members = group or list(range(ctx.num_ranks))
    meet = ctx.barrier  # in turn 0, which also loads the kernels that torch needs here
    for turn in range(rounds + 1):
        if ctx.cur_rank in members:
            time.sleep(0.02 * ((ctx.cur_rank + turn) % ctx.num_ranks))
            for peer in members:
                ctx.heap.peer_tensor(flags, peer)[ctx.cur_rank] = turn
            meet(group=group)
            seen[turn].copy_(flags)
            meet(group=group)
            meet = ctx.device_barrier
    ctx.barrier()
    for turn, row in enumerate(seen.tolist()):
        present = [turn if rank in members else 0 for rank in range(ctx.num_ranks)]
        assert row == (present if ctx.cur_rank in members else [0] * ctx.num_ranks)


@pytest.mark.parametrize(("world", "group"), [(2, None), (4, None), (4, [3, 1])])
def test_the_method_is_a_barrier(ranks, world, group):
    ranks(world).run(flags_by_the_method, group, 4)


@triton.jit(do_not_specialize=["rounds"])
def put_and_meet(
    words, x, slots, wrong, rounds, rank: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr
):
    """Each round every rank puts fresh numbers to all; what came by put equals what get finds."""
    ctx = DeviceContext.initialize(words, rank, W)
    i = tl.arange(0, BLOCK)
    errors = tl.zeros((BLOCK,), tl.int32)
    turn = 0
    while turn < rounds:
        tl.store(x + i, turn * 1000 + rank * 100 + i)
        for peer in tl.static_range(W):
            ctx.put(x + i, slots + rank * BLOCK + i, to_rank=peer)
        ctx.barrier()
        for peer in tl.static_range(W):
            there = ctx.load(x + i, from_rank=peer, volatile=True)
            here = tl.load(slots + peer * BLOCK + i, volatile=True)
            expected = turn * 1000 + peer * 100 + i
            errors += ((here != expected) | (there != expected)).to(tl.int32)
        ctx.barrier()
        turn += 1
    tl.store(wrong + i, errors)


def put_then_read(rounds):
    ctx = iris.iris(1 << 20)
    x = ctx.zeros(128, dtype=torch.int32)
    slots = ctx.zeros(ctx.num_ranks, 128, dtype=torch.int32)
    wrong = torch.ones(128, dtype=torch.int32, device=ctx.device)
    words, rank, world = ctx.get_device_context(), ctx.cur_rank, ctx.num_ranks
    for turns in (0, rounds):  # at 0 it only gets loaded, before any rank waits
        ctx.barrier()
        put_and_meet[(1,)](words, x, slots, wrong, turns, rank, world, BLOCK=128)
    ctx.barrier()
    ctx.watch.check()
    assert int(wrong.abs().sum()) == 0


@pytest.mark.parametrize("world", [2, 4])
def test_puts_are_there_after_a_barrier_inside_the_kernel(ranks, world):
    ranks(world).run(put_then_read, 1000 if torch.cuda.is_available() else 4)


@triton.jit(do_not_specialize=["go"])
def meet_by_slot(words, counters, seen, go, rank: tl.constexpr, W: tl.constexpr):
    """Program p of every rank meets program p of the others, in a slot of its own."""
    ctx = DeviceContext.initialize(words, rank, W)
    slot = tl.program_id(0)
    if go != 0:
        for peer in tl.static_range(W):
            atomics.atomic_add(counters + slot, 1, rank, peer, ctx.heap_bases)
        ctx.barrier(slot)
        tl.store(seen + slot, tl.load(counters + slot, volatile=True))


def slots():
    ctx = iris.iris(1 << 20)
    counters = ctx.zeros(4, dtype=torch.int32)
    seen = torch.zeros(4, dtype=torch.int32, device=ctx.device)
    words, rank, world = ctx.get_device_context(), ctx.cur_rank, ctx.num_ranks
    for go in (0, 1):  # at 0 it only gets loaded, before any rank waits
        ctx.barrier()
        meet_by_slot[(4,)](words, counters, seen, go, rank, world)
    ctx.barrier()
    ctx.watch.check()
    assert seen.tolist() == [ctx.num_ranks] * 4


def test_programs_meet_by_slot(ranks):
    ranks(2).run(slots)


def alone(world):
    ctx = iris.iris(1 << 20)
    prepare(ctx)
    ctx.watch.record[watch.LIMIT] = 10**9
    barrier = DeviceBarrier.create(ctx, ctx.world, taken=[])
    ctx.barrier()
    if ctx.cur_rank != world - 1:
        barrier.launch(ctx.world.ranks)
    time.sleep(2)
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(iris.TimeoutError) as error:
        ctx.watch.check(synchronized=True)
    return str(error.value).splitlines()


def test_a_barrier_that_one_rank_misses_names_it_on_all_ranks(ranks):
    for lines in ranks(3).run(alone, 3):
        assert lines[0] in [
            f"device_barrier of ranks 0, 1, 2: rank {rank} waited 1 s for rank 2" for rank in (0, 1)
        ]
        assert lines[1] == "  epoch: expected 1, seen 0"
        assert lines[2].startswith("help: look for the error or the missing call on rank 2")
