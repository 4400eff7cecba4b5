"""What stages are measured against: cuBLAS alone, cuBLAS and copies, torch's own operators."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm
from torch import Tensor

from iris.bench.timing import Call
from iris.graph.types import chunk_sizes
from iris.lower.kernels.host import rows_of, shard_rows

OPS: Any = torch.ops.symm_mem
WAIT: Any = torch.ops._c10d_functional.wait_tensor
BYTES = 512 << 20  # of a result, at most
Copies = Sequence[Sequence[Tensor]]


def group_name() -> Any:
    """Name of the world's process group."""
    return dist.group.WORLD.group_name  # type: ignore[union-attr]


@functools.cache
def _memory() -> tuple[Tensor, Any]:
    """Torch's symmetric memory, once for all: allocating it again and again hung its barrier."""
    tensor = symm.empty(BYTES, device=torch.device("cuda"), dtype=torch.uint8)
    world = dist.group.WORLD
    assert world is not None
    symm.get_symm_mem_workspace(group_name(), min_size=BYTES)
    return tensor, symm.rendezvous(tensor, world)


def symmetric(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Any]:
    """A tensor in torch's symmetric memory, always at the same place, and torch's handle for it."""
    memory, handle = _memory()
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[:nbytes].view(dtype).view(shape), handle


def library(copies: Copies, out: Tensor) -> Call:
    """Products of data already there, by the vendor's library; those of fp8 go to a new tensor."""
    if copies[0][0].dtype.itemsize > 1:
        return lambda i: torch.matmul(*copies[i % len(copies)], out=out)
    one = torch.ones((), device="cuda")

    def scaled(i: int) -> Tensor:
        x, w = copies[i % len(copies)]
        return torch._scaled_mm(x, w, one, one, out_dtype=torch.bfloat16)

    return scaled


def gather_peers(copies: Copies, ready: Copies) -> dict[str, Call]:
    """Contestants for ``all_gather(x) @ w``; ``copies`` are (x, w), ``ready`` (gathered x, w)."""
    (full, w), sizes = ready[0], chunk_sizes(ready[0][0].shape[0], dist.get_world_size())
    shared, handle = symmetric(sizes[0], full.shape[1], dtype=full.dtype)
    parts = [
        handle.get_buffer(r, (size, full.shape[1]), full.dtype) for r, size in enumerate(sizes)
    ]
    gathered = torch.empty_like(full)
    slices = gathered.split(sizes)
    out = torch.empty(full.shape[0], w.shape[1], device="cuda", dtype=full.dtype)

    def unfused(i: int) -> Tensor:
        x, w = copies[i % len(copies)]
        shared[: x.shape[0]].copy_(x)
        handle.barrier()
        for part, there in zip(slices, parts, strict=True):
            part.copy_(there)
        handle.barrier(channel=1)
        return torch.matmul(gathered, w, out=out)

    def fused(i: int) -> Tensor:
        x, w = copies[i % len(copies)]
        products: list[Tensor] = OPS.fused_all_gather_matmul(x, [w], 0, group_name())[1]
        return products[0]

    def low_contention(i: int) -> Tensor:
        x, w = copies[i % len(copies)]
        gathered = OPS._low_contention_all_gather(x, group_name())
        return torch.matmul(WAIT(gathered), w, out=out)

    even: dict[str, Call] = {"torch fused": fused, "low contention": low_contention}
    calls: dict[str, Call] = {"gemm": library(ready, out), "unfused": unfused}
    return calls | (even if len(set(sizes)) == 1 else {})


def scatter_peers(copies: Copies) -> dict[str, Call]:
    """Contestants for ``reduce_scatter(x @ w)``; ``copies`` are (x, w)."""
    world, rank, (x, w) = dist.get_world_size(), dist.get_rank(), copies[0]
    M, N = x.shape[0], w.shape[1]
    m = rows_of(M, world, rank)
    shared, handle = symmetric(M, N, dtype=x.dtype)
    first = rank * shard_rows(M, world) * N if m else 0
    parts = [handle.get_buffer(r, (m, N), x.dtype, first) for r in range(world)]
    out = torch.empty(m, N, device="cuda", dtype=x.dtype)
    plain = torch.empty(M, N, device="cuda", dtype=x.dtype)

    def unfused(i: int) -> Tensor:
        torch.matmul(*copies[i % len(copies)], out=shared)
        handle.barrier()
        out.copy_(torch.stack(parts).sum(0, dtype=torch.float32))
        handle.barrier(channel=1)
        return out

    def fused(i: int) -> Tensor:
        x, w = copies[i % len(copies)]
        result: Tensor = OPS.fused_matmul_reduce_scatter(x, w, "sum", 0, group_name())
        return result

    def low_contention(i: int) -> Tensor:
        torch.matmul(*copies[i % len(copies)], out=shared)
        result: Tensor = WAIT(OPS._low_contention_reduce_scatter(shared, "sum", group_name()))
        return result

    even: dict[str, Call] = {"torch fused": fused, "low contention": low_contention}
    calls: dict[str, Call] = {"gemm": library(copies, plain), "unfused": unfused}
    return calls | (even if M % world == 0 else {})


def reduce_peers(copies: Copies) -> dict[str, Call]:
    """Contestants for ``all_reduce(x @ w)``; ``copies`` are (x, w)."""
    x, w = copies[0]
    M, N = x.shape[0], w.shape[1]
    shared, _ = symmetric(M, N, dtype=x.dtype)
    plain = torch.empty(M, N, device="cuda", dtype=x.dtype)

    def one_shot(i: int) -> Tensor:
        torch.matmul(*copies[i % len(copies)], out=shared)
        total: Tensor = OPS.one_shot_all_reduce(shared.view(-1), "sum", group_name())
        return total.view(M, N)

    def two_shot(i: int) -> Tensor:
        torch.matmul(*copies[i % len(copies)], out=shared)
        total: Tensor = OPS.two_shot_all_reduce_(shared.view(-1), "sum", group_name())
        return total.view(M, N)

    gemm = library(copies, plain)
    return {"gemm": gemm, "torch one-shot": one_shot, "torch two-shot": two_shot}
