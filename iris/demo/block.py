"""The program of the demo, and what each rank does with it."""

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console

import iris
from iris import P
from iris.demo.progress import step
from iris.graph.types import chunk_sizes
from iris.lower.memory import Memory
from iris.spmd.explain import Explanation


@iris.spmd(
    in_specs=(P("tp", None), P(None, "tp"), P(None, "tp"), P("tp", None)), out_specs=P("tp", None)
)
def ffn(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor
) -> torch.Tensor:
    """SwiGLU over ranks. x: [M/tp, K]   w_gate, w_up: [K, F/tp]   w_down: [F/tp, K]."""
    g = iris.all_gather(x, "tp", dim=0)
    h = F.silu(g @ w_gate) * (g @ w_up)
    return iris.reduce_scatter(h @ w_down, "tp", dim=0)


SPLIT_DIMS = {"x": 0, "w_gate": 1, "w_up": 1, "w_down": 0}


@dataclass(frozen=True)
class RankReport:
    """What one rank did: ``graph`` and ``stages`` are the same on all, ``seconds`` is per call."""

    device: str
    shards: dict[str, tuple[int, ...]]
    memory: Memory
    graph: str
    stages: Explanation
    seconds: list[float]
    output: torch.Tensor


def shard(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    """Return the part of ``tensor`` that ``rank`` holds, split as ``torch.chunk`` does.

    Shards have the rounded-up size; the last ones are smaller, or empty.
    """
    sizes = list(chunk_sizes(tensor.shape[dim], ranks))
    return torch.split(tensor, sizes, dim)[rank].contiguous()


def one_rank(
    x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor
) -> torch.Tensor:
    """The same block in plain torch, without ranks: what the result is compared with."""
    return (F.silu(x @ w_gate) * (x @ w_up)) @ w_down


def run(arguments: dict[str, torch.Tensor], heap_size: int, calls: int) -> RankReport:
    """Run ``ffn`` on this rank's shards of the global ``arguments``; every rank calls this."""
    with iris.iris(heap_size=heap_size) as ctx:
        rank, ranks, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
        shards = {
            name: shard(tensor, SPLIT_DIMS[name], rank, ranks).to(device)
            for name, tensor in arguments.items()
        }
        values = tuple(shards.values())
        console = Console(highlight=False, quiet=rank > 0)
        with step(console, "  trace"):
            traced = ffn.trace(*values)
        with step(console, "  compile"):
            compiled = traced.lower().compile()
        seconds = []
        for call in range(calls):
            with step(console, f"  call {call + 1} of {calls}"):
                output, elapsed = _timed(ctx, values)
                seconds.append(elapsed)
        return RankReport(
            device=str(device),
            shards={name: tuple(value.shape) for name, value in shards.items()},
            memory=compiled.memory(),
            graph=traced.as_text(),
            stages=compiled.explain(),
            seconds=seconds,
            output=output.cpu(),
        )


def _timed(ctx: iris.Iris, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, float]:
    """Call ``ffn`` once; time it from a barrier to the end of its work on the device."""
    ctx.barrier()
    start = time.perf_counter()
    output = ffn(*values)
    ctx.synchronize()
    return output, time.perf_counter() - start
