"""The device barrier inside CUDA graphs, with ranks that share a GPU or have their own."""

import os
import random
import statistics
import time

import pytest
import torch
import triton
import triton.language as tl

import iris
import iris.device.pickling  # kernels of this file travel to the ranks
from iris.device import ops, watch
from iris.device.barrier import prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@triton.jit
def arrive(counter, bases, rank: tl.constexpr, W: tl.constexpr):
    """Add one to the counter of every rank."""
    for peer in tl.static_range(W):
        tl.atomic_add(ops.translate(counter, bases, rank, peer), 1, scope="sys")


@triton.jit
def check_arrivals(counter, rounds, errors, W: tl.constexpr):
    """Count a round; note an error unless every rank has arrived as often."""
    done = tl.load(rounds) + 1
    tl.store(rounds, done)
    if tl.load(counter, volatile=True) != W * done:
        tl.store(errors, tl.load(errors) + 1)


@triton.jit
def put_round(x, slots, rounds, bases, rank: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """Put numbers that differ by round, rank and place into this rank's slot on every rank."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = tl.num_programs(0) * BLOCK
    tl.store(x + i, tl.load(rounds) * 1000003 + rank * 100003 + i)
    for step in tl.static_range(W):
        ops.put(x + i, slots + rank * size + i, rank, (rank + step) % W, bases)


@triton.jit
def check_round(
    x, slots, rounds, errors, bases, rank: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr
):
    """Compare what came by put with what get finds, and both with what was meant."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = tl.num_programs(0) * BLOCK
    for peer in tl.static_range(W):
        came = tl.load(slots + peer * size + i)
        found = ops.load(x + i, rank, peer, bases)
        expected = tl.load(rounds) * 1000003 + peer * 100003 + i
        wrong = ((came != expected) | (found != expected)).to(tl.int32)
        tl.atomic_add(errors, tl.sum(wrong))


@triton.jit
def next_round(rounds):
    tl.store(rounds, tl.load(rounds) + 1)


class Scene:
    """A context with the counters that the kernels above use, on this rank."""

    def __init__(self):
        self.ctx = iris.iris(1 << 22)
        prepare(self.ctx)
        self.bases = self.ctx.get_heap_bases()
        self.counter = self.ctx.zeros(1, dtype=torch.int64)
        self.rounds = torch.zeros(1, dtype=torch.int64, device=self.ctx.device)
        self.errors = torch.zeros(1, dtype=torch.int32, device=self.ctx.device)
        self.place = (self.ctx.cur_rank, self.ctx.num_ranks)

    def arrivals(self, meet):
        """One round: all arrive, meet, look, and meet again."""
        arrive[(1,)](self.counter, self.bases, *self.place)
        meet()
        check_arrivals[(1,)](self.counter, self.rounds, self.errors, self.ctx.num_ranks)
        meet()

    def captured(self, work, times):
        """Return a graph of ``times`` runs of ``work(meet)``, which has run once by host barriers.

        That loads every kernel before any rank waits on the device.
        """
        work(self.ctx.barrier)
        self.ctx.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                work(self.ctx.device_barrier)
        self.ctx.barrier()
        return graph

    def finish(self):
        torch.cuda.synchronize()
        self.ctx.watch.check(synchronized=True)
        self.ctx.barrier()
        assert int(self.errors) == 0


def back_to_back(replays, rounds):
    scene = Scene()
    graph = scene.captured(scene.arrivals, rounds)
    delays = random.Random(scene.ctx.cur_rank)
    for _ in range(replays):
        if delays.random() < 0.3:
            torch.cuda._sleep(delays.randrange(300_000))
        if delays.random() < 0.1:
            time.sleep(delays.random() * 0.002)
        graph.replay()
    scene.finish()
    assert int(scene.rounds) == replays * rounds + 1


@pytest.mark.parametrize("world", [2, 3, 4])
def test_10000_barriers_without_the_host(ranks, world):
    # deepseek-ai/DeepEP#423
    ranks(world).run(back_to_back, 100, 50, timeout=110)


def eager(rounds):
    scene = Scene()
    scene.arrivals(scene.ctx.barrier)
    scene.ctx.barrier()
    delays = random.Random(scene.ctx.cur_rank)
    for _ in range(rounds):
        if delays.random() < 0.2:
            torch.cuda._sleep(delays.randrange(300_000))
        scene.arrivals(scene.ctx.device_barrier)
    scene.finish()


@pytest.mark.parametrize("world", [2, 4])
def test_barriers_outside_of_graphs(ranks, world):
    ranks(world).run(eager, 1000, timeout=110)


def puts(replays, rounds):
    scene = Scene()
    size = 8 * 1024
    x = scene.ctx.zeros(size, dtype=torch.int64)
    slots = scene.ctx.zeros(scene.ctx.num_ranks, size, dtype=torch.int64)

    def work(meet):
        put_round[(8,)](x, slots, scene.rounds, scene.bases, *scene.place, BLOCK=1024)
        meet()
        check_round[(8,)](
            x, slots, scene.rounds, scene.errors, scene.bases, *scene.place, BLOCK=1024
        )
        meet()
        next_round[(1,)](scene.rounds)

    graph = scene.captured(work, rounds)
    delays = random.Random(scene.ctx.cur_rank)
    for _ in range(replays):
        if delays.random() < 0.3:
            torch.cuda._sleep(delays.randrange(300_000))
        graph.replay()
    scene.finish()
    assert int(scene.rounds) == replays * rounds + 1


@pytest.mark.parametrize("world", [2, 4])
def test_puts_before_a_barrier_equal_gets_after_it(ranks, world):
    # ROCm/aiter#4856
    ranks(world).run(puts, 20, 50, timeout=110)


def first_call_of_a_group(group, replays):
    scene = Scene()
    ctx, inside = scene.ctx, scene.ctx.cur_rank in group
    graph = torch.cuda.CUDAGraph()
    ctx.barrier()
    free = torch.cuda.mem_get_info()[0]
    with torch.cuda.graph(graph):
        if inside:
            ctx.device_barrier(group=group)
        ctx.device_barrier()
    ctx.barrier()
    assert free - torch.cuda.mem_get_info()[0] < 64 << 20  # graphs of all ranks, but no slab
    for _ in range(replays):
        graph.replay()
    scene.finish()
    flags = ctx.watch.flags.tolist()
    assert [replays] * ctx.num_ranks in flags
    members = [replays if rank in group else 0 for rank in range(ctx.num_ranks)]
    assert (members in flags) == inside


def test_the_first_barrier_of_a_group_may_be_captured(ranks):
    ranks(3).run(first_call_of_a_group, [2, 0], 50)


def near_wrap(epoch):
    scene = Scene()
    scene.arrivals(scene.ctx.barrier)
    scene.ctx.device_barrier()
    torch.cuda.synchronize()
    (row,) = {int(row) for row in scene.ctx.watch.flags.any(dim=1).nonzero()}
    scene.ctx.barrier()
    scene.ctx.watch.flags[row].fill_((epoch + 2**31) % 2**32 - 2**31)
    scene.ctx.barrier()
    for _ in range(10):
        scene.arrivals(scene.ctx.device_barrier)
    scene.finish()
    wrapped = (epoch + 20 + 2**31) % 2**32 - 2**31
    assert scene.ctx.watch.flags[row].tolist() == [wrapped] * scene.ctx.num_ranks


@pytest.mark.parametrize("epoch", [2**31 - 3, 2**32 - 3], ids=["int32", "uint32"])
def test_epochs_wrap_on_the_device(ranks, epoch):
    ranks(2).run(near_wrap, epoch)


def alone_in_a_graph():
    scene = Scene()
    ctx = scene.ctx
    ctx.watch.record[watch.LIMIT] = 10**9
    graph = scene.captured(scene.arrivals, 1)
    started = time.monotonic()
    if ctx.cur_rank == 0:
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(iris.TimeoutError):
            ctx.device_barrier()
        return
    time.sleep(2)
    ctx.device_barrier()
    torch.cuda.synchronize()  # the wait of this barrier has told the host
    with pytest.raises(iris.TimeoutError, match="rank 0 waited 1 s for rank 1"):
        ctx.device_barrier()
    assert time.monotonic() - started < 15


def test_replays_that_wait_for_a_missing_rank_end(ranks):
    ranks(2).run(alone_in_a_graph)


def seconds_per_barrier(count, replays):
    scene = Scene()
    graph = scene.captured(lambda meet: meet(), count)
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / count)
    scene.finish()
    return statistics.median(times)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_time_of_a_barrier_in_a_graph(ranks, world, record_property):
    microseconds = max(ranks(world).run(seconds_per_barrier, 100, 30, timeout=110)) * 1e6
    record_property("microseconds a barrier", round(microseconds, 2))
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        assert microseconds < 10
