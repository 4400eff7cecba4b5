# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Hello ranks
#
# A *rank* is one of several processes that run the same code together. In iris every rank has a
# **heap** that all other ranks can address: from PyTorch, and from inside a Triton kernel. This
# notebook needs no GPU: the kernels run in Triton's interpreter.

# %%
import time

import torch
import triton
import triton.language as tl

import iris

mesh = iris.local_mesh(4, heap_size=1 << 20)

# %% [markdown]
# `mesh.run` runs a plain function on every rank and returns what each of them returned, in rank
# order. On a rank, `iris.current()` is its *context*: who it is, and its heap. What a rank prints
# appears here with its number.


# %%
def hello():
    ctx = iris.current()
    print(f"hello, I am rank {ctx.get_rank()} of {ctx.get_num_ranks()}, on the {ctx.get_device()}")
    return ctx.get_rank() ** 2


mesh.run(hello)

# %% [markdown]
# ## The symmetric heap
#
# Tensors on the heap are made as in torch: `ctx.zeros`, `ctx.ones`, `ctx.full`, `ctx.randn` and so
# on. All ranks make them together, and a tensor lies at the same place of every rank's heap. So
# one address, moved by the distance between two heaps, is the address of the same tensor on a
# peer.


# %%
def places():
    ctx = iris.current()
    x = ctx.full((4,), float(ctx.get_rank()))
    bases = ctx.get_heap_bases().tolist()
    return x.data_ptr() - bases[ctx.get_rank()]


offsets = mesh.run(places)
print("the same offset on every rank:", len(set(offsets)) == 1)

# %% [markdown]
# ## Load from a peer
#
# `iris.load` reads what *another* rank has at a pointer of this rank. Here every rank reads its
# right neighbour's tensor. The two barriers matter: nobody reads before all have written, and
# nobody goes on to overwrite (or free) what a slow neighbour still reads.


# %%
@triton.jit
def pull(x, y, heap_bases, rank: tl.constexpr, peer: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, iris.load(x + i, rank, peer, heap_bases))


def from_the_right():
    ctx = iris.current()
    rank, right = ctx.get_rank(), (ctx.get_rank() + 1) % ctx.get_num_ranks()
    x = ctx.full((4,), 10.0 * rank)
    y = ctx.zeros(4)
    ctx.barrier()
    pull[(1,)](x, y, ctx.get_heap_bases(), rank, right, N=4)
    ctx.barrier()
    return y


for rank, y in enumerate(mesh.run(from_the_right)):
    print(f"rank {rank} has {y.tolist()}")

# %% [markdown]
# ## Store to a peer
#
# `iris.store` writes there. Everyone writes its number into its own column of rank 0's table.


# %%
@triton.jit
def report(table, heap_bases, rank: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    iris.store(table + i * N + rank, i * 10 + rank, rank, 0, heap_bases)


def to_rank_0():
    ctx = iris.current()
    table = ctx.zeros((4, 4), dtype=torch.int32)
    ctx.barrier()
    report[(1,)](table, ctx.get_heap_bases(), ctx.get_rank(), N=4)
    ctx.barrier()
    return table


tables = mesh.run(to_rank_0)
print(tables[0])
print("others are untouched:", not any(table.any() for table in tables[1:]))

# %% [markdown]
# ## Put and get
#
# These copy between two places: `iris.put` from here to a peer, `iris.get` from a peer to here.
# With a `mask`, only part of a block moves.


# %%
@triton.jit
def shift(x, y, heap_bases, rank: tl.constexpr, right: tl.constexpr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    iris.put(x + i, y + i, rank, right, heap_bases, mask=i < n)


def to_the_right():
    ctx = iris.current()
    rank, right = ctx.get_rank(), (ctx.get_rank() + 1) % ctx.get_num_ranks()
    x = ctx.full((8,), float(rank))
    y = ctx.full((8,), -1.0)
    ctx.barrier()
    shift[(1,)](x, y, ctx.get_heap_bases(), rank, right, 5, BLOCK=8)
    ctx.barrier()
    return y


print(mesh.run(to_the_right)[1])

# %% [markdown]
# ## Atomics
#
# Ranks may update one word together. All add to a counter on rank 0; the sum is right whatever the
# order.


# %%
@triton.jit
def count(counter, heap_bases, rank: tl.constexpr):
    iris.atomic_add(counter, rank + 1, rank, 0, heap_bases)


def together():
    ctx = iris.current()
    counter = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    for _ in range(25):
        count[(1,)](counter, ctx.get_heap_bases(), ctx.get_rank())
    ctx.barrier()
    return int(counter)


print(mesh.run(together)[0], "=", 25 * (1 + 2 + 3 + 4))

# %% [markdown]
# ## Barriers
#
# A barrier is a point that no rank passes until all have come to it. Rank 2 is late here, and all
# leave together.


# %%
def late():
    ctx = iris.current()
    if ctx.get_rank() == 2:
        time.sleep(0.3)
    start = time.perf_counter()
    ctx.barrier()
    return time.perf_counter() - start > 0.1


print("who waited:", mesh.run(late))

# %% [markdown]
# ## Collectives
#
# Most of what ranks do with a heap has a name. Outside a program these run at once, on the ranks
# that call them:


# %%
def collectives():
    rank = iris.current().get_rank()
    x = torch.arange(4.0) + 10 * rank
    return iris.all_gather(x)[::4], iris.all_reduce(x), iris.reduce_scatter(x)


for result in mesh.run(collectives)[1]:
    print(result)

# %%
mesh.close()

# %% [markdown]
# Next: [2. Your first program](2_first_program.ipynb), where iris writes such kernels for you.
