"""The copy engine's host methods, and its thread."""

import ctypes
import itertools
import os
import time

import pytest
import torch

import iris
from iris import P
from iris.errors import ConfigError, LaunchError, PeerError, TimeoutError
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


TWO = "to_tensor: float16[4, 6], from_tensor is float32[4, 6]"


def wrong_arguments():
    ctx = created()
    x, y = ctx.ones(4, 6), ctx.ones(4, 6, dtype=torch.float16)
    flag = ctx.zeros(1, dtype=torch.int32)
    me = f"rank {ctx.cur_rank} of {ctx.num_ranks}"
    way_out = (
        "help: copies go to this context's tensors (ctx.zeros, ctx.as_symmetric), element by "
        "element"
    )
    alone = torch.ones(4, 6, device=ctx.device)
    base, end = ctx.heap.bases[0], ctx.heap.bases[0] + ctx.heap._slab.nbytes
    half = ctx.zeros(1, dtype=torch.float16)
    pairs = ctx.zeros(4, dtype=torch.complex64)
    ints = "one int32, int64, uint32 or uint64"
    both = "wait_flag and wait_value: give both or none"
    cases = [
        (lambda: ctx.put(x, 2, y), ["to_rank=2: ranks are 0 to 1", TWO]),
        (lambda: ctx.put(x, True), ["to_rank=True: ranks are 0 to 1"]),
        (lambda: ctx.put(x, 1, x[:3]), ["to_tensor: float32[3, 6], from_tensor is float32[4, 6]"]),
        (lambda: ctx.put(alone, 1), ["from_tensor: not on the symmetric heap"]),
        (lambda: ctx.put(x, 1, alone), ["to_tensor: not on the symmetric heap"]),
        (lambda: ctx.put(3, 1), ["from_tensor: int is no strided tensor"]),
        (
            lambda: ctx.put(x.to("meta"), 1),
            [f"from_tensor: on meta, this rank is on {ctx.device}"],
        ),
        (lambda: ctx.put(x, 1, channel=16), ["channel=16: channels are 0 to 15"]),
        (lambda: ctx.put(x, 1, wait_flag=flag), [both]),
        (lambda: ctx.put(x, 1, wait_value=1), [both]),
        (
            lambda: ctx.put(x, 1, wait_flag=half, wait_value=1),
            [f"wait_flag: float16[1] is not {ints}"],
        ),
        (lambda: ctx.put(x, 1, signal_flag=y), [f"signal_flag: float16[4, 6] is not {ints}"]),
        (
            lambda: ctx.put(x, 1, signal_flag=torch.zeros(1, dtype=torch.int64, device=ctx.device)),
            ["signal_flag: not on the symmetric heap"],
        ),
        (
            lambda: ctx.put(x, 1, signal_flag=flag, signal_value=1 << 32, signal_op="or"),
            [
                "signal_op='or': it is 'set' or 'add'",
                f"signal_value={1 << 32}: no integer of 32 bits",
            ],
        ),
        (lambda: ctx.quiet(-1), ["to_rank=-1: ranks are 0 to 1"]),
        (lambda: ctx.put_tile(x[0], 1, x, 24), ["tile: float32[6] has not 2 dims"]),
        (
            lambda: ctx.put_tile(x, 1, x, 20),
            ["stride 20 of tile: a row of float32[4, 6] has 24 bytes"],
        ),
        (
            lambda: ctx.put_tile(x, 0, end - 8, 24),
            [f"to_ptr={end - 8:#x}: 96 bytes there are not all on the heap of rank 0"],
        ),
        (
            lambda: ctx.put_tile(x, 0, base - 8, 24),
            [f"to_ptr={base - 8:#x}: 96 bytes there are not all on the heap of rank 0"],
        ),
        (
            lambda: ctx.put_tile(x, 1, None, 24),
            ["to_ptr: NoneType is neither an address nor a tensor"],
        ),
        (
            lambda: ctx.put_tiles([x, x[0]], 1, [x], [24, 24, 24]),
            ["lists of unequal length: 2 tiles, 1 to_ptrs, 3 to_strides"],
        ),
        (
            lambda: ctx.put_tiles(iter([x]), 1, x.data_ptr(), [24]),
            ["tiles: list_iterator is no list", "to_ptrs: int is no list"],
        ),
        (
            lambda: ctx.put_tile(x, 1, y, 24),
            ["to_ptr: float16[4, 6], the tile is float32[4, 6]"],
        ),
        (
            lambda: ctx.put_tile(x, 1, x[2:], 24),  # its last rows belong to another tensor
            ["to_ptr: 96 bytes are more than the 48 that were allocated from there"],
        ),
        (
            lambda: ctx.put(pairs.conj(), 1, pairs),
            [
                "from_tensor: a view whose memory holds other values; "
                "pass .resolve_conj().resolve_neg()"
            ],
        ),
        (
            lambda: ctx.put(x, 1, x[:1].expand(4, 6)),
            ["to_tensor: elements of float32[4, 6] share a place"],
        ),
    ]
    for call, problems in cases:
        with pytest.raises(ConfigError) as caught:
            call()
        assert isinstance(caught.value, ValueError)
        lines = str(caught.value).split("\n")
        name = lines[0].partition(":")[0]
        count = f"{len(problems)} arguments do" if len(problems) > 1 else "1 argument does"
        assert lines[0] == f"{name}: {count} not fit"
        assert lines[1].startswith("  at test_copy_engine.py:")
        assert lines[1].endswith(me)
        assert [line.strip() for line in lines[2:-1]] == problems
        assert lines[-1] == way_out
    ctx.barrier()


def test_wrong_arguments_are_all_named(ranks):
    ranks(2).run(wrong_arguments)


def test_layouts_with_nothing_in_common_are_refused():
    with created() as ctx:
        x, y = ctx.zeros(2, 20, 20, 20, 20, dtype=torch.int8)
        with pytest.raises(ConfigError, match="falls into more than 4096 pieces"):
            ctx.put(x, 0, y.permute(3, 2, 1, 0))


def ours():
    """A block that only some ranks allocated has no place on the others."""
    ctx = created()
    some = ctx.group([0, 1]) if ctx.cur_rank < 2 else None
    if some is None:
        return
    x = ctx.heap.allocate(32, some).tensor.view(torch.int64)
    x.fill_(ctx.cur_rank + 1)
    some.sync(1, "fill")
    if ctx.cur_rank == 0:
        ctx.put(x, 1)
        with pytest.raises(ConfigError, match=r"from_tensor: only ranks \(0, 1\) allocated it"):
            ctx.put(x, 2)
    some.sync(2, "put")
    assert x.tolist() == [1] * 4


def test_blocks_of_groups(ranks):
    ranks(3).run(ours)


def on_some_ranks():
    iris.iris(1 << 20, engines=("sdma",) if int(os.environ["RANK"]) else ())


def test_engines_on_some_ranks_only_are_an_error_on_all(ranks):
    with pytest.raises(LaunchError) as caught:
        ranks(3).run(on_some_ranks)
    text = str(caught.value)
    plain = "iris.iris(heap_size=1048576, allocator_type='torch'"
    assert "3 of 3 ranks failed" in text
    assert "ranks of one group are in different calls" in text
    assert f"rank 0: {plain}) on " in text
    assert f"rank 2: {plain}, engines=('sdma',)) on " in text


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
