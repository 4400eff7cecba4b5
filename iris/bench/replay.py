"""Host time of a replayed call beside a bare graph launch, a hand-written replay, eager torch and
``torch.compile``. Runs on every rank; the work is tiny, so the host is what takes the time.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import iris
from iris.bench.timing import Row, Time, agreed
from iris.spmd.specs import P

SAMPLES = 200
CALLS = 20  # between two synchronisations: the launch queue never fills
SIZE = 64

Contestant = Callable[[Tensor], Any]


def measure(args: Namespace) -> Iterator[Row]:
    """Microseconds of host time a call: inputs where the graph reads them, and from elsewhere."""
    ctx = iris.current()
    xs = [torch.rand(SIZE, SIZE, device=ctx.device) for _ in range(8)]
    up, down = (torch.rand(SIZE, SIZE, device=ctx.device) for _ in range(2))

    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.silu(x @ up) @ down

    def gathered(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return iris.reduce_scatter(F.silu(iris.all_gather(x, "tp") @ up) @ down, "tp")

    specs = {gathered: (P("tp"), P(None, "tp"), P("tp"))}

    def program(fn: Any, outputs: str) -> Contestant:
        decorated = iris.spmd(in_specs=specs.get(fn), outputs=outputs)(fn)
        return lambda x: decorated(x, up, down)

    graph, buffer, out = _captured(mlp, xs[0], up, down)

    def by_hand(x: Tensor) -> Tensor:
        buffer.copy_(x)
        graph.replay()
        return out.clone()

    def bare(x: Tensor) -> Tensor:
        graph.replay()
        return out

    compiled = torch.compile(mlp, mode="reduce-overhead")
    same: dict[str, Contestant] = {"bare replay": bare, "iris, reuse": program(mlp, "reuse")}
    new: dict[str, Contestant] = {
        "hand-written": by_hand,
        "iris": program(mlp, "fresh"),
        "iris, reuse": program(mlp, "reuse"),
        "eager": lambda x: mlp(x, up, down),
        "torch.compile": lambda x: compiled(x, up, down),
    }
    if ctx.num_ranks > 1:
        same["iris, reuse, collectives"] = program(gathered, "reuse")
        new["iris, collectives"] = program(gathered, "fresh")
    with torch.no_grad():
        for inputs, contestants, given in (("same", same, xs[:1]), ("new", new, xs)):
            right = {
                name: _right(name, call, given, up, down) for name, call in contestants.items()
            }
            for name, taken in _times(contestants, given).items():
                point = {"ranks": ctx.num_ranks, "inputs": inputs}
                yield Row("host time of a replay", point, name, taken, right[name])


def _captured(fn: Any, x: Tensor, *rest: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """A graph of ``fn``, the buffer it reads and the one it writes."""
    buffer = x.clone()
    fn(buffer, *rest)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        out = fn(buffer, *rest)
    return graph, buffer, out


def _right(name: str, call: Contestant, xs: Sequence[Tensor], up: Tensor, down: Tensor) -> bool:
    """Whether three rounds of calls give what eager torch does (without collectives)."""
    given = [*xs, *xs, *xs] if len(xs) > 1 else [*xs] * 4
    results = [call(x).clone() for x in given]
    if "collectives" in name:
        return all(bool(result.isfinite().all()) for result in results)
    expected = [F.silu(x @ up) @ down for x in given]
    return all(torch.allclose(*pair, rtol=1e-3) for pair in zip(results, expected, strict=True))


def _times(contestants: dict[str, Contestant], xs: Sequence[Tensor]) -> dict[str, Time]:
    """Host microseconds a call, contestants in turns."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(SAMPLES):
        for name, call in contestants.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(CALLS):
                call(xs[i % len(xs)])
            taken[name].append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return {name: agreed(samples) for name, samples in taken.items()}
