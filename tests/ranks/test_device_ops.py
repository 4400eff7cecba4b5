"""Loads, stores and copies between ranks, from inside kernels."""

import pytest
import torch
import triton
import triton.language as tl

import iris
import iris.device.pickling  # kernels of this file travel to the ranks
from iris.device import ops
from iris.device.context import DeviceContext

pytestmark = pytest.mark.ranks

DTYPES = [
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
SIZE = 48  # elements of a tensor; kernels use blocks of 64 and a mask


def numbered(ctx, dtype, shape=(SIZE,)):
    """Return a tensor on the heap whose elements differ by rank and place."""
    count = torch.Size(shape).numel()
    values = torch.arange(count).reshape(shape) * (ctx.cur_rank + 1) % 13
    if dtype is torch.bool:
        values = values % 2
    tensor = ctx.empty(*shape, dtype=dtype)
    tensor.copy_(values.to(dtype))
    return tensor


def of_rank(ctx, rank, dtype, shape=(SIZE,)):
    """Return what ``numbered`` makes on ``rank``."""
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) * (rank + 1) % 13
    return (values % 2 if dtype is torch.bool else values).to(dtype)


def same(actual, expected):
    """Assert that two tensors are equal, bit for bit."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)), (actual, expected)


@triton.jit
def every_move(x, out, bases, rank, peer, n, STRIDE, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, ops.load(x + i, rank, peer, bases, mask=mask), mask=mask)
    ops.get(x + i, out + STRIDE + i, peer, rank, bases, mask=mask)
    ops.get(x + i, out + 2 * STRIDE + i, rank, peer, bases, mask=mask)
    ops.store(out + 3 * STRIDE + i, tl.load(x + i, mask=mask), rank, peer, bases, mask=mask)
    ops.put(x + i, out + 4 * STRIDE + i, rank, peer, bases, mask=mask)
    ops.copy(x + i, out + 5 * STRIDE + i, peer, peer, rank, bases, mask=mask)


def moves(dtype, table):
    ctx = iris.iris(1 << 20)
    rank, world = ctx.cur_rank, ctx.num_ranks
    right, left = (rank + 1) % world, (rank - 1) % world
    if table:
        both, bases = ctx.allocate_symmetric(7, 64, dtype=dtype)
    else:
        both, bases = ctx.empty(7, 64, dtype=dtype), ctx.get_heap_bases()
    both.view(torch.uint8).fill_(1)
    both[6, :SIZE].copy_(of_rank(ctx, rank, dtype))
    ctx.barrier()
    every_move[(1,)](both[6], both, bases, rank, right, SIZE, 64, BLOCK=64)
    ctx.barrier()
    for row in (0, 1, 2):
        same(both[row, :SIZE], of_rank(ctx, right, dtype))
    for row in (3, 4):
        same(both[row, :SIZE], of_rank(ctx, left, dtype))
    same(both[5, :SIZE], of_rank(ctx, rank, dtype))
    assert bool((both[:6, SIZE:].view(torch.uint8) == 1).all())  # nothing past the mask


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves_of_every_dtype_are_exact(ranks, dtype):
    ranks(2).run(moves, dtype, table=False)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_moves_in_worlds_of_other_sizes(ranks, world):
    ranks(world).run(moves, torch.float32, table=False)


def test_moves_by_peer_table(ranks):
    ranks(2).run(moves, torch.bfloat16, table=True)


@triton.jit
def context_moves(words, x, out, n, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(words, rank, world)
    i = tl.arange(0, BLOCK)
    mask = i < n
    right = (rank + 1) % world
    tl.store(out + i, ctx.load(x + i, from_rank=right, mask=mask, other=7))
    ctx.get(x + i, out + BLOCK + i, from_rank=right, mask=mask)
    ctx.store(out + 2 * BLOCK + i, tl.load(x + i, mask=mask), to_rank=right, mask=mask)
    ctx.put(x + i, out + 3 * BLOCK + i, to_rank=right, mask=mask)
    ctx.copy(x + i, out + 4 * BLOCK + i, from_rank=right, to_rank=right, mask=mask)
    ctx.barrier()
    tl.store(out + 5 * BLOCK + i, tl.load(out + 3 * BLOCK + i, mask=mask), mask=mask)


def moves_by_context():
    ctx = iris.iris(1 << 20)
    rank, world = ctx.cur_rank, ctx.num_ranks
    x = numbered(ctx, torch.float32)
    out = ctx.zeros(6, 64, dtype=torch.float32)
    ctx.barrier()
    context_moves[(1,)](ctx.get_device_context(), x, out, SIZE, rank, world, BLOCK=64)
    ctx.barrier()
    right = of_rank(ctx, (rank + 1) % world, torch.float32)
    left = of_rank(ctx, (rank - 1) % world, torch.float32)
    for row, expected in enumerate((right, right, left, left, x, left)):
        same(out[row, :SIZE], expected)
    assert out[0, SIZE:].tolist() == [7.0] * (64 - SIZE)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_context_offers_every_move(ranks, world):
    ranks(world).run(moves_by_context)


@triton.jit
def cached_moves(
    x, out, bases, rank, peer, n, LOAD: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.arange(0, BLOCK)
    mask = i < n
    ops.put(x + i, out + i, rank, peer, bases, mask, 7, LOAD, STORE)
    value = ops.load(x + i, rank, peer, bases, mask, 7, LOAD)
    tl.store(out + BLOCK + i, value)
    ops.store(out + 2 * BLOCK + i, value, rank, peer, bases, mask, STORE)
    ops.get(x + i, out + 3 * BLOCK + i, rank, peer, bases, mask, 7, LOAD, STORE)
    ops.copy(x + i, out + 4 * BLOCK + i, peer, peer, rank, bases, mask, 7, LOAD, STORE)


def moves_past_caches(load, store):
    ctx = iris.iris(1 << 20)
    rank, peer = ctx.cur_rank, 1 - ctx.cur_rank
    x, out = numbered(ctx, torch.float32), ctx.zeros(5, 64)
    ctx.barrier()
    cached_moves[(1,)](x, out, ctx.get_heap_bases(), rank, peer, SIZE, load, store, BLOCK=64)
    ctx.barrier()
    theirs = of_rank(ctx, peer, torch.float32)
    # Row 2 has what the peer loaded, from here.
    for row, expected in enumerate((theirs, theirs, x, theirs, x)):
        same(out[row, :SIZE], expected)
    assert out[1, SIZE:].tolist() == [7.0] * (64 - SIZE)
    assert not out[[0, 2, 3, 4], SIZE:].any()


@pytest.mark.parametrize(
    ("load", "store"), [(None, None), (".ca", ".wb"), (".cg", ".cs"), (".cv", ".wt")]
)
def test_moves_with_cache_modifiers(ranks, load, store):
    ranks(2).run(moves_past_caches, load, store)


@triton.jit
def put_block(x, out, bases, rank, peer, rows, row_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.arange(0, ROWS)
    at = row[:, None] * row_stride + tl.arange(0, COLS)[None, :]
    ops.put(x + at, out + at, rank, peer, bases, mask=row[:, None] < rows, hint=(1, COLS))


def blocks_and_views():
    ctx = iris.iris(1 << 20)
    rank, world = ctx.cur_rank, ctx.num_ranks
    whole = numbered(ctx, torch.int32, (8, 32))
    out = ctx.zeros(8, 32, dtype=torch.int32)
    view = whole[2:7, 16:]  # rows of a view that starts inside
    ctx.barrier()
    put_block[(1,)](
        view, out[2:7, 16:], ctx.get_heap_bases(), rank, (rank + 1) % world, 5, 32, ROWS=8, COLS=16
    )
    ctx.barrier()
    expected = torch.zeros(8, 32, dtype=torch.int32)
    expected[2:7, 16:] = of_rank(ctx, (rank - 1) % world, torch.int32, (8, 32))[2:7, 16:]
    same(out, expected)


def test_blocks_of_views_with_a_hint(ranks):
    # torch-spyre/torch-spyre#3018
    ranks(2).run(blocks_and_views)


@triton.jit
def use_at_once(counter, bases, rank, world):
    peer = tl.program_id(0)
    if peer < world:
        address = ops.translate(counter, bases, rank, peer)
        tl.atomic_add(address, 1, scope="sys")


def fresh_allocations(rounds):
    ctx = iris.iris(1 << 20)
    kept = []
    for _ in range(rounds):
        counter, bases = ctx.allocate_symmetric(1, dtype=torch.int32)
        counter.zero_()
        ctx.barrier()
        use_at_once[(ctx.num_ranks,)](counter, bases, ctx.cur_rank, ctx.num_ranks)
        ctx.barrier()
        kept.append(int(counter))
    assert kept == [ctx.num_ranks] * rounds


def test_new_allocations_are_usable_on_every_peer_at_once(ranks):
    # NVIDIA/cutlass#3143
    ranks(2).run(fresh_allocations, 500 if torch.cuda.is_available() else 20)
