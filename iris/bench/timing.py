"""Times of work captured in CUDA graphs, the slowest rank counted."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Time:
    """Microseconds a call on the slowest rank: median, 10th and 90th percentile over replays."""

    median: float
    low: float
    high: float


def capture(call: Callable[[], object], inner: int) -> torch.cuda.CUDAGraph:
    """``inner`` calls in one graph, after two outside."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        for _ in range(inner):
            call()
    dist.barrier()
    return graph


def time_graph(
    call: Callable[[], object], align: Callable[[], object], *, replays: int = 15, span: float = 5e3
) -> Time:
    """Time ``call`` in a graph of as many calls as last about ``span`` microseconds. Collective.

    ``align`` enqueues a barrier of the ranks on the device before each replay, so that it is not
    the hosts' skew that is timed.
    """
    inner = 4
    graph = capture(call, inner)
    first = _replay(graph, align, 3, inner)
    longer = min(200, int(span / first.median))
    if longer > inner:
        inner = longer
        graph = capture(call, inner)
    return _replay(graph, align, replays, inner)


def _replay(
    graph: torch.cuda.CUDAGraph, align: Callable[[], object], replays: int, inner: int
) -> Time:
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        dist.barrier()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        align()
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / inner * 1e3)
    deciles = statistics.quantiles(times, n=10)
    mine = Time(statistics.median(times), deciles[0], deciles[-1])
    every: list[Time | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return max((time for time in every if time is not None), key=lambda time: time.median)
