"""What the stages are measured against: cuBLAS alone, cuBLAS and copies, torch's fused operators."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm
from torch import Tensor

Call = Callable[[], object]


def group_name() -> str:
    return dist.group.WORLD.group_name  # type: ignore[union-attr]


def symmetric(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Any]:
    """A tensor in symmetric memory and torch's handle for it."""
    tensor = symm.empty(*shape, device="cuda", dtype=dtype)
    return tensor, symm.rendezvous(tensor, group_name())


def gather_peers(x: Tensor, w: Tensor, out: Tensor) -> dict[str, Call]:
    """Contestants for ``all_gather(x) @ w``; ``unfused`` leaves its result in ``out``."""
    world, rows = dist.get_world_size(), x.shape[0]
    shared, handle = symmetric(*x.shape, dtype=x.dtype)
    parts = [handle.get_buffer(r, x.shape, x.dtype) for r in range(world)]
    gathered = torch.empty(world * rows, x.shape[1], device="cuda", dtype=x.dtype)
    ready = torch.randn_like(gathered)

    def unfused() -> None:
        shared.copy_(x)
        handle.barrier()
        for r, part in enumerate(parts):
            gathered[r * rows : (r + 1) * rows].copy_(part)
        handle.barrier(channel=1)
        torch.matmul(gathered, w, out=out)

    return {
        "gemm": lambda: torch.matmul(ready, w, out=out),
        "unfused": unfused,
        "torch fused": lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group_name()),
    }


def reduce_peers(x: Tensor, w: Tensor, out: Tensor) -> dict[str, Call]:
    """Contestants for ``reduce_scatter(x @ w)``; ``unfused`` leaves its result in ``out``."""
    world, rank = dist.get_world_size(), dist.get_rank()
    M, N = x.shape[0], w.shape[1]
    m = M // world
    shared, handle = symmetric(M, N, dtype=x.dtype)
    parts = [
        handle.get_buffer(r, (m, N), x.dtype, storage_offset=rank * m * N) for r in range(world)
    ]
    plain = torch.empty(M, N, device="cuda", dtype=x.dtype)

    def unfused() -> None:
        torch.matmul(x, w, out=shared)
        handle.barrier()
        out.copy_(torch.stack(parts).sum(0, dtype=torch.float32))
        handle.barrier(channel=1)

    return {
        "gemm": lambda: torch.matmul(x, w, out=plain),
        "unfused": unfused,
        "torch fused": lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x, w, "sum", 0, group_name()
        ),
    }
