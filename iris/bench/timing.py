"""Times of work captured in CUDA graphs, the slowest rank counted."""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

SPAN = 5e3  # microseconds that the calls in one graph last, about
MOST_CALLS = 200
REPLAYS = 15

# A contestant: call i works on copy i, modulo their number, of its operands.
Call = Callable[[int], Any]


@dataclass(frozen=True)
class Time:
    """Microseconds a call on the slowest rank: median, 10th and 90th percentile over replays."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One contestant at one point of one table, in ``unit``; ``right`` says whether its result
    was, ``chosen`` whether the planner would take it.
    """

    table: str
    point: dict[str, Any]
    name: str
    time: Time
    right: bool = True
    unit: str = "µs"
    chosen: bool = False


def every(value: T) -> list[T]:
    """Every rank's value. Collective."""
    found = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def shuffled(contestants: Mapping[str, T], seed: int) -> dict[str, T]:
    """In an order that favours none, and that ranks agree on."""
    names = random.Random(seed).sample(list(contestants), len(contestants))
    return {name: contestants[name] for name in names}


def rotated(*operands: Tensor) -> list[Sequence[Tensor]]:
    """So many copies of the operands that in turns they do not stay in the L2 cache."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    nbytes = max(1, sum(x.nbytes for x in operands))
    copies = max(1, min(16, math.ceil(2 * cache / nbytes)))
    return [operands, *([x.clone() for x in operands] for _ in range(copies - 1))]


def capture(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """``calls`` calls in one graph, after two outside it. Collective."""
    for i in range(2):
        call(i)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        for i in range(calls):
            call(i)
    dist.barrier()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_graphs(contestants: Mapping[str, Call], align: Callable[[], object]) -> dict[str, Time]:
    """Time contestants in turns, so that all meet the same clocks and neighbours. Collective.

    ``align`` enqueues a barrier of the ranks on the device before each replay, so that it is not
    the skew of the hosts that is timed.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, call in contestants.items():
        graph = capture(call, 4)
        once = statistics.median(_timed(graph.replay, align) for _ in range(3)) / 4
        first = max(every(once))
        calls = max(4, min(MOST_CALLS, int(SPAN / first)))
        graphs[name] = (graph if calls == 4 else capture(call, calls), calls)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPLAYS):
        for name, (graph, calls) in graphs.items():
            times[name].append(_timed(graph.replay, align) / calls)
    return {name: agreed(values) for name, values in times.items()}


def _timed(launch: Callable[[], object], align: Callable[[], object]) -> float:
    """Microseconds of what ``launch`` puts on the stream, the ranks aligned before it."""
    dist.barrier()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    align()
    start.record()
    launch()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def paced(
    contestants: Mapping[str, Callable[[], Any]], align: Callable[[], object]
) -> dict[str, Time]:
    """Time contestants that launch themselves, such as programs, in turns. Collective."""
    counts = {}
    for name, call in contestants.items():
        once = max(every(statistics.median(_run(call, 2, align) for _ in range(3))))
        counts[name] = max(2, min(MOST_CALLS, int(2 * SPAN / once)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(REPLAYS):
        for name, call in contestants.items():
            times[name].append(_run(call, counts[name], align))
    return {name: agreed(values) for name, values in times.items()}


def _run(call: Callable[[], Any], calls: int, align: Callable[[], object]) -> float:
    """Microseconds of each of ``calls`` calls on this rank."""

    def launch() -> None:
        for _ in range(calls):
            call()

    return _timed(launch, align) / calls


def agreed(values: list[float]) -> Time:
    """The figures of the rank with the largest median. Collective."""
    deciles = statistics.quantiles(values, n=10)
    mine = Time(statistics.median(values), deciles[0], deciles[-1])
    return max(every(mine), key=lambda time: time.median)
