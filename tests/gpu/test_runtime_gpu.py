"""The runtime where ranks are on GPUs, sharing one or with one each."""

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from iris.device.ops import load
from iris.errors import IrisError, LaunchError, PeerError
from iris.runtime.context import iris
from iris.runtime.launch import launch
from iris.runtime.providers import Provider, TorchSymmetricMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LIMIT = 90


def _load(name):
    path = Path(__file__).parents[1] / "ranks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"on_gpu.{name}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ON_CPU = ("guard_words", "a_closed_context")  # they look at host memory
heap = _load("test_runtime_heap")
creation = _load("test_runtime_creation")
for module in (heap, creation, _load("test_class_page")):
    for name, value in vars(module).items():
        if name.startswith("test_") and not any(word in name for word in ON_CPU):
            globals()[name] = value
ctx = creation.ctx


def _ring():
    ctx = iris(64 << 20)
    size, rank = ctx.num_ranks, ctx.cur_rank
    x = ctx.full((1 << 20,), rank, dtype=torch.int32)
    group = ctx.group([size - 1, 0]) if rank in (0, size - 1) and size > 1 else None
    block = ctx.heap.allocate(3 << 20, group) if group else None
    if block:
        block.tensor.fill_(rank + 1)
    ctx.barrier()
    seen = [int(ctx.heap.peer_tensor(x, peer).max()) for peer in range(size)]
    if group:
        assert [int(block.peer(i)[-1]) for i in (0, 1)] == [size, 1]
    ctx.barrier()
    ctx.heap.peer_tensor(x, (rank + 1) % size).fill_(100 + rank)
    ctx.barrier()
    assert x.eq(100 + (rank - 1) % size).all()
    return ctx.device.type, seen, ctx.get_device_id(), ctx.ranks_on_device


@pytest.mark.parametrize("allocator", ["torch", "vmem", "symm_mem"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_allocator_maps_peers(world, allocator):
    # yifuwang/symm-mem-recipes#5
    if allocator == "vmem":
        pytest.importorskip("cuda.bindings")
    env = {"IRIS_ALLOCATOR": allocator, "IRIS_DEVICE": "cuda"}
    results = launch(_ring, world, timeout=LIMIT, env=env)
    gpus = torch.cuda.device_count()
    for rank, (kind, seen, index, sharing) in enumerate(results):
        assert (kind, seen, index) == ("cuda", list(range(world)), rank % gpus)
        assert sharing == len([r for r in range(world) if r % gpus == rank % gpus])


def _grow():
    ctx = iris(8 << 30, allocator_type="vmem")
    free = torch.cuda.mem_get_info()[0]
    x = ctx.ones(64 << 20)
    used = free - torch.cuda.mem_get_info()[0]
    ctx.barrier()
    assert ctx.heap.peer_tensor(x, 1 - ctx.cur_rank).sum() == 64 << 20
    ctx.barrier()
    return used


def test_vmem_commits_memory_as_it_is_used():
    pytest.importorskip("cuda.bindings")
    for used in launch(_grow, 2, timeout=LIMIT, env={"IRIS_DEVICE": "cuda"}):
        assert 0 < used < 2 << 30


def _no_allocation_in_a_capture():
    ctx = iris(1 << 20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(IrisError, match="while a CUDA graph is captured"):
        ctx.zeros(3)
    return ctx.zeros(3).tolist()


def test_no_allocation_in_a_capture(ranks):
    assert ranks(2).run(_no_allocation_in_a_capture) == [[0, 0, 0]] * 2


def _free_memory_after_close():
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        ctx = iris(1 << 30)
        x = ctx.ones(1 << 20)
        ctx.barrier()
        ctx.close()
        del x
    limit = time.monotonic() + 10  # the other rank frees its slab at its own time
    while before - torch.cuda.mem_get_info()[0] >= 1 << 30 and time.monotonic() < limit:
        time.sleep(0.05)
    return before - torch.cuda.mem_get_info()[0]


def test_closing_gives_the_memory_back(ranks):
    for leaked in ranks(2).run(_free_memory_after_close):
        assert leaked < 1 << 30


def _drop_while_a_kernel_reads():
    """A block that is dropped while a slow kernel still reads it is not reused before its end."""
    ctx = iris(8 << 20)
    total = torch.zeros((), device=ctx.device)
    for _ in range(20):
        x = ctx.ones(1 << 20)
        if ctx.cur_rank == 1:
            torch.cuda._sleep(5_000_000)
        total += ctx.heap.peer_tensor(x, 1 - ctx.cur_rank).sum()
        del x
        ctx.zeros(1 << 20).fill_(7)
        ctx.barrier()
    return float(total)


def test_memory_in_use_by_kernels_is_not_reused(ranks):
    # tenstorrent/tt-metal#57458
    assert ranks(2).run(_drop_while_a_kernel_reads) == [20.0 * (1 << 20)] * 2


def _die_in_a_device_barrier():
    ctx = iris(1 << 20)
    for _ in range(3):
        ctx.device_barrier()
    torch.cuda.synchronize()
    if ctx.cur_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.device_barrier()
    torch.cuda.synchronize()
    with pytest.raises(PeerError, match=r"rank 1 \(pid \d+\) died"):
        ctx.device_barrier()
    raise AssertionError("the wait ended in time")


def test_a_rank_killed_in_a_device_barrier_ends_the_job():
    started = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(_die_in_a_device_barrier, 2, timeout=LIMIT, env={"IRIS_DEVICE": "cuda"})
    assert time.monotonic() - started < 30
    assert "rank 1: was killed by SIGKILL" in str(caught.value)
    if "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:  # there a killed client can stop its server
        assert "the wait ended in time" in str(caught.value)


def test_visible_devices_may_differ_between_ranks():
    # ROCm/rocm-systems#8136, pytorch/pytorch#15051
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    orders = ["0,1", "1,0"]
    for lists in (orders, ["0", "1"]):
        results = launch(
            _ring,
            2,
            timeout=LIMIT,
            env=lambda r, lists=lists: {"CUDA_VISIBLE_DEVICES": lists[r], "LOCAL_RANK": "0"},
        )
        assert [sharing for *_, sharing in results] == [1, 1]


@triton.jit
def _pull(x, y, peer_bases, rank, peer, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, load(x + i, rank, peer, peer_bases))


def _pulled_from_any_provider():
    ctx = iris(1 << 20)
    for step, provider in enumerate((ctx, TorchSymmetricMemory(), ctx)):
        assert isinstance(provider, Provider)
        rank, world = provider.get_rank(), provider.get_num_ranks()
        x, peers = provider.allocate_symmetric(256, dtype=torch.int32)
        x.copy_(torch.arange(256) + 1000 * rank + step)
        y = torch.empty_like(x)
        _pull[(1,)](x, y, peers, rank, rank, N=256)  # loaded before any rank waits
        provider.barrier()
        peer = (rank + 1) % world
        _pull[(1,)](x, y, peers, rank, peer, N=256)
        assert y.tolist() == [i + 1000 * peer + step for i in range(256)]
        provider.barrier()


def test_kernels_take_tensors_of_any_provider(ranks):
    ranks(2).run(_pulled_from_any_provider)
