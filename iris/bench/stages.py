"""The fused stages beside their peers, over shapes of known models. Runs on every rank."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import iris
from iris.bench.peers import gather_peers, reduce_peers, symmetric
from iris.bench.timing import Time, time_graph
from iris.lower.kernels.all_gather_matmul import AllGatherMatmul
from iris.lower.kernels.config import GemmConfig
from iris.lower.kernels.matmul_reduce_scatter import MatmulReduceScatter
from iris.runtime.groups import Group

MODELS = {"8B": (4096, 14336), "70B": (8192, 28672), "Qwen3-32B": (5120, 25600)}
TOLERANCE = 1e-2  # relative, in the 2-norm: bf16 operands


@dataclass(frozen=True)
class Row:
    """One contestant at one point."""

    stage: str
    model: str
    M: int
    N: int
    K: int
    name: str
    time: Time


def random_tensor(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def check(name: str, result: Tensor, reference: Tensor) -> None:
    """Raise where a result is not what the unfused form gives."""
    error = ((result.float() - reference.float()).norm() / reference.float().norm()).item()
    if not error < TOLERANCE:
        raise AssertionError(f"{name}: relative error {error:.2e} on rank {dist.get_rank()}")


def candidates(M: int, N: int) -> dict[str, GemmConfig]:
    """Configurations to try at a point."""
    if M <= 64:
        shapes = [
            (64, 128, 128, 4, 4, 4, True),
            (64, 128, 128, 4, 4, 1, False),
            (64, 64, 128, 4, 5, 2, True),
        ]
    else:
        shapes = [
            (128, 256, 64, 8, 3, 2, True),
            (128, 256, 64, 8, 3, 2, False),
            (128, 256, 64, 8, 4, 4, True),
        ]
    found = {}
    for bm, bn, bk, warps, stages, pieces, cut in shapes:
        copy = 4096 if M <= 64 else 16384
        config = GemmConfig(bm, bn, bk, warps, stages, 8, pieces=pieces, copy=copy, cut=cut)
        found[f"iris {bm}x{bn}x{bk} w{warps} s{stages} p{pieces} {'cut' if cut else ''}"] = config
    return found


def gather_stage(
    ctx: Any, group: Group, x: Tensor, w: Tensor, out: Tensor, config: GemmConfig
) -> Callable[..., object]:
    M, K = out.shape[0], w.shape[0]
    stage = AllGatherMatmul.create(
        ctx, group, M=M, K=K, columns=[w.shape[1]], dtype=x.dtype, config=config
    )
    return lambda dry=0: stage(x, [w], out=[out], dry=dry)


def reduce_stage(
    ctx: Any, group: Group, x: Tensor, w: Tensor, out: Tensor, config: GemmConfig
) -> Callable[..., object]:
    (M, K), N = x.shape, w.shape[1]
    stage = MatmulReduceScatter.create(ctx, group, M=M, N=N, K=K, dtype=x.dtype, config=config)
    return lambda dry=0: stage(x, w, out=out, dry=dry)


def measure(stage: str, model: str, M: int, trials: bool) -> Iterator[Row]:
    """All contestants at one point, in random order (the same on all ranks)."""
    _, handle = symmetric(64)
    align = handle.barrier
    ctx = iris.current()
    group = ctx.world
    hidden, inner = MODELS[model]
    world, rank = group.size, group.index
    if stage == "all_gather_matmul":
        x, w = (
            random_tensor(M // world, hidden, seed=rank),
            random_tensor(inner // world, hidden, seed=99 + rank).T,
        )
        make, peers, rows = gather_stage, gather_peers, M
    else:
        x, w = (
            random_tensor(M, inner // world, seed=rank),
            random_tensor(hidden, inner // world, seed=99 + rank).T,
        )
        make, peers, rows = reduce_stage, reduce_peers, M // world
    reference = torch.empty(rows, w.shape[1], device="cuda", dtype=x.dtype)
    calls = peers(x, w, reference)
    calls["unfused"]()
    for name, config in candidates(M, w.shape[1]).items():
        out = torch.full_like(reference, float("nan"))
        call = make(ctx, group, x, w, out, config)
        call(1)
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        check(name, out, reference)
        calls[name] = call
    names = list(calls)
    random.Random(M).shuffle(names)
    for name in names:
        yield Row(stage, model, M, w.shape[1], w.shape[0], name, time_graph(calls[name], align))
