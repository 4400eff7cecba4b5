"""The copy engine where ranks are on GPUs: the tests of tests/ranks again, many puts, graphs."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import iris
import iris.device.pickling  # kernels of this file travel to the ranks
from iris.device import atomics, copy_engine, ops, signals

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def load(name):
    """Import a file of tests/ranks under a name of its own, so that it can travel to ranks."""
    path = Path(__file__).parents[1] / "ranks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"copies_on_gpu.{name}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


for file in ("test_copy_engine", "test_copy_engine_errors"):
    for name, value in vars(load(file)).items():
        if name.startswith("test_"):
            globals()[name] = value

on_device = load("test_device_copy_engine")


@pytest.mark.parametrize("world", [2, 4])
def test_ten_thousand_puts(ranks, world):
    ranks(world).run(on_device.random_puts, 10_000 // world, 2000, 500)


@pytest.mark.parametrize("world", [2, 4])
def test_a_full_queue_that_wraps(ranks, world):
    ranks(world).run(on_device.random_puts, 1000, 300, 1000, queue=16)


def test_a_kernel_is_loaded_behind_a_full_queue(ranks):
    ranks(2).run(on_device.random_puts, 1000, 300, 1000, queue=16, rounds=1, load=False)


@pytest.mark.parametrize("world", [2, 4])
def test_a_thread_that_dies_midway(ranks, world):
    ranks(world).run(on_device.killed)


@triton.jit(do_not_specialize=["rank"])
def fill(x, rounds, rank, N: tl.constexpr):
    """Count a round, and fill ``x`` with numbers of it."""
    turn = tl.load(rounds) + 1
    tl.store(rounds, turn)
    i = tl.arange(0, N)
    tl.store(x + i, turn * 1000003 + rank * 5003 + i)


@triton.jit(do_not_specialize=["rank", "peer"])
def ask(x, out, flag, bases, engine, rank, peer, N: tl.constexpr):
    i = tl.arange(0, N)
    ops.put(x + i, out + i, rank, peer, bases, copy_engine_ctx=engine, use_copy_engine=True)
    atomics.atomic_add(flag, 1, rank, peer, bases, copy_engine_ctx=engine, use_copy_engine=True)
    copy_engine.quiet(engine, peer)


@triton.jit(do_not_specialize=["left"])
def check(out, flag, rounds, errors, record, left, N: tl.constexpr):
    """Wait for this round's signal, and count what is not as it should be."""
    turn = tl.load(rounds)
    signals.wait(flag, turn, record)
    i = tl.arange(0, N)
    wrong = tl.load(out + i) != turn * 1000003 + left * 5003 + i
    tl.store(errors, tl.load(errors) + tl.sum(wrong.to(tl.int32)))


SIZE = 4096


def replays(how, count):
    """A graph that puts a ring's data round and checks it, replayed with new data each time."""
    ctx = iris.iris(1 << 22, engines=("sdma",))
    rank, world = ctx.cur_rank, ctx.num_ranks
    right, left = (rank + 1) % world, (rank - 1) % world
    x, out = ctx.zeros(2, SIZE, dtype=torch.int32)
    flag, ready = ctx.zeros(2, 1, dtype=torch.int64)
    rounds = torch.zeros(1, dtype=torch.int32, device=ctx.device)
    errors = torch.zeros(1, dtype=torch.int32, device=ctx.device)
    engine, bases = ctx.get_copy_engine_ctx(), ctx.get_heap_bases()
    ready.fill_(1)
    signal = {"signal_flag": flag, "signal_op": "add"}

    numbers = x, rounds, rank
    request = x, out, flag, bases, engine, rank, right
    result = out, flag, rounds, errors, ctx.watch.record, left
    for kernel, args in ((fill, numbers), (ask, request), (check, result)):
        on_device.loaded(ctx, kernel, *args, N=SIZE)

    def step():
        fill[(1,)](*numbers, N=SIZE)
        if how == "device":
            ask[(1,)](*request, N=SIZE)
        elif how == "host":
            ctx.put(x, right, out, wait_flag=ready, wait_value=1, **signal)
        else:
            half = SIZE // 2
            rows = out.view(2, half).stride(0) * out.element_size()
            ctx.put_tile(x.view(2, half)[:, :100], right, out, rows, async_op=True)
            rest = out.view(2, half)[:, 100:]
            ctx.put_tiles(
                [x.view(2, half)[:, 100:]], right, [rest], [rows], **signal, async_op=True
            )
            ctx.quiet(right)
        check[(1,)](*result, N=SIZE)
        ctx.device_barrier()

    for _ in range(2):
        step()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        step()
    ctx.barrier()
    for turn in range(count):
        iris.testing.delay(turn % 7 if turn % 7 < world and turn < 14 else -1, 0.01)
        graph.replay()
    ctx.barrier()
    assert rounds.tolist() == [count + 2]
    assert flag.tolist() == [count + 2]
    assert errors.tolist() == [0]


@pytest.mark.parametrize("how", ["device", "host", "tiles"])
@pytest.mark.parametrize("world", [2, 4])
def test_replays_of_a_graph(ranks, world, how):
    ranks(world).run(replays, how, 200)


def bounded_in_a_graph():
    """A wait in a graph that nobody ends is ended by its bound, and says what it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRIS_TIMEOUT", "1")
        ctx = iris.iris(1 << 20, engines=("sdma",))
    x, flag = ctx.zeros(8), ctx.zeros(1, dtype=torch.int32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        ctx.put(x, 0, wait_flag=flag, wait_value=1)
    graph.replay()
    with pytest.raises(iris.TimeoutError, match="put of rank 0 to rank 0: rank 0 waited 1 s for"):
        ctx.barrier()


def on_many_streams():
    """Kernels that wait for copies, on more streams than there are hardware queues."""
    ctx = iris.iris(1 << 22, engines=("sdma",))
    rank, world = ctx.cur_rank, ctx.num_ranks
    right, left = (rank + 1) % world, (rank - 1) % world
    streams = [torch.cuda.Stream(priority=level) for level in (0, -1) for _ in range(16)]
    x, out = ctx.zeros(2, len(streams), 256, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int64)
    place = flag, ctx.get_heap_bases(), ctx.get_copy_engine_ctx(), rank, right
    on_device.loaded(ctx, ask, x[0], out[0], *place, N=256)
    numbers = torch.arange(x.numel(), dtype=torch.int32).view(x.shape)
    for turn in range(3):
        x.copy_(numbers * 3 + 100 * turn + rank)
        ctx.barrier()
        iris.testing.delay(turn if turn == 1 else -1)
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                ask[(1,)](x[i], out[i], *place, N=256)
        ctx.barrier()
        assert torch.equal(out.cpu(), numbers * 3 + 100 * turn + left)
        assert flag.tolist() == [len(streams) * (turn + 1)]


def test_kernels_wait_for_copies_on_many_streams(ranks):
    ranks(2).run(on_many_streams)


def captured_too_early():
    """What waits on a channel would get into a graph: another channel has to be used."""
    ctx = iris.iris(1 << 20, engines=("sdma",))
    x, out, flag = ctx.ones(8), ctx.zeros(2, 8), ctx.zeros(1, dtype=torch.int32)
    ctx.put(x, 0, out[0], wait_flag=flag, wait_value=1, async_op=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        with pytest.raises(iris.errors.UnsupportedError, match="rank 0 on channel 0 still wait"):
            ctx.put(x, 0, out[1])
        ctx.put(x, 0, out[1], channel=1)
    assert out.tolist() == [[0] * 8] * 2
    flag.fill_(1)
    ctx.quiet()
    graph.replay()
    ctx.barrier()
    assert out.tolist() == [[1] * 8] * 2


def test_a_capture_takes_in_no_copy_that_waits(ranks):
    ranks(1).run(captured_too_early)


def test_a_wait_in_a_graph_is_bounded(ranks):
    ranks(1).run(bounded_in_a_graph)


def strided_by_many():
    """Copies of every alignment and width, host and device memory untouched around them."""
    ctx = iris.iris(1 << 24, engines=("sdma",))
    rank, world = ctx.cur_rank, ctx.num_ranks
    right, left = (rank + 1) % world, (rank - 1) % world
    x, out = ctx.zeros(2, 512, 1027, dtype=torch.int8)
    whole = torch.arange(512 * 1027).view(512, 1027) % 101

    x.copy_((whole + rank) % 101)
    cuts = [(3, 1, 7, 500), (0, 0, 512, 1027), (5, 13, 1, 999), (9, 2, 300, 1), (1, 511, 64, 512)]
    for top, left_column, rows, columns in cuts:
        out.zero_()
        ctx.barrier()
        part = (slice(top, top + rows), slice(left_column, left_column + columns))
        ctx.put(x[part], right, out[part])
        ctx.barrier()
        expected = torch.zeros(512, 1027, dtype=torch.int8)
        expected[part] = ((whole + left) % 101)[part].to(torch.int8)
        assert torch.equal(out.cpu(), expected)


def test_strides_of_every_alignment(ranks):
    ranks(2).run(strided_by_many)
