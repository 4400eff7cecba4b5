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
# # 6. Debugging
#
# Programs on many ranks fail in ways that programs on one do not: one rank waits for ever, ranks
# disagree, a store lands in somebody else's memory. In iris each of these ends with an error that
# says which rank, where, and what to do. This notebook breaks things on purpose.

# %%
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

import iris
from iris import P

mesh = iris.local_mesh(4, "tp", heap_size=1 << 20, env={"IRIS_CHECK": "1"})


def message(call, *args):
    """Call, and show the error that it ends with."""
    try:
        call(*args)
    except iris.IrisError as error:
        print(f"{type(error).__name__}: {error}")


# %% [markdown]
# ## A hang that becomes an error
#
# Rank 2 returns early. The others would wait for ever; but every wait is bounded by
# `IRIS_TIMEOUT`, and the error names the rank that did not come.


# %% tags=["varies"]
def early_exit():
    if iris.current().get_rank() == 2:
        return
    iris.all_reduce(torch.ones(4))


os.environ["IRIS_TIMEOUT"] = "2"
start = time.perf_counter()
message(mesh.run, early_exit)
print(f"after {time.perf_counter() - start:.0f} s")
del os.environ["IRIS_TIMEOUT"]

# %% [markdown]
# The mesh is still usable:

# %%
print(mesh.run(lambda: int(iris.all_reduce(torch.ones(1)))))

# %% [markdown]
# ## Ranks that disagree
#
# When ranks meet in different calls, or in one call with different shapes, all of them raise at
# once, and each is quoted.


# %%
def different_shapes():
    rows = 3 if iris.current().get_rank() == 1 else 4
    iris.all_reduce(torch.ones(rows))


message(mesh.run, different_shapes)

# %% [markdown]
# In a program the graphs are compared before anything runs. Here the function branches on the
# rank, so the ranks trace different programs:


# %%
@iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P())
def branches(x):
    if iris.current().get_rank() == 0:
        x = 2 * x
    return iris.all_reduce(x.sum(0), "tp")


message(branches, torch.ones(4, 2))

# %% [markdown]
# ## An exception on some ranks
#
# The ranks that failed are listed once for each different failure, with your lines only. Rank 0
# did nothing wrong: it was waiting for them.


# %%
def unlucky():
    rank = iris.current().get_rank()
    if rank > 0:
        raise ValueError("no luck")
    iris.all_reduce(torch.ones(1))


message(mesh.run, unlucky)

# %% [markdown]
# ## A store past the end
#
# With `IRIS_CHECK=1` guard words lie before and behind every tensor on the heap. Barriers,
# allocations and the ends of programs look at them. Here a rank writes five numbers into a tensor
# of four, and all ranks hear of it.


# %%
def overrun():
    ctx = iris.current()
    x = ctx.zeros(4)
    if ctx.get_rank() == 3:
        x.as_strided((5,), (1,)).fill_(7.0)
    ctx.barrier()


message(mesh.run, overrun)

# %% [markdown]
# ## A race
#
# Here each rank puts its numbers into the next rank's `y`, which that rank sums up. Nothing makes
# it wait for the numbers. The sums may be right a thousand times; on a busy machine, or on a GPU,
# they are wrong now and then.
#
# With `IRIS_CHECK=1`, CPU ranks write down every access to the heap, in kernels too, and what
# orders it: launches, barriers, signals and waits, atomics. Two accesses that nothing orders are a
# race, whichever came first this time. The answer does not depend on luck.


# %%
@triton.jit
def put_to_next(words, x, y, rank: tl.constexpr, world: tl.constexpr):
    ctx = iris.DeviceContext.initialize(words, rank, world)
    i = tl.arange(0, 16)
    ctx.put(x + i, y + i, to_rank=(rank + 1) % world)


def pass_on(wait):
    ctx = iris.current()
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    x, y = ctx.full((16,), float(rank)), ctx.zeros(16)
    put_to_next[(1,)](ctx.get_device_context(), x, y, rank, world)
    if wait:
        ctx.barrier()
    total = float(y.sum())
    ctx.check()
    return total


message(mesh.run, pass_on, False)

# %% [markdown]
# The report has both accesses, the allocation they meet in, and what would order them. With the
# barrier, all is well:

# %%
print(mesh.run(pass_on, True))

# %% [markdown]
# The kernels that iris makes are checked in the same way, in every program that runs with
# `IRIS_LOWERING=triton`. More in [docs/checking.md](../docs/checking.md).

# %% [markdown]
# ## A rank that dies
#
# A dead process is noticed and named. What it kept is lost, so iris does not replace it in
# silence: you restart.


# %%
def dies():
    if iris.current().get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    iris.all_reduce(torch.ones(1))


message(mesh.run, dies)
message(mesh.run, dies)
mesh.restart()
print(mesh)

# %% [markdown]
# ## Dumps and repros
#
# With `IRIS_DUMP` set to a folder, every rank writes each step of a program there: the graph as
# imported, after each pass, and the plan that runs.


# %%
@iris.spmd(mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
def project(x, w):
    return iris.all_gather(x, "tp", dim=0) @ w


folder = Path(tempfile.mkdtemp())
os.environ["IRIS_DUMP"] = str(folder)
project(torch.ones(8, 4), torch.ones(4, 8))
del os.environ["IRIS_DUMP"]
steps = sorted((folder / "rank0" / "project").iterdir())
print(*(step.name for step in steps), sep="\n")
print(next(step for step in steps if "plan" in step.name).read_text())

# %% [markdown]
# `repro.py` runs the graph alone: all ranks in one process, in NumPy, on random inputs. It needs
# neither your model nor several processes, so it is what to send with a bug report.

# %%
repro = folder / "rank0" / "project" / "repro.py"
print(subprocess.run([sys.executable, repro], capture_output=True, text=True, check=True).stdout)

# %%
mesh.close()

# %% [markdown]
# Every error and its way out: [docs/errors.md](../docs/errors.md).
