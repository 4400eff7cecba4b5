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
# # 7. Performance on a GPU
#
# Is a stage fast? Against what? And where does the rest of the time go? This notebook reads figures
# and timelines that are kept in `benchmarks/results`, so it runs anywhere. The two commands that
# made them are at the end; run them on your GPU and this notebook shows yours.

# %%
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
from rich.console import Console

from iris.bench.report import load, points, ratios, show
from iris.bench.timeline import table
from iris.runtime.timeline import Timeline

RESULTS = Path("../benchmarks/results")


def newest(pattern):
    """The file of the latest date; of a GPU where there is one."""
    return max(RESULTS.glob(pattern), key=lambda path: ("-CPU-" not in path.name, path.name))


rows, about = load(newest("*stages*-W4.json"))
for key in ("gpu", "ranks", "gpus", "percent_of_a_gpu_each", "torch", "triton"):
    print(f"{key}: {about[key]}")

# %% [markdown]
# Four ranks share one GPU, each on its own fifth of the multiprocessors (MPS partitions). So links
# between GPUs are not in these figures: what they show is how well a stage hides the copies, the
# waits and the sums behind its product.
#
# ## The floor
#
# Every contestant is measured in the same run, inside CUDA graphs, and its result is compared with
# an fp32 product first.
#
# * `gemm` is cuBLAS on data that is already there. Nothing that also communicates can be faster:
#   it is the *floor*.
# * `unfused` is cuBLAS, and copies or sums over torch's symmetric memory before or after it.
# * `torch fused` is `torch.ops.symm_mem.fused_*`, `low contention` cuBLAS and torch's collectives
#   by copy engine.
# * `iris` is the fused stage, `iris unfused` cuBLAS and our own collective.
#
# For the sizes of Llama-3-8B, in microseconds: the median of many replays, on the slowest rank. An
# `x` marks a contestant whose result was not the product's; its time does not count.

# %%
STAGES = ("all_gather_matmul", "matmul_reduce_scatter")
console = Console(width=105, color_system=None, force_jupyter=False)
for stage in STAGES:
    chosen = [row for row in rows if row.table == stage and row.point["model"] == "8B"]
    show([replace(r, point={"M": r.point["M"]}) for r in chosen], console, spread=False)

# %% [markdown]
# Read a row from right to left: is it faster than the best peer (above 1), and how far is it from
# the floor (down to 1)? All points at once:

# %%
found = {
    stage: [(key, rivals) for name, key, rivals in points(rows) if name == stage]
    for stage in STAGES
}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
for stage, panel in zip(STAGES, axes):
    for model in dict.fromkeys(key["model"] for key, _ in found[stage]):
        line = [(key["M"], ratios(r)) for key, r in found[stage] if key["model"] == model]
        panel.plot([m for m, _ in line], [r[0] for _, r in line], "o-", label=f"iris, {model}")
        peer = [r[0] * r[1] for _, r in line]
        color = panel.lines[-1].get_color()
        panel.plot([m for m, _ in line], peer, "x--", color=color, label=f"best peer, {model}")
    panel.axhline(1, color="k", lw=0.5)
    panel.set(title=stage, xscale="log", xlabel="rows M")
axes[0].set_ylabel("time / gemm")
axes[1].legend(fontsize="small")
plt.show()

# %% [markdown]
# With few rows, everything is far above the floor, and with many rows near it. Two numbers say why.
# A product of [M, K] and [K, N] takes `2 M K N` operations, and it has to read `2 K N` bytes of
# weights. What does the floor itself achieve?

# %%
for key, rivals in found["all_gather_matmul"]:
    if key["model"] == "8B":
        seconds = rivals["gemm"].time.median / 1e6
        rate = 2 * key["M"] * key["K"] * key["N"] / seconds / 1e12
        read = 2 * key["K"] * key["N"] / seconds / 1e12
        sent = 2 * key["M"] * key["K"] / seconds / 1e9
        print(f"M = {key['M']:5}: {rate:6.1f} TFLOP/s, {read:.2f} TB/s of weights, "
              f"{sent:6.1f} GB/s of x to gather in that time")  # fmt: skip

# %% [markdown]
# Where the rate of operations levels off, the matrix unit is the limit; where the weights' does,
# memory is. There the product is so short that the fixed costs of a stage (to signal, to notice,
# to start) are as long as it is. No overlap hides what comes before the first tile or after the
# last.
#
# ## The timeline
#
# `python -m iris.bench.timeline` records what each program of a stage does: when it pushed its rows
# to the peers, waited for theirs, computed a tile, stored it. Time runs to the right, a line is one
# multiprocessor, and two launches follow each other. A rank starts with its own rows, so that it
# hardly waits.

# %%
gather = Timeline.load(newest("*-timeline-all_gather_matmul-*-W4.json.gz"))
print("recorded on", gather.about["device"])
gather

# %%
scatter = Timeline.load(newest("*-timeline-matmul_reduce_scatter-*-W4.json.gz"))
scatter

# %% [markdown]
# Blue is what we want to see: tiles. Look for three things.
#
# * *Red within the blue*: a program waits for rows, or for parts, that are late.
# * *The ragged right edge*: programs that are done while others still compute. There are only so
#   many tiles to share out; where the last wave would leave most multiprocessors idle, its tiles
#   are cut along the contracted dim.
# * *What comes before the first tile and after the last*: pushes at the start, sums at the end. It
#   is short where it is shared by all programs, and it is what no overlap can hide.
#
# The mean of a multiprocessor, of each kind:

# %%
for timeline in (gather, scatter):
    console.print(table(timeline))

# %% [markdown]
# And one line of the second, step by step:

# %%
track = next(track for rank, track in scatter.tracks() if rank == 0)
mine = [event for event in scatter.events if (event.rank, event.track) == (0, track)]
print(track)
for event in sorted(mine, key=lambda event: event.start)[:14]:
    start, length = event.start / 1e3, (event.end - event.start) / 1e3
    print(f"{start:8.1f} us  {event.name:<16} {length:8.1f} us")

# %% [markdown]
# To look closer, open the `.json.gz` file in [ui.perfetto.dev](https://ui.perfetto.dev): a click on
# a wait says for which ranks, one on a tile which rows and columns.
#
# ## Does looking change it?
#
# A stage that does not record is the same machine code as if there were no recording. One that does
# takes a little longer. Both were measured beside the product alone, with operands that come from
# memory anew each time, which takes longer than what is recorded above:

# %%
for timeline in (gather, scatter):
    print({name: round(time, 1) for name, time in timeline.about["times_us"].items()})

clock, ranks = gather.about["clock"], gather.about["ranks"]
print(f"clock: {clock}")
print("dropped:", [rank["dropped"] for rank in ranks])

# %% [markdown]
# ## On your GPU
#
# ```sh
# python -m iris.bench stages --ranks 4 --models 8B 70B --results benchmarks/results
# python -m iris.bench.timeline all_gather_matmul matmul_reduce_scatter --ranks 4 --rows 512 \
#     --results benchmarks/results
# ```
#
# For a program of yours, `with iris.profile("trace.json"):` records hosts, waits and kernels of all
# ranks, and `tracing=True` adds what is inside the kernels: see [Profiling](../docs/profiling.md).
# Before you look into kernels, ask `f.explain(...)` whether a stage was fused at all, and
# `python -m iris.bench replay` how long the host takes for a call.
