"""The fused stages beside their peers, over shapes of known models. Runs on every rank."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import iris
from iris.bench.peers import (
    Call,
    all_gathered,
    gather_peers,
    reduce_peers,
    scatter_peers,
    symmetric,
)
from iris.bench.timing import Time, time_graphs
from iris.lower.kernels.all_gather_matmul import AllGatherMatmul
from iris.lower.kernels.matmul_all_reduce import MatmulAllReduce
from iris.lower.kernels.matmul_reduce_scatter import MatmulReduceScatter

MODELS = {"8B": (4096, 14336), "70B": (8192, 28672), "Qwen3-32B": (5120, 25600)}
STAGES = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
TOLERANCE = 1e-2  # relative, in the 2-norm: bf16 operands
HEAP = 3 << 30


@dataclass(frozen=True)
class Row:
    """One contestant at one point; ``right`` says whether its result was."""

    stage: str
    model: str
    M: int
    N: int
    K: int
    name: str
    time: Time
    right: bool


@dataclass(frozen=True)
class Problem:
    """A weight, the right result, this rank's part of it (fp32), and all who compute it."""

    w: Tensor
    part: Tensor
    want: Tensor
    calls: dict[str, Call]


def random_tensor(*shape: int, seed: int) -> Tensor:
    """Normal values that differ by seed."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def _is_right(result: Tensor, want: Tensor) -> bool:
    error = (result.float() - want).norm() / want.norm()
    return bool(error < TOLERANCE)


def _launched(stage: Any, *operands: Any, out: Tensor, outs: Any) -> Call:
    """``stage`` as a contestant; its kernel is loaded on all ranks when this returns."""
    stage.warm(*operands, out=outs)
    torch.cuda.synchronize()
    dist.barrier()

    def call() -> Tensor:
        stage(*operands, out=outs)
        return out

    return call


def _gather(M: int, hidden: int, inner: int) -> Problem:
    ctx, rank, world = iris.current(), dist.get_rank(), dist.get_world_size()
    x = random_tensor(M // world, hidden, seed=rank)
    w = random_tensor(inner // world, hidden, seed=99 + rank).T
    want = all_gathered(x).flatten(0, 1).float() @ w.float()
    columns = [w.shape[1]]
    stage = AllGatherMatmul.create(ctx, ctx.world, M=M, K=hidden, columns=columns, dtype=x.dtype)
    out = torch.empty(M, w.shape[1], device="cuda", dtype=x.dtype)
    ours = _launched(stage, x, [w], out=out, outs=[out])
    return Problem(w, want, want, gather_peers(x, w) | {"iris": ours})


def _partial(M: int, hidden: int, inner: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operands of a row-parallel product, the product, and its sum over ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = random_tensor(M, inner // world, seed=rank)
    w = random_tensor(hidden, inner // world, seed=99 + rank).T
    part = x.float() @ w.float()
    return x, w, part, all_gathered(part.to(x.dtype)).sum(0, dtype=torch.float32)


def _scatter(M: int, hidden: int, inner: int) -> Problem:
    ctx, rank, world = iris.current(), dist.get_rank(), dist.get_world_size()
    x, w, part, total = _partial(M, hidden, inner)
    m, K = M // world, x.shape[1]
    stage = MatmulReduceScatter.create(ctx, ctx.world, M=M, N=hidden, K=K, dtype=x.dtype)
    out = torch.empty(m, hidden, device="cuda", dtype=x.dtype)
    ours = _launched(stage, x, w, out=out, outs=out)
    mine = total[rank * m : (rank + 1) * m]
    return Problem(w, part, mine, scatter_peers(x, w) | {"iris": ours})


def _reduce(M: int, hidden: int, inner: int) -> Problem:
    ctx = iris.current()
    x, w, part, total = _partial(M, hidden, inner)
    calls = reduce_peers(x, w)
    for one_shot in (True, False):
        if one_shot and M > 512:  # W times the traffic: not for many rows
            continue
        stage = MatmulAllReduce.create(
            ctx, ctx.world, M=M, N=hidden, K=x.shape[1], dtype=x.dtype, one_shot=one_shot
        )
        out = torch.empty(M, hidden, device="cuda", dtype=x.dtype)
        name = "iris one-shot" if one_shot else "iris two-shot"
        calls[name] = _launched(stage, x, w, out=out, outs=out)
    return Problem(w, part, total, calls)


PROBLEMS: dict[str, Callable[[int, int, int], Problem]] = {
    "all_gather_matmul": _gather,
    "matmul_reduce_scatter": _scatter,
    "matmul_all_reduce": _reduce,
}


def _right(name: str, problem: Problem) -> bool:
    """Run a contestant three times and compare its result, on all ranks."""
    want = problem.part if name == "gemm" else problem.want
    for _ in range(2):
        problem.calls[name]()
    result = problem.calls[name]()
    torch.cuda.synchronize()
    answers: list[bool] = [True] * dist.get_world_size()
    dist.all_gather_object(answers, _is_right(result, want))
    return all(answers)


def measure(stages: Sequence[str], models: Sequence[str], rows: Sequence[int]) -> Iterator[Row]:
    """All contestants at every point."""
    _, handle = symmetric(64)
    for stage in stages:
        for model in models:
            for M in rows:
                problem = PROBLEMS[stage](M, *MODELS[model])
                names = list(problem.calls)
                random.Random(M).shuffle(names)
                right = {name: _right(name, problem) for name in names}
                times = time_graphs({n: problem.calls[n] for n in names}, handle.barrier)
                K, N = problem.w.shape
                for name, time in times.items():
                    yield Row(stage, model, M, N, K, name, time, right[name])
