"""The copy engine's host methods, and its thread."""

import ctypes
import itertools
import time

import pytest
import torch

import iris
from iris import P
from iris.errors import ConfigError, PeerError, TimeoutError
from iris.lower.choices import StageConfig
from iris.runtime.rectangles import rectangles
from iris.testing import delay, small_integers

pytestmark = pytest.mark.ranks


def created(**options):
    return iris.iris(1 << 20, engines=("sdma",), **options)


def numbered(ctx, *shape, dtype=torch.float32, rank=None):
    """Values that differ by rank and place."""
    rank = ctx.cur_rank if rank is None else rank
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) * 7 + 1000 * rank).to(dtype)


def exchange(dtype):
    """Every rank puts a row to every rank, three times with new values, once with a late rank."""
    ctx = created()
    rank, world = ctx.cur_rank, ctx.num_ranks
    rows = ctx.zeros(world, 48, dtype=dtype)
    for turn in range(3):
        delay(turn if turn == 1 else -1)
        mine = ctx.as_symmetric(numbered(ctx, 48, dtype=dtype) + turn)
        for step in range(world):
            ctx.put(mine, (rank + step) % world, rows[rank], async_op=step > 0, channel=step % 2)
        ctx.quiet(channel=0)
        ctx.quiet(channel=1)
        ctx.barrier()
        for peer in range(world):
            expected = numbered(ctx, 48, dtype=dtype, rank=peer) + turn
            assert torch.equal(rows[peer].cpu(), expected)
        ctx.barrier()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_puts_to_every_rank_are_exact(ranks, dtype):
    ranks(3).run(exchange, dtype)


def strided():
    ctx = created()
    rank, world = ctx.cur_rank, ctx.num_ranks
    right, left = (rank + 1) % world, (rank - 1) % world
    x = ctx.as_symmetric(numbered(ctx, 6, 8, 10))
    there = numbered(ctx, 6, 8, 10, rank=left)
    out = ctx.zeros(6, 8, 10)
    views = [
        lambda t: t,
        lambda t: t[1:4],
        lambda t: t[:, 2:5, 3:7],
        lambda t: t[::2, :, ::3],
        lambda t: t.permute(2, 0, 1)[4],
        lambda t: t[3, 5, 7:7],
        lambda t: t[5, 7, 9],
    ]
    for view in views:
        out.zero_()
        ctx.barrier()
        ctx.put(view(x), right, view(out))
        ctx.barrier()
        expected = torch.zeros(6, 8, 10)
        view(expected).copy_(view(there))
        assert torch.equal(out.cpu(), expected)
    ctx.barrier()
    ctx.put(x.transpose(0, 1), right, out.view(8, 6, 10))  # another layout on the other side
    ctx.put(x[0, :, :1].expand(8, 5), right, out.view(-1)[:40].view(8, 5), channel=1)
    ctx.barrier()
    expected = there.transpose(0, 1).reshape(-1)
    assert torch.equal(out.view(-1)[40:].cpu(), expected[40:])
    assert torch.equal(out.view(-1)[:40].cpu(), there[0, :, :1].expand(8, 5).reshape(-1))


def test_strided_views(ranks):
    ranks(2).run(strided)


@pytest.mark.parametrize(
    ("shape", "dst", "src", "count"),
    [
        ((4, 5), (20, 4), (20, 4), 1),
        ((4, 5), (40, 4), (20, 4), 1),
        ((3, 4, 5), (160, 40, 4), (80, 20, 4), 1),
        ((3, 4, 5), (400, 40, 4), (80, 20, 4), 3),
        ((4, 5), (4, 16), (20, 4), 4),
        ((), (), (), 1),
        ((4, 0), (8, 4), (8, 4), 0),
    ],
)
def test_a_copy_is_few_rectangles_that_cover_it_once(shape, dst, src, count):
    item = 4
    found = rectangles(0, dst, 0, src, shape, item)
    assert len(found) == count
    pairs = [
        (r.dst + i * r.dst_pitch + b, r.src + i * r.src_pitch + b)
        for r in found
        for i in range(r.height)
        for b in range(0, r.width, item)
    ]
    places = itertools.product(*map(range, shape))
    wanted = [tuple(sum(map(int.__mul__, p, s)) for s in (dst, src)) for p in places]
    assert sorted(pairs) == sorted(wanted)


def tiles():
    ctx = created()
    rank, world = ctx.cur_rank, ctx.num_ranks
    right, left = (rank + 1) % world, (rank - 1) % world
    x = ctx.as_symmetric(numbered(ctx, 8, 12, dtype=torch.float16))
    there = numbered(ctx, 8, 12, dtype=torch.float16, rank=left)
    out = ctx.zeros(8, 16, dtype=torch.float16)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    stride = out.stride(0) * out.element_size()
    ctx.put_tile(x[:3, :4], right, out, stride, signal_flag=flag, signal_value=5)
    address = ctx.heap.peer_tensor(out, right)[4, 2].data_ptr()
    ctx.put_tiles(
        [x[4:6, 8:], x[7:, :0], x[6:8, :2]],
        right,
        [address, out, out[6, 14:]],
        [stride] * 3,
        wait_flag=flag,  # set by the left neighbour's put_tile
        wait_value=5,
        async_op=True,
    )
    ctx.quiet(right)
    ctx.barrier()
    expected = torch.zeros(8, 16, dtype=torch.float16)
    expected[:3, :4] = there[:3, :4]
    expected[4:6, 2:6] = there[4:6, 8:]
    expected[6:8, 14:] = there[6:8, :2]
    assert torch.equal(out.cpu(), expected)


def test_tiles(ranks):
    ranks(2).run(tiles)


FLAGS = [(torch.int32, 2**31 - 2), (torch.uint32, 2**32 - 2), (torch.int64, 2**40)]


def pipeline(dtype, start):
    """A ring: each rank sends on only what has come, over epochs that wrap."""
    ctx = created()
    rank, world = ctx.cur_rank, ctx.num_ranks
    right = (rank + 1) % world
    bits = 8 * dtype.itemsize
    x = ctx.zeros(16, dtype=torch.int64)
    flag, count = ctx.zeros(1, dtype=dtype), ctx.zeros(1, dtype=torch.int64)
    flag.view(torch.uint8).copy_(torch.tensor([start]).view(torch.uint8)[: dtype.itemsize])
    ctx.barrier()
    for turn in range(1, 5):
        epoch = (start + turn) % (1 << bits)
        if rank == 0:
            x.fill_(turn * 10)
            delay(0)
            ctx.put(x, right, signal_flag=flag, signal_value=epoch)
        else:
            wait = {"wait_flag": flag, "wait_value": epoch}
            ctx.put(x, right, **wait, signal_flag=flag, signal_value=epoch, async_op=True)
        ctx.put(x[:0], 0, signal_flag=count, signal_op="add", signal_value=3, channel=1)
        ctx.quiet()
        ctx.barrier()
        assert x.tolist() == [turn * 10] * 16
        assert int(count) == (3 * world * turn if rank == 0 else 0)
        ctx.barrier()


@pytest.mark.parametrize(("dtype", "start"), FLAGS, ids=str)
def test_waits_and_signals(ranks, dtype, start):
    ranks(3).run(pipeline, dtype, start)


def one_waits():
    """A lane that waits holds up no other, and values of uint32 flags are no negative numbers."""
    ctx = created()
    x, out = ctx.ones(4), ctx.zeros(2, 4)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.put(x, 0, out[0], wait_flag=flag, wait_value=1, async_op=True)
    ctx.put(x, 0, out[1], channel=1)
    assert out.sum(1).tolist() == [0, 4]
    ctx.put(x[:0], 0, signal_flag=flag, channel=1)
    ctx.quiet()
    assert out.sum(1).tolist() == [4, 4]


def test_a_lane_that_waits_holds_up_no_other(ranks):
    ranks(1).run(one_waits)


def wait_for_nobody():
    ctx = created()
    x, flag = ctx.ones(4), ctx.zeros(1, dtype=torch.int32)
    for use in (
        lambda: ctx.put(x, 0, wait_flag=flag, wait_value=3),
        ctx.quiet,
        ctx.get_copy_engine_ctx,
        ctx.barrier,
    ):
        with pytest.raises(TimeoutError) as caught:
            use()
        assert str(caught.value) == (
            "put of rank 0 to rank 0: waited 0.2 s for its flag\n"
            "  expected at least 3, seen 0\n"
            "help: look for what should set the flag; raise IRIS_TIMEOUT (now 0.2 s) if it is only "
            "slow"
        )


def test_a_wait_is_bounded(monkeypatch):
    monkeypatch.setenv("IRIS_TIMEOUT", "0.2")
    wait_for_nobody()


def test_a_close_tells_what_was_not_done(monkeypatch, caplog):
    monkeypatch.setenv("IRIS_TIMEOUT", "0.2")
    with created() as ctx:
        flag = ctx.zeros(1, dtype=torch.int32)
        ctx.put(ctx.ones(4), 0, wait_flag=flag, wait_value=3, async_op=True)
    told = "closed before all copies were done: put of rank 0 to rank 0: waited 0.2 s for its flag"
    assert told in caplog.text


def goes_on():
    """After a reset lanes are empty, and work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRIS_TIMEOUT", "1")
        ctx = created()
        rank, world = ctx.cur_rank, ctx.num_ranks
        right, left = (rank + 1) % world, (rank - 1) % world
        x, out = ctx.full((4,), rank + 1.0), ctx.zeros(3, 4)
        flag = ctx.zeros(1, dtype=torch.int32)
        for turn in range(3):
            ctx.put(x, right, out[turn], channel=1)
            for _ in range(2):
                ctx.put(x, right, wait_flag=flag, wait_value=turn + 1, async_op=True)
            with pytest.raises(TimeoutError):
                ctx.quiet(right)
            ctx.reset()
            ctx.put(x, right, out[turn], signal_flag=flag, signal_value=turn + 1)
            ctx.put(x, rank, wait_flag=flag, wait_value=turn + 1)
            ctx.barrier()
            assert out[: turn + 1].tolist() == [[left + 1.0] * 4] * (turn + 1)


def test_a_reset_makes_it_usable_again(ranks):
    ranks(2).run(goes_on)


def wait_for_the_dead():
    ctx = created()
    x, flag = ctx.ones(4), ctx.zeros(1, dtype=torch.int32)
    if ctx.cur_rank == 1:
        ctx.fail("out of paper")
        return
    with pytest.raises(PeerError) as caught:
        ctx.put(x, 0, wait_flag=flag, wait_value=3)
    assert str(caught.value) == (
        "rank 1 failed: out of paper\n  the copy engine of rank 0 was waiting for a flag"
    )


def test_a_wait_ends_with_its_peer(ranks):
    ranks(2).run(wait_for_the_dead)


def ours():
    """A block that only some ranks allocated has no place on the others."""
    ctx = created()
    some = ctx.group([0, 1]) if ctx.cur_rank < 2 else None
    if some is None:
        return
    x = ctx.heap.allocate(32, some).tensor.view(torch.int64)
    x.fill_(ctx.cur_rank + 1)
    some.sync("fill")
    if ctx.cur_rank == 0:
        ctx.put(x, 1)
        with pytest.raises(ConfigError, match=r"from_tensor: only ranks \(0, 1\) allocated it"):
            ctx.put(x, 2)
    some.sync("put")
    assert x.tolist() == [1] * 4


def test_blocks_of_groups(ranks):
    ranks(3).run(ours)


def test_a_closed_context_says_so():
    with created() as ctx:
        x = ctx.ones(4)
    for call in (lambda: ctx.put(x, 0), ctx.quiet, ctx.get_copy_engine_ctx):
        with pytest.raises(iris.IrisError, match="this iris context is closed"):
            call()
    assert not ctx._engine._thread.is_alive()


def kill(thread):
    """End a thread as an unexpected exception in it would."""
    hit = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )
    assert hit == 1
    thread.join(10)
    assert not thread.is_alive()


def test_the_death_of_its_thread_is_an_error_on_the_next_use():
    with created() as ctx:
        x = ctx.ones(4)
        ctx.put(x, 0)
        kill(ctx._engine._thread)
        for call in (lambda: ctx.put(x, 0), ctx.quiet, ctx.get_copy_engine_ctx, ctx.barrier):
            with pytest.raises(
                iris.IrisError, match=r"the copy engine of rank 0 stopped"
            ) as caught:
                call()
            assert caught.value.help == (
                "call ctx.reset() on every rank, or close this context and create another"
            )
        ctx.reset()
        y = ctx.zeros(4)
        ctx.put(x, 0, y)
        assert y.tolist() == [1] * 4


def test_an_idle_engine_hardly_looks():
    with created() as ctx:
        ctx.get_copy_engine_ctx()
        ctx.put(ctx.ones(4), 0)
        time.sleep(0.5)  # longer than it stays alert
        before = ctx._engine.looks
        time.sleep(0.5)
        assert ctx._engine.looks - before <= 300  # once in 2 ms, or seldomer
    with created() as ctx:  # no kernel may ask
        ctx.put(ctx.ones(4), 0)
        time.sleep(0.5)
        before = ctx._engine.looks
        time.sleep(0.5)
        assert ctx._engine.looks - before <= 60


def planned():
    """A program whose gather the copy engine sends: three calls, new data, a late rank."""
    ctx = created()
    rank, world = ctx.cur_rank, ctx.num_ranks
    options = {"lowering": "triton", "config": StageConfig("copy engine")}

    @iris.spmd(in_specs=(P("tp", None), P(None, "tp"), P("tp")), out_specs=P(None, "tp"), **options)
    def up(x, w, bias):
        return torch.relu(iris.all_gather(x, "tp", dim=0) @ w + bias)

    for turn in range(3):
        delay(turn if turn == 1 else -1)
        x = small_integers((7, 24), seed=turn)
        w, bias = small_integers((24, 10), seed=10 + turn), small_integers((10,), seed=20 + turn)
        parts = [part[rank] for part in (x.chunk(world), w.chunk(world, 1), bias.chunk(world))]
        own = [part.to(ctx.device) for part in parts]
        y = up(*own)
        assert torch.equal(y.cpu(), torch.relu(x @ parts[1] + parts[2]))
    assert ("copy engine" in str(up.explain(*own))) == ctx.copies_beside_kernels


def test_a_program_with_the_copy_engine(ranks):
    ranks(2).run(planned)
