"""iris.gluon between ranks on GPUs."""

import pytest
import torch

import iris

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

if torch.cuda.is_available():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    import iris.gluon as ig

    @gluon.jit
    def moves(
        words, x, out, bases, n, rank: gl.constexpr, world: gl.constexpr, BLOCK: gl.constexpr
    ):
        """Rows of ``out`` in turn: load, get, store, put, copy, each by function and by context."""
        ctx = ig.DeviceContext.initialize(words, rank, world)
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        i = gl.arange(0, BLOCK, layout=layout)
        mask = i < n
        right = (rank + 1) % world
        gl.store(out + i, ig.load(x + i, rank, right, bases, mask), mask)
        gl.store(out + BLOCK + i, ctx.load(x + i, right, mask), mask)
        ig.get(x + i, out + 2 * BLOCK + i, rank, right, bases, mask)
        ctx.get(x + i, out + 3 * BLOCK + i, right, mask)
        ig.store(out + 4 * BLOCK + i, gl.load(x + i, mask), rank, right, bases, mask)
        ctx.store(out + 5 * BLOCK + i, gl.load(x + i, mask), right, mask)
        ig.put(x + i, out + 6 * BLOCK + i, rank, right, bases, mask)
        ctx.put(x + i, out + 7 * BLOCK + i, right, mask)
        ig.copy(x + i, out + 8 * BLOCK + i, right, right, rank, bases, mask)
        ctx.copy(x + i, out + 9 * BLOCK + i, right, right, mask)
        ctx.barrier()

    @gluon.jit
    def count(words, counters, olds, bases, rank: gl.constexpr, world: gl.constexpr):
        """Every rank changes the counters of rank 0; a block of 128, then single ones."""
        ctx = ig.DeviceContext.initialize(words, rank, world)
        i = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        ig.atomic_add(counters + i, i + rank, rank, 0, bases)
        ctx.atomic_sub(counters + 128 + i, i, 0)
        ig.atomic_max(counters + 256 + i, i * (rank + 1), rank, 0, bases)
        ctx.atomic_min(counters + 384 + i, -i * (rank + 1), 0)
        ig.atomic_or(counters + 512 + i, 1 << rank, rank, 0, bases)
        ctx.atomic_xor(counters + 640 + i, 1 << rank, 0)
        old = ig.atomic_add(counters + 768, 1, rank, 0, bases)
        while ctx.atomic_add(counters + 769, 0, 0) != rank:
            pass  # in order of ranks
        gl.store(olds, old)
        gl.store(olds + 1, ctx.atomic_xchg(counters + 770, rank + 50, 0))
        ctx.atomic_cas(counters + 769, rank, rank + 1, 0)

    @gluon.jit
    def ring(words, x, flag, epoch, rank: gl.constexpr, world: gl.constexpr, N: gl.constexpr):
        """Rank 0's data goes round; each rank adds one to it, and signals the next."""
        ctx = ig.DeviceContext.initialize(words, rank, world)
        i = gl.arange(0, N, layout=gl.BlockedLayout([2], [32], [4], [0]))
        if rank > 0:
            ctx.wait(flag, epoch, rank - 1)
        value = gl.load(x + i) + 1
        ctx.store(x + i, value, (rank + 1) % world)
        ctx.signal(flag, epoch, (rank + 1) % world)
        if rank == 0:
            ctx.wait(flag, epoch, world - 1)

    @gluon.jit
    def tiles(here, there, back, words, ROWS, rank: gl.constexpr, world: gl.constexpr):
        """Push this rank's tiles to a peer, meet, and pull them back from it."""
        ctx = ig.DeviceContext.initialize(words, rank, world)
        tile = ig.tma.buffer(here)
        arrived = ig.tma.arrival()
        phase = 0
        for row in range(0, ROWS, 64):
            ig.tma.load(here, [row, 0], tile, arrived, phase)
            ig.tma.store(there, [row, 0], tile)
            phase ^= 1
        ctx.barrier()
        for row in range(0, ROWS, 64):
            ig.tma.load(there, [row, 0], tile, arrived, phase)
            ig.tma.store(back, [row, 0], tile)
            phase ^= 1

    @gluon.jit
    def ask(x, out, flag, engine, bases, n, rank: gl.constexpr, peer: gl.constexpr):
        i = gl.arange(0, 512, layout=gl.BlockedLayout([4], [32], [4], [0]))
        ig.put(
            x + i, out + i, rank, peer, bases, i < n, copy_engine_ctx=engine, use_copy_engine=True
        )
        ig.atomic_add(flag, 1, rank, peer, bases, copy_engine_ctx=engine, use_copy_engine=True)
        ig.quiet(engine, peer)


def loaded(ctx, kernel, *args, **options):
    """Return ``kernel``, loaded on every rank: loading can block behind a peer's that waits."""
    kernel.warmup(*args, grid=(1,), **options)._init_handles()
    ctx.barrier()
    return kernel


def numbers(rank, shape, seed, dtype):
    count = torch.Size(shape).numel()
    return ((torch.arange(count).view(shape) * 7 + 29 * rank + 3 * seed) % 251 - 125).to(dtype)


def every_move(dtype):
    ctx = iris.iris(1 << 20)
    rank, world = ctx.cur_rank, ctx.num_ranks
    x, out = ctx.zeros(500, dtype=dtype), ctx.zeros(10, 512, dtype=dtype)
    for seed in range(3):
        x.copy_(numbers(rank, (500,), seed, dtype))
        out.zero_()
        iris.testing.delay(seed if seed == 1 else -1)
        args = ctx.get_device_context(), x, out, ctx.get_heap_bases(), 500, rank, world
        loaded(ctx, moves, *args, BLOCK=512)[(1,)](*args, BLOCK=512)
        ctx.barrier()
        right = numbers((rank + 1) % world, (500,), seed, dtype)
        left = numbers((rank - 1) % world, (500,), seed, dtype)
        own = numbers(rank, (500,), seed, dtype)
        wanted = [right] * 4 + [left] * 4 + [own] * 2
        assert torch.equal(out[:, :500].cpu(), torch.stack(wanted))
        assert int(out[:, 500:].abs().sum()) == 0
        ctx.barrier()


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, torch.bfloat16), (2, torch.int8), (4, torch.float32)]
)
def test_moves(ranks, world, dtype):
    ranks(world).run(every_move, dtype)


def every_atomic():
    ctx = iris.iris(1 << 20)
    rank, world = ctx.cur_rank, ctx.num_ranks
    counters, olds = ctx.zeros(771, dtype=torch.int32), ctx.zeros(2, dtype=torch.int32)
    args = ctx.get_device_context(), counters, olds, ctx.get_heap_bases(), rank, world
    loaded(ctx, count, *args)[(1,)](*args)
    ctx.barrier()
    found = [ctx.heap.peer_tensor(olds, peer).tolist() for peer in range(world)]
    assert sorted(old for old, _ in found) == list(range(world))
    assert [seen for _, seen in found] == [0, *range(50, 50 + world - 1)]
    if rank == 0:
        i = torch.arange(128)
        wanted = [
            world * i + world * (world - 1) // 2,
            -world * i,
            world * i,
            -world * i,
            torch.full((128,), (1 << world) - 1),
            torch.full((128,), (1 << world) - 1),
            torch.tensor([world, world, 50 + world - 1]),
        ]
        assert torch.equal(counters.cpu(), torch.cat(wanted).to(torch.int32))


@pytest.mark.parametrize("world", [2, 4])
def test_atomics(ranks, world):
    ranks(world).run(every_atomic)


def signals_in_a_ring():
    ctx = iris.iris(1 << 20)
    rank, world = ctx.cur_rank, ctx.num_ranks
    x, flag = ctx.zeros(1024, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    for epoch in range(1, 21):
        iris.testing.delay(epoch if epoch < world else -1, 0.01)
        args = ctx.get_device_context(), x, flag, epoch, rank, world
        loaded(ctx, ring, *args, N=1024)[(1,)](*args, N=1024)
        ctx.barrier()
    assert x.tolist() == [20 * world if rank == 0 else 19 * world + rank] * 1024


@pytest.mark.parametrize("world", [2, 4])
def test_signals(ranks, world):
    ranks(world).run(signals_in_a_ring)


def every_tile(dtype):
    ctx = iris.iris(1 << 22)
    rank, world = ctx.cur_rank, ctx.num_ranks
    right, left = (rank + 1) % world, (rank - 1) % world
    x, y, z = ctx.zeros(3, 200, 64, dtype=dtype)  # the last tile of 64 rows is cut off
    here, there, back = (
        ig.tma.descriptor(ctx, tensor, peer, (64, 64))
        for tensor, peer in ((x, rank), (y, right), (z, rank))
    )
    for seed in range(3):
        x.copy_(numbers(rank, (200, 64), seed, dtype))
        y.zero_()
        z.zero_()
        iris.testing.delay(seed if seed == 1 else -1)
        args = here, there, back, ctx.get_device_context(), 200, rank, world
        loaded(ctx, tiles, *args)[(1,)](*args)
        ctx.barrier()
        assert torch.equal(y.cpu(), numbers(left, (200, 64), seed, dtype))
        assert torch.equal(z.cpu(), numbers(rank, (200, 64), seed, dtype))
        ctx.barrier()


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (4, torch.bfloat16)])
def test_tiles_by_tma(ranks, world, dtype):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs TMA")
    ranks(world).run(every_tile, dtype)


def by_copy_engine():
    ctx = iris.iris(1 << 20, engines=("sdma",))
    rank, world = ctx.cur_rank, ctx.num_ranks
    right, left = (rank + 1) % world, (rank - 1) % world
    x, out = ctx.zeros(2, 512, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int64)
    for seed in range(3):
        x.copy_(numbers(rank, (512,), seed, torch.int32))
        ctx.barrier()
        engine, bases = ctx.get_copy_engine_ctx(), ctx.get_heap_bases()
        ask[(1,)](x, out, flag, engine, bases, 500, rank, right)
        ctx.barrier()
        assert torch.equal(out[:500].cpu(), numbers(left, (512,), seed, torch.int32)[:500])
        assert flag.tolist() == [seed + 1]
        assert out[500:].tolist() == [0] * 12
        ctx.barrier()


@pytest.mark.parametrize("world", [2, 4])
def test_the_copy_engine(ranks, world):
    ranks(world).run(by_copy_engine)
