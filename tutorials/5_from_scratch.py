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
# # 5. iris from scratch
#
# The whole idea of iris in NumPy and threads, with no torch and no GPU: **trace** a function into
# a graph, **check** where every value lives, **fuse** products with the communication next to
# them, and **run** the result on ranks. One mesh axis, `tp`, is enough to see it all.

# %%
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

# %% [markdown]
# ## Types
#
# A value is spread over the ranks in one of three ways: every rank holds all of it, every rank
# holds some rows (or columns) of it, or every rank holds one *term* of it and a sum is still due.


# %%
@dataclass(frozen=True)
class Type:
    """Global shape, the dim that is split over the ranks, and whether a sum over them is due."""

    shape: tuple
    split: int | None = None
    partial: bool = False

    def __str__(self):
        sizes = [f"{n}/tp" if dim == self.split else f"{n}" for dim, n in enumerate(self.shape)]
        return f"f32[{', '.join(sizes)}]" + "+tp" * self.partial


print(Type((8, 4)), Type((8, 4), split=0), Type((8, 4), partial=True), sep="   ")

# %% [markdown]
# ## Tracing
#
# To trace a function, call it with stand-ins that hold no data. Each operation only writes itself
# down, with the type that its rule gives. The list of what was written down is the graph.


# %%
@dataclass(frozen=True)
class Node:
    name: str
    op: str
    args: tuple  # names of values
    attrs: dict
    type: Type

    def __str__(self):
        given = [f"%{arg}" for arg in self.args] + [f"{k}={v}" for k, v in self.attrs.items()]
        return f"%{self.name}: {self.type} = {self.op}({', '.join(given)})"


@dataclass
class Graph:
    inputs: dict = field(default_factory=dict)  # name -> Type
    nodes: list = field(default_factory=list)
    output: str = ""

    def __str__(self):
        head = ", ".join(f"%{name}: {type_}" for name, type_ in self.inputs.items())
        lines = [
            f"graph({head}):",
            *(f"  {node}" for node in self.nodes),
            f"  return %{self.output}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class StandIn:
    graph: Graph
    name: str
    type: Type

    def __matmul__(self, other):
        return matmul(self, other)

    def __add__(self, other):
        return add(self, other)


def op(rule):
    """Turn a type rule into the function that programs call: it adds a node to the graph."""

    def record(*args, **attrs):
        graph = args[0].graph
        type_ = rule(*(arg.type for arg in args), **attrs)
        name = str(len(graph.nodes))
        graph.nodes.append(Node(name, rule.__name__, tuple(a.name for a in args), attrs, type_))
        return StandIn(graph, name, type_)

    return record


def trace(fn, **types):
    graph = Graph(dict(types))
    graph.output = fn(*(StandIn(graph, name, type_) for name, type_ in types.items())).name
    return graph


# %% [markdown]
# ## Rules
#
# The rule of an operation says what it makes of its arguments' types, and refuses what would run
# and be wrong. Look at `matmul`: split along the dim that is summed, each rank gets one term of
# the product.


# %%
def require(condition, message):
    if not condition:
        raise TypeError(message)


@op
def matmul(a, b):
    require(not (a.partial or b.partial), f"matmul: {a} @ {b}: sum first")
    shape = (a.shape[0], b.shape[1])
    splits = {
        (None, None): Type(shape),
        (0, None): Type(shape, split=0),
        (None, 1): Type(shape, split=1),
        (1, 0): Type(shape, partial=True),
    }
    require((a.split, b.split) in splits, f"matmul: {a} @ {b}: the splits do not fit")
    return splits[a.split, b.split]


@op
def silu(x):
    require(not x.partial, f"silu of {x}: silu(a + b) is not silu(a) + silu(b)")
    return x


@op
def add(a, b):
    require(a == b, f"add: {a} and {b} differ: every rank would add its own copy of one to a term")
    return a


@op
def all_gather(x, dim):
    require(x.split == dim, f"all_gather: dim {dim} of {x} is not split")
    return Type(x.shape)


@op
def reduce_scatter(x, dim):
    require(x.partial, f"reduce_scatter: no sum is due in {x}")
    return Type(x.shape, split=dim)


@op
def all_reduce(x):
    require(x.partial, f"all_reduce: no sum is due in {x}")
    return Type(x.shape)


# %% [markdown]
# Here is the feed-forward block of a transformer, tensor-parallel, and its graph:


# %%
def mlp(x, w_up, w_down):
    h = silu(all_gather(x, dim=0) @ w_up)
    return reduce_scatter(h @ w_down, dim=0)


M, K, F = 8, 4, 16
types = {"x": Type((M, K), 0), "w_up": Type((K, F), 1), "w_down": Type((F, K), 0)}
graph = trace(mlp, **types)
print(graph)

# %% [markdown]
# A mistake that runs without an error in eager mode, and gives a wrong number, does not even
# trace:


# %%
def with_bias(x, w_up, w_down, bias):
    h = silu(all_gather(x, dim=0) @ w_up)
    return reduce_scatter(h @ w_down + bias, dim=0)


try:
    trace(with_bias, **types, bias=Type((M, K)))
except TypeError as error:
    print(error)

# %% [markdown]
# ## Ranks
#
# A rank is a thread with a heap that its peers can read. It publishes a value in a slot and raises
# a flag; a reader waits for the flag. A flag holds the number of the run (the *epoch*), so it
# never has to be lowered; and each slot has two halves, for odd and even epochs. A rank that
# writes the same half again has seen a flag of every peer from the epoch between, so all have
# finished reading the old value.
#
# To see overlap on one machine, the world has a clock of its own: a value needs `WIRE` seconds to
# reach the next peer, and a product of one chunk takes `WORK` seconds.

# %%
WIRE = WORK = 0.0


class Rank:
    def __init__(self, number, world):
        self.number, self.world, self.epoch = number, world, 0
        self.heap = {}  # (slot, parity) -> (epoch, time of publishing, value)

    def put(self, slot, value):
        with self.world.changed:
            self.heap[slot, self.epoch % 2] = self.epoch, time.monotonic(), value
            self.world.changed.notify_all()

    def get(self, peer, slot):
        def there():
            return source.heap.get((slot, self.epoch % 2), (0,))[0] == self.epoch

        source = self.world.ranks[peer]
        with self.world.changed:
            if not self.world.changed.wait_for(there, timeout=5):
                raise TimeoutError(f"rank {self.number} waits for {slot!r} of rank {peer}")
            _, published, value = source.heap[slot, self.epoch % 2]
        hops = (self.number - peer) % self.world.size
        time.sleep(max(0.0, published + hops * WIRE - time.monotonic()))
        return value


class World:
    def __init__(self, size):
        self.size, self.changed = size, threading.Condition()
        self.ranks = [Rank(number, self) for number in range(size)]

    def run(self, fn, shards):
        """Call fn(rank, *shards of that rank) on every rank at once; results in rank order."""
        results = [None] * self.size

        def main(rank):
            rank.epoch += 1
            try:
                results[rank.number] = fn(rank, *shards[rank.number])
            except Exception as error:
                results[rank.number] = error

        threads = [threading.Thread(target=main, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


# %% [markdown]
# ## Kernels
#
# One function an operation, over this rank's shards. `everyone` starts with the rank itself: its
# own part is there at once, the part of the neighbour comes next.


# %%
def product(a, b):
    time.sleep(WORK * len(a) / M * world.size)
    return a @ b


def everyone(rank):
    return [(rank.number - hop) % rank.world.size for hop in range(rank.world.size)]


def gather_kernel(rank, slot, x, dim):
    rank.put(slot, x)
    parts = {peer: rank.get(peer, slot) for peer in everyone(rank)}
    return np.concatenate([parts[peer] for peer in sorted(parts)], dim)


def sum_kernel(rank, slot, x):
    rank.put(slot, x)
    terms = {peer: rank.get(peer, slot) for peer in everyone(rank)}
    return sum(terms[peer] for peer in sorted(terms))  # in rank order: the same bits everywhere


def scatter_kernel(rank, slot, x, dim):
    return np.array_split(sum_kernel(rank, slot, x), rank.world.size, dim)[rank.number]


KERNELS = {
    "matmul": lambda rank, slot, a, b: product(a, b),
    "silu": lambda rank, slot, x: x / (1 + np.exp(-x)),
    "add": lambda rank, slot, a, b: a + b,
    "all_gather": gather_kernel,
    "reduce_scatter": scatter_kernel,
    "all_reduce": sum_kernel,
}


def execute(graph, rank, *shards):
    values = dict(zip(graph.inputs, shards))
    for node in graph.nodes:
        args = [values[name] for name in node.args]
        values[node.name] = KERNELS[node.op](rank, node.name, *args, **node.attrs)
    return values[graph.output]


# %% [markdown]
# ## The decorator
#
# Trace once for each set of shapes, then replay. The caller passes and gets global arrays.


# %%
def split(array, dim):
    return [array] * world.size if dim is None else np.array_split(array, world.size, dim)


def spmd(in_splits, out_split, passes=()):
    def decorate(fn):
        names, graphs = fn.__code__.co_varnames[: fn.__code__.co_argcount], {}

        def call(*arrays):
            shapes = tuple(array.shape for array in arrays)
            if shapes not in graphs:
                types = [Type(shape, dim) for shape, dim in zip(shapes, in_splits)]
                graph = trace(fn, **dict(zip(names, types)))
                for each in passes:
                    graph = each(graph)
                graphs[shapes] = graph
            graph = graphs[shapes]
            shards = zip(*(split(array, dim) for array, dim in zip(arrays, in_splits)))
            results = world.run(lambda rank, *mine: execute(graph, rank, *mine), list(shards))
            return results[0] if out_split is None else np.concatenate(results, out_split)

        return call

    return decorate


world = World(4)
plain = spmd(in_splits=(0, 1, 0), out_split=0)(mlp)

rng = np.random.default_rng(0)
x, w_up, w_down = (rng.standard_normal(t.shape, dtype=np.float32) for t in types.values())
h = x @ w_up
expected = (h / (1 + np.exp(-h))) @ w_down
for _ in range(3):
    print(f"largest difference from one rank: {abs(plain(x, w_up, w_down) - expected).max():.0e}")

# %% [markdown]
# ## Fusion
#
# A pass is a function from graph to graph. This one has two equations:
#
# * `all_gather(x, dim=0) @ w  =>  all_gather_matmul(x, w)`
# * `reduce_scatter(h @ w, dim=0)  =>  matmul_reduce_scatter(h, w)`
#
# A value that something else reads as well must stay, so the pass counts the uses first.

# %%
STAGES = {
    ("all_gather", "matmul"): "all_gather_matmul",
    ("matmul", "reduce_scatter"): "matmul_reduce_scatter",
}


def fuse(graph):
    uses = Counter([arg for node in graph.nodes for arg in node.args] + [graph.output])
    nodes = {}
    for node in graph.nodes:
        first = nodes.get(node.args[0])
        stage = first and STAGES.get((first.op, node.op))
        if stage and uses[first.name] == 1 and {**first.attrs, **node.attrs} == {"dim": 0}:
            del nodes[first.name]
            node = Node(node.name, stage, first.args + node.args[1:], {}, node.type)
        nodes[node.name] = node
    return Graph(graph.inputs, list(nodes.values()), graph.output)


print(fuse(graph))

# %% [markdown]
# Why fuse? Because a stage can work chunk by chunk. The rows of a product need only their own rows
# of `x`, so the first chunk starts before the others have arrived. And the rows for a peer can be
# on their way while the next rows are computed.


# %%
def all_gather_matmul(rank, slot, x, w):
    rank.put(slot, x)
    rows = {peer: product(rank.get(peer, slot), w) for peer in everyone(rank)}
    return np.concatenate([rows[peer] for peer in sorted(rows)])


def matmul_reduce_scatter(rank, slot, h, w):
    chunks = np.array_split(h, rank.world.size)
    own, *others = everyone(rank)
    for peer in (*others, own):  # the furthest first: it is longest on its way
        rank.put((slot, peer), product(chunks[peer], w))
    terms = {peer: rank.get(peer, (slot, rank.number)) for peer in everyone(rank)}
    return sum(terms[peer] for peer in sorted(terms))


KERNELS |= {"all_gather_matmul": all_gather_matmul, "matmul_reduce_scatter": matmul_reduce_scatter}
fused = spmd(in_splits=(0, 1, 0), out_split=0, passes=[fuse])(mlp)
print(f"largest difference: {abs(fused(x, w_up, w_down) - plain(x, w_up, w_down)).max():.0e}")

# %% [markdown]
# With a slow wire the difference shows. Unfused, a rank waits for all of `x`, then multiplies;
# fused, the wire and the product work at the same time.

# %% tags=["varies"]
WIRE = WORK = 0.05
for name, program in (("unfused", plain), ("fused", fused)):
    start = time.perf_counter()
    program(x, w_up, w_down)
    print(f"{name:8} {time.perf_counter() - start:.2f} s")
WIRE = WORK = 0.0

# %% [markdown]
# ## What iris adds
#
# The shape is the same; each part is the real thing.
#
# | here | in iris |
# | --- | --- |
# | stand-ins and six operations | any PyTorch function, traced by `make_fx` |
# | one axis, even splits | meshes of several axes, splits as `torch.chunk` makes them |
# | two equations in one pass | a list of passes, each verified; reasons for what was not fused |
# | `product(get(peer), w)` | one Triton kernel that waits for flags inside its tile loop |
# | threads and dictionaries | processes and GPUs over a symmetric heap |
# | replay of a list of nodes | replay of one CUDA graph |
#
# Next: [6. Debugging](6_debugging.ipynb).
