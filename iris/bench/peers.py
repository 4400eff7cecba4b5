"""What stages are measured against: cuBLAS alone, cuBLAS and copies, torch's fused operators."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm
from torch import Tensor

Call = Callable[[], Tensor]
OPS: Any = torch.ops.symm_mem


def group_name() -> str:
    """Name of the world's process group."""
    return dist.group.WORLD.group_name  # type: ignore[union-attr]


def symmetric(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Any]:
    """A tensor in torch's symmetric memory, and torch's handle for it."""
    tensor = symm.empty(shape, device=torch.device("cuda"), dtype=dtype)
    world = dist.group.WORLD
    assert world is not None
    return tensor, symm.rendezvous(tensor, world)


def all_gathered(x: Tensor) -> Tensor:
    """All ranks' tensors of one shape, stacked."""
    shared, handle = symmetric(*x.shape, dtype=x.dtype)
    shared.copy_(x)
    handle.barrier()
    parts = [handle.get_buffer(r, x.shape, x.dtype) for r in range(dist.get_world_size())]
    stacked = torch.stack(parts)
    handle.barrier(channel=1)
    torch.cuda.synchronize()
    return stacked


def gather_peers(x: Tensor, w: Tensor) -> dict[str, Call]:
    """Contestants for ``all_gather(x) @ w``."""
    world, rows = dist.get_world_size(), x.shape[0]
    shared, handle = symmetric(*x.shape, dtype=x.dtype)
    parts = [handle.get_buffer(r, x.shape, x.dtype) for r in range(world)]
    ready = all_gathered(x).flatten(0, 1)
    gathered = torch.empty_like(ready)
    out = torch.empty(world * rows, w.shape[1], device="cuda", dtype=x.dtype)

    def unfused() -> Tensor:
        shared.copy_(x)
        handle.barrier()
        for r, part in enumerate(parts):
            gathered[r * rows : (r + 1) * rows].copy_(part)
        handle.barrier(channel=1)
        return torch.matmul(gathered, w, out=out)

    def fused() -> Tensor:
        products: list[Tensor] = OPS.fused_all_gather_matmul(x, [w], 0, group_name())[1]
        return products[0]

    return {"gemm": lambda: torch.matmul(ready, w, out=out), "unfused": unfused, "torch": fused}


def scatter_peers(x: Tensor, w: Tensor) -> dict[str, Call]:
    """Contestants for ``reduce_scatter(x @ w)``."""
    world, rank = dist.get_world_size(), dist.get_rank()
    M, N = x.shape[0], w.shape[1]
    m = M // world
    shared, handle = symmetric(M, N, dtype=x.dtype)
    start = rank * m * N
    parts = [handle.get_buffer(r, (m, N), x.dtype, start) for r in range(world)]
    out = torch.empty(m, N, device="cuda", dtype=x.dtype)
    plain = torch.empty(M, N, device="cuda", dtype=x.dtype)

    def unfused() -> Tensor:
        torch.matmul(x, w, out=shared)
        handle.barrier()
        out.copy_(torch.stack(parts).sum(0, dtype=torch.float32))
        handle.barrier(channel=1)
        return out

    def fused() -> Tensor:
        result: Tensor = OPS.fused_matmul_reduce_scatter(x, w, "sum", 0, group_name())
        return result

    return {"gemm": lambda: torch.matmul(x, w, out=plain), "unfused": unfused, "torch": fused}


def reduce_peers(x: Tensor, w: Tensor) -> dict[str, Call]:
    """Contestants for ``all_reduce(x @ w)``."""
    M, N = x.shape[0], w.shape[1]
    shared, _ = symmetric(M, N, dtype=x.dtype)
    plain = torch.empty(M, N, device="cuda", dtype=x.dtype)

    def one_shot() -> Tensor:
        torch.matmul(x, w, out=shared)
        total: Tensor = OPS.one_shot_all_reduce(shared.view(-1), "sum", group_name())
        return total.view(M, N)

    def two_shot() -> Tensor:
        torch.matmul(x, w, out=shared)
        total: Tensor = OPS.two_shot_all_reduce_(shared.view(-1), "sum", group_name())
        return total.view(M, N)

    return {
        "gemm": lambda: torch.matmul(x, w, out=plain),
        "one-shot": one_shot,
        "two-shot": two_shot,
    }
