"""Kernels that ask the copy engine for copies, here and (from tests/gpu) on GPUs."""

import random
from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl

import iris
import iris.device.pickling  # kernels of this file travel to the ranks
from iris.device import atomics, copy_engine, ops, signals
from iris.errors import LaunchError

pytestmark = pytest.mark.ranks

ON_GPU = torch.cuda.is_available()


@triton.jit(do_not_specialize=["rank", "first"])
def put_pieces(table, x, out, bases, engine, rank, first, BLOCK: tl.constexpr):
    """Program p puts piece ``first + p``: table rows are peer, from, to, length."""
    row = table + (first + tl.program_id(0)) * 4
    peer = tl.load(row)
    source = x + tl.load(row + 1)
    target = out + tl.load(row + 2)
    length = tl.load(row + 3)
    i = tl.arange(0, BLOCK)
    ops.put(
        source + i,
        target + i,
        rank,
        peer,
        bases,
        mask=i < length,
        copy_engine_ctx=engine,
        use_copy_engine=True,
    )


@triton.jit(do_not_specialize=["world"])
def quiet_all(engine, world):
    for peer in range(world):
        copy_engine.quiet(engine, peer)


def pieces(rank, world, count, longest, seed):
    """Random pieces of one rank's data for random peers, one after the other in ``out``."""
    chosen = random.Random(1000 * seed + rank)
    table, ends = [], [0] * world
    for _ in range(count):
        peer, length = chosen.randrange(world), chosen.randrange(longest + 1)
        table.append((peer, chosen.randrange(longest), ends[peer], length))
        ends[peer] += length
    return table


def values(rank, size, seed):
    return torch.arange(size, dtype=torch.int32) * 31 + 7_000_001 * rank + 11 * seed


@contextmanager
def telling(ctx):
    """Let an error in the block say how far every queue is."""
    try:
        yield
    except BaseException as error:
        engine = ctx._engine
        names = "_tickets", "_read", "_taken", "_done"
        words = ", ".join(f"{name[1:]} {getattr(engine, name).tolist()}" for name in names)
        alive = "alive" if engine._thread.is_alive() else "dead"
        next_ = f"next {engine._next}, {engine.looks} looks, thread {alive}: {engine.error}"
        error.add_note(f"queues of rank {ctx.cur_rank}: {words}, {next_}")
        raise


def random_puts(count, longest, grid, queue=None, ticket=None, rounds=3, load=True, look=False):
    """``count`` puts from every rank, ``grid`` programs a launch, each compared exactly.

    Without ``load`` the second kernel is loaded while programs of the first may wait for room.
    """
    with pytest.MonkeyPatch.context() as patch:
        if queue is not None:
            patch.setenv("IRIS_COPY_QUEUE", str(queue))
        if look:
            patch.setenv("IRIS_CHECK", "1")
        ctx = iris.iris(1 << 25 if ON_GPU else 1 << 22, engines=("sdma",))
    rank, world = ctx.cur_rank, ctx.num_ranks
    engine, bases = ctx.get_copy_engine_ctx(), ctx.get_heap_bases()
    if ticket is not None:
        ctx._engine.restart(ticket)
    tables = [pieces(r, world, count, longest, 0) for r in range(world)]
    room = max(sum(row[3] for row in t if row[0] == p) for t in tables for p in range(world))
    x = ctx.zeros(2 * longest, dtype=torch.int32)
    out = ctx.zeros(world, room + 1, dtype=torch.int32)
    table = torch.tensor(tables[rank], dtype=torch.int64, device=ctx.device)
    block = max(32, triton.next_power_of_2(longest))
    request = table, x, out[rank], bases, engine, rank
    loaded(ctx, put_pieces, *request, 0, BLOCK=block)
    if load:
        loaded(ctx, quiet_all, engine, world)
    for seed in range(rounds):
        iris.testing.delay(seed if seed == 1 else -1)
        x.copy_(values(rank, 2 * longest, seed))
        out.fill_(-1)
        ctx.barrier()
        with telling(ctx):
            for first in range(0, count, grid):
                put_pieces[(min(grid, count - first),)](*request, first, BLOCK=block)
            quiet_all[(1,)](engine, world)
            ctx.barrier()
        for source in range(world):
            sent = values(source, 2 * longest, seed)
            parts = [sent[a : a + n] for peer, a, _, n in tables[source] if peer == rank]
            expected = torch.full((room + 1,), -1, dtype=torch.int32)
            found = torch.cat(parts) if parts else expected[:0]
            expected[: len(found)] = found
            assert torch.equal(out[source].cpu(), expected)
    done = [sum(row[0] == peer and row[3] > 0 for row in tables[rank]) for peer in range(world)]
    start = ticket or 0
    assert ctx._engine._next == [start + rounds * number for number in done]


def test_random_puts_of_one_program_after_the_other(ranks):
    ranks(2).run(random_puts, 10, 32, 10)


def test_a_queue_that_wraps_and_is_full(ranks):
    ranks(3).run(random_puts, 8, 16, 8, queue=2)


def test_programs_that_share_a_queue_are_no_race(ranks):
    ranks(2).run(random_puts, 8, 16, 8, queue=2, look=True)


@pytest.mark.parametrize("ticket", [2**31 - 9, 2**32 - 9], ids=str)
def test_tickets_that_wrap(ranks, ticket):
    ranks(2).run(random_puts, 14, 16, 14, queue=4, ticket=ticket, rounds=1)


@triton.jit
def put_shapes(
    x, out, bases, engine, rank, peer, rows, columns, STRIDE, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """A block of rows, with a mask; a scalar; every other element; an empty block; a corner cut."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLS)[None, :]
    at = row * STRIDE + column
    size = ROWS * STRIDE
    mask = (row >= 1) & (row < rows) & (column >= 2) & (column < columns)
    ops.put(x + at, out + at, rank, peer, bases, mask, copy_engine_ctx=engine, use_copy_engine=True)
    out += size
    ops.put(x + 5, out + 5, rank, peer, bases, copy_engine_ctx=engine, use_copy_engine=True)
    out += size
    i = tl.arange(0, COLS)
    ops.put(x + 2 * i, out + 2 * i, rank, peer, bases, copy_engine_ctx=engine, use_copy_engine=True)
    out += size
    ops.put(x + i, out + i, rank, peer, bases, i < 0, copy_engine_ctx=engine, use_copy_engine=True)
    ops.put(x, out, rank, peer, bases, rows < 0, copy_engine_ctx=engine, use_copy_engine=True)
    out += size
    corner = (row < rows) & (column < columns) & (row + column > 0)
    ops.put(
        x + at, out + at, rank, peer, bases, corner, copy_engine_ctx=engine, use_copy_engine=True
    )
    out += size
    ops.put(
        x + at,
        out + row * COLS + column,  # packed on the other side
        rank,
        peer,
        bases,
        copy_engine_ctx=engine,
        use_copy_engine=True,
    )
    copy_engine.quiet(engine, peer)


def shapes(dtype):
    ctx = iris.iris(1 << 20, engines=("sdma",))
    rank, world = ctx.cur_rank, ctx.num_ranks
    right, left = (rank + 1) % world, (rank - 1) % world
    x = ctx.zeros(8, 24, dtype=dtype)
    out = ctx.zeros(6, 8, 24, dtype=dtype)
    x.copy_((torch.arange(8 * 24).view(8, 24) * 5 + 3 + rank) % 113)
    there = ((torch.arange(8 * 24).view(8, 24) * 5 + 3 + left) % 113).to(dtype)
    ctx.barrier()
    engine = ctx.get_copy_engine_ctx()
    put_shapes[(1,)](x, out, ctx.get_heap_bases(), engine, rank, right, 6, 13, 24, ROWS=8, COLS=16)
    ctx.barrier()
    expected = torch.zeros(6, 8, 24, dtype=dtype)
    expected[0, 1:6, 2:13] = there[1:6, 2:13]
    expected[1, 0, 5] = there[0, 5]
    expected[2].view(-1)[0:32:2] = there.view(-1)[0:32:2]
    expected[4, :6, :13] = there[:6, :13]
    expected[4, 0, 0] = 0
    expected[5].view(-1)[:128] = there[:, :16].reshape(-1)
    assert torch.equal(out.cpu(), expected)
    assert ctx._engine._next[right] == 3  # the shapes that a copy engine can do


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.int64], ids=str)
def test_shapes_of_puts(ranks, dtype):
    ranks(2).run(shapes, dtype)


@triton.jit(do_not_specialize=["rank", "peer", "epoch"])
def put_and_count(x, out, flag, bases, engine, record, rank, peer, epoch, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    ops.put(x + i, out + i, rank, peer, bases, i < n, copy_engine_ctx=engine, use_copy_engine=True)
    atomics.atomic_add(flag, 1, rank, peer, bases, copy_engine_ctx=engine, use_copy_engine=True)
    signals.wait(flag, epoch, record)
    copy_engine.quiet(engine, peer)  # before x changes
    tl.store(x + i, tl.load(out + i, mask=i < n) + 1, mask=i < n)


def loaded(ctx, kernel, *args, **options):
    """Return ``kernel``, loaded on every rank: loading can block behind a peer's that waits."""
    if ctx.device.type == "cuda":
        kernel.warmup(*args, grid=(1,), **options)._init_handles()
    ctx.barrier()
    return kernel


def counted(dtype):
    """Data goes round a ring; the count that follows it says when it is there."""
    ctx = iris.iris(1 << 20, engines=("sdma",))
    rank, world = ctx.cur_rank, ctx.num_ranks
    x, out = ctx.zeros(300, dtype=torch.int32), ctx.zeros(6, 300, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=dtype)
    x.fill_(100 * rank)
    place = ctx.get_heap_bases(), ctx.get_copy_engine_ctx(), ctx.watch.record
    place = *place, rank, (rank + 1) % world
    kernel = loaded(ctx, put_and_count, x, out[1], flag, *place, 2, 300, BLOCK=512)
    for turn in range(1, 6):
        iris.testing.delay(turn if turn < world else -1, 0.02)
        kernel[(1,)](x, out[turn], flag, *place, turn, 300, BLOCK=512)
    ctx.barrier()
    assert x.tolist() == [100 * ((rank - 5) % world) + 5] * 300
    assert flag.tolist() == [5]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_an_add_comes_after_the_data(ranks, dtype):
    ranks(3).run(counted, dtype)


@triton.jit
def put_all(x, out, flag, bases, engine, rank, peer, nbytes, value):
    copy_engine.put_rows(engine, peer, ops.translate(out, bases, rank, peer), x, nbytes)
    copy_engine.signal(engine, peer, ops.translate(flag, bases, rank, peer), value)
    copy_engine.quiet(engine, peer)


def rows_and_a_flag():
    """More than a block at once, and a flag that is set after it."""
    ctx = iris.iris(1 << 20, engines=("sdma",))
    rank, world = ctx.cur_rank, ctx.num_ranks
    right, left = (rank + 1) % world, (rank - 1) % world
    x, out = ctx.zeros(2, 50_001, dtype=torch.int16)
    flag = ctx.zeros(1, dtype=torch.int32)
    for turn in range(3):
        x.copy_((torch.arange(50_001) * 3 + turn) % 1009 + rank)
        ctx.barrier()
        engine, bases = ctx.get_copy_engine_ctx(), ctx.get_heap_bases()
        put_all[(1,)](x, out, flag, bases, engine, rank, right, x.nbytes, 40 + turn)
        ctx.barrier()
        expected = ((torch.arange(50_001) * 3 + turn) % 1009 + left).to(torch.int16)
        assert torch.equal(out.cpu(), expected)
        assert flag.tolist() == [40 + turn]
        ctx.barrier()


def test_rows_and_a_flag(ranks):
    ranks(2).run(rows_and_a_flag)


@triton.jit
def put_anywhere(x, address, engine, peer):
    copy_engine.enqueue(
        engine + peer * copy_engine.ROW,
        peer,
        copy_engine.COPY,
        address,
        x.to(tl.int64),
        64,
        1,
        0,
        0,
    )
    copy_engine.quiet(engine, peer)


def wild_request():
    """A bad address ends the engine, not the process; the kernel's wait ends, later uses raise."""
    ctx = iris.iris(1 << 20, engines=("sdma",))
    x = ctx.ones(16)
    address = ctx.heap.bases[0] - 64
    put_anywhere[(1,)](x, address, ctx.get_copy_engine_ctx(), 0)
    expected = (
        "the copy engine of rank 0 was asked for what is not on the heap of rank 0: "
        f"operation 1, 64 bytes at {address:#x}"
    )
    for use in (ctx.barrier, lambda: ctx.put(x, 0), ctx.quiet, ctx.get_copy_engine_ctx):
        with pytest.raises(iris.IrisError, match=expected):
            use()


def test_a_bad_request_is_an_error_on_the_next_use(ranks):
    ranks(1).run(wild_request)


@triton.jit
def ask(x, out, bases, engine, rank, peer, COUNT, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for _ in range(COUNT):
        ops.put(x + i, out + i, rank, peer, bases, copy_engine_ctx=engine, use_copy_engine=True)
    copy_engine.quiet(engine, peer)


def killed():
    """Rank 0's thread dies with requests in the queue: its kernel ends, the next use says why.

    Others get their work done. After a reset all queues are empty, and work.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRIS_COPY_QUEUE", "4")
        ctx = iris.iris(1 << 20, engines=("sdma",))
    rank, world = ctx.cur_rank, ctx.num_ranks
    x, out = ctx.full((64,), rank + 1.0), ctx.zeros(64)
    ctx.barrier()
    engine, bases = ctx.get_copy_engine_ctx(), ctx.get_heap_bases()
    request = x, out, bases, engine, rank, (rank + 1) % world, 40
    if rank > 0:
        ask[(1,)](*request, BLOCK=64)
        ctx.quiet()
    else:
        decode, seen = ctx._engine._decode, []

        def die(*args):
            seen.append(args)
            if len(seen) == 7:
                raise SystemExit
            return decode(*args)

        ctx._engine._decode = die
        ask[(1,)](*request, BLOCK=64)
        stopped = "the copy engine of rank 0 stopped: SystemExit"
        for use in (lambda: ctx.put(x, 0), ctx.quiet, ctx.get_copy_engine_ctx, ctx.barrier):
            with pytest.raises(iris.IrisError, match=stopped):
                use()
        assert len(seen) == 7
    for turn in range(3):
        ctx.reset()
        x.fill_(10.0 * turn + rank)
        ctx.barrier()
        ask[(1,)](*request, BLOCK=64)
        ctx.barrier()
        assert out.tolist() == [10.0 * turn + (rank - 1) % world] * 64


def test_a_thread_that_dies_with_requests_in_the_queue(ranks):
    ranks(2).run(killed)


@triton.jit
def ask_without(x, bases, engine):
    ops.put(x, x, 0, 0, bases, copy_engine_ctx=engine, use_copy_engine=True)


def no_engine():
    ctx = iris.iris(1 << 20)
    ask_without[(1,)](ctx.ones(1), ctx.get_heap_bases(), ctx.get_copy_engine_ctx())


def test_use_without_a_context_says_so(ranks):
    with pytest.raises(LaunchError, match="the copy engine needs copy_engine_ctx="):
        ranks(1).run(no_engine)


@triton.jit
def ask_too_much(x, bases, engine, WHAT: tl.constexpr):
    i = tl.arange(0, 4)
    if WHAT == "dims":
        block = x + i[:, None, None]
        ops.put(block, x, 0, 0, bases, copy_engine_ctx=engine, use_copy_engine=True)
    elif WHAT == "block":
        atomics.atomic_add(x + i, 1, 0, 0, bases, copy_engine_ctx=engine, use_copy_engine=True)
    elif WHAT == "mask":
        atomics.atomic_add(x, 1, 0, 0, bases, True, copy_engine_ctx=engine, use_copy_engine=True)
    else:
        atomics.atomic_add(x, 1, 0, 0, bases, copy_engine_ctx=engine, use_copy_engine=True)


def too_much(what, dtype):
    ctx = iris.iris(1 << 20, engines=("sdma",))
    x = ctx.ones(4, dtype=dtype)
    ask_too_much[(1,)](x, ctx.get_heap_bases(), ctx.get_copy_engine_ctx(), what)


@pytest.mark.parametrize(
    ("what", "dtype", "text"),
    [
        ("dims", torch.int32, "the copy engine takes blocks of 1 or 2 dims"),
        ("block", torch.int32, "the copy engine changes one place at a time"),
        ("mask", torch.int32, "atomic_add: use_copy_engine takes no mask"),
        ("dtype", torch.float32, "the copy engine changes int32, int64, uint32 or uint64"),
    ],
)
def test_what_it_cannot_do_is_said(ranks, what, dtype, text):
    with pytest.raises(LaunchError, match=text):
        ranks(1).run(too_much, what, dtype)
