"""The public description of the class: every name and default of it, and its examples.

They stand as written, with the gaps of the kernel filled in, and asserts in place of prints.
"""

import inspect
import logging

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import iris
import iris.device.pickling  # the kernel of this file travels to the ranks
from iris import DeviceContext

pytestmark = pytest.mark.ranks

NOTHING = inspect.Parameter.empty
NAMES = {
    "iris": {"heap_size": 1073741824, "allocator_type": "torch", "engines": ()},
    "set_logger_level": {"level": NOTHING},
    "do_bench": {
        "fn": NOTHING,
        "barrier_fn": ...,
        "preamble_fn": ...,
        "n_warmup": 25,
        "n_repeat": 100,
        "quantiles": None,
        "return_mode": "mean",
    },
    "Iris.get_copy_engine_ctx": {},
    "Iris.get_heap_bases": {},
    "Iris.get_device_context": {},
    "Iris.barrier": {"stream": None, "group": None},
    "Iris.get_device": {},
    "Iris.get_cu_count": {},
    "Iris.get_rank": {},
    "Iris.get_num_ranks": {},
    "Iris.debug": {"message": NOTHING},
    "Iris.info": {"message": NOTHING},
    "Iris.warning": {"message": NOTHING},
    "Iris.error": {"message": NOTHING},
    "Iris.broadcast": {"value": NOTHING, "src": 0},
    "Iris.allocate_symmetric": {"size": NOTHING, "dtype": None},
    "Iris.device_barrier": {"group": None},
    "Iris.get_device_id": {},
}


@pytest.mark.parametrize("name", NAMES)
def test_names_and_defaults(name):
    place = iris
    for part in name.split("."):
        place = getattr(place, part)
    found = list(inspect.signature(place).parameters.values())
    found = found[1:] if name.startswith("Iris.") else found
    ours, page = found[: len(NAMES[name])], NAMES[name]
    assert [p.name for p in ours] == list(page)
    for parameter, default in zip(ours, page.values(), strict=True):
        assert parameter.default == default or (default is ... and parameter.default() is None)
    rest = found[len(page) :]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not NOTHING for p in rest)


def test_the_factory():
    iris_ctx = iris.iris(2**30)  # 1GB heap with default (torch) allocator
    tensor = iris_ctx.zeros(1024, 1024)
    assert isinstance(iris_ctx, iris.Iris)
    assert tensor.shape == (1024, 1024)
    iris_ctx.close()
    direct = iris.Iris(heap_size=1 << 20, allocator_type="torch", engines=())
    assert direct.ones(3).tolist() == [1, 1, 1]


def test_the_vmem_allocator():
    if torch.cuda.is_available():
        pytest.importorskip("cuda.bindings")
    iris_ctx = iris.iris(2**30, allocator_type="vmem")
    tensor = iris_ctx.zeros(1024, 1024)
    assert tensor.eq(0).all()


def test_the_copy_engine():
    with iris.iris(1 << 20) as ctx:
        assert ctx.get_copy_engine_ctx() is None
        with pytest.raises(RuntimeError):
            ctx.quiet()
    ctx = iris.iris(heap_size=1 << 30, engines=("sdma",))
    copy_engine_ctx = ctx.get_copy_engine_ctx()
    assert isinstance(copy_engine_ctx, torch.Tensor)
    ctx.quiet()


@triton.jit
def my_kernel(context_tensor, buffer, out, rank: tl.constexpr, world_size: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor, rank, world_size)
    data = ctx.load(buffer, from_rank=1)
    tl.store(out, data)


def _device_context():
    ctx = iris.iris()
    context_tensor = ctx.get_device_context()
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    heap_bases = ctx.get_heap_bases()
    assert heap_bases.shape == torch.Size([world])
    assert heap_bases.dtype == torch.uint64
    assert context_tensor.dtype == torch.int64
    assert context_tensor[: 2 + world].tolist() == [rank, world, *heap_bases.tolist()]
    buffer, out = ctx.full((1,), 40 + rank), ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    my_kernel[(1,)](context_tensor, buffer, out, rank, world)
    my_group = torch.distributed.new_group([0, 1])
    ctx.barrier()  # Synchronize all ranks
    ctx.barrier(group=my_group)  # Synchronize only ranks in my_group
    ctx.device_barrier()  # Synchronize all ranks on device
    return out.item()


def test_a_kernel_with_the_device_context(ranks):
    assert ranks(2).run(_device_context) == [41, 41]


def test_getters():
    ctx = iris.iris(1 << 20)
    device = ctx.get_device()
    assert str(device) in ("cuda:0", "cpu")
    cu_count = ctx.get_cu_count()
    assert isinstance(cu_count, int)
    assert cu_count > 0
    rank = ctx.get_rank()
    assert f"This is rank {rank}" == "This is rank 0"
    num_ranks = ctx.get_num_ranks()
    assert f"Total ranks: {num_ranks}" == "Total ranks: 1"
    device_id = ctx.get_device_id()
    assert f"Using GPU {device_id}" == "Using GPU 0"


def test_logging(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    ctx = iris.iris()
    iris.set_logger_level(iris.DEBUG)
    ctx.debug("This will now be visible")  # [Iris] [0/1] This will now be visible
    ctx.debug("Allocating buffers")  # [Iris] [0/1] Allocating buffers
    iris.set_logger_level(iris.INFO)
    ctx.debug("hidden")
    ctx.info("Starting iteration 0")  # [Iris] [0/1] Starting iteration 0
    ctx.warning("Memory usage is high")  # [Iris] [0/1] Memory usage is high
    ctx.error("Failed to allocate memory")  # [Iris] [0/1] Failed to allocate memory
    assert capsys.readouterr().err.splitlines() == [
        "[Iris] [0/1] This will now be visible",
        "[Iris] [0/1] Allocating buffers",
        "[Iris] [0/1] Starting iteration 0",
        "[Iris] [0/1] Memory usage is high",
        "[Iris] [0/1] Failed to allocate memory",
    ]


def test_do_bench():
    iris_ctx = iris.iris(1 << 20)

    def test_fn():
        tensor = iris_ctx.zeros(500, 500)
        assert tensor.numel() == 250_000

    time_ms = iris.do_bench(test_fn, barrier_fn=iris_ctx.barrier)
    assert isinstance(time_ms, float)
    assert time_ms > 0


def _broadcast():
    ctx = iris.iris()
    # Broadcasting a scalar
    value = 42 if ctx.cur_rank == 0 else None
    value = ctx.broadcast(value, src=0)  # All ranks get 42
    # Broadcasting a tensor
    data = torch.randn(10, 10) if ctx.cur_rank == 0 else None
    sent = data
    data = ctx.broadcast(data, src=0)  # All ranks get the same array
    assert isinstance(data, np.ndarray)
    assert sent is None or np.array_equal(data, sent.numpy())
    return value, data.tolist()


def test_broadcast(ranks):
    first, second = ranks(2).run(_broadcast)
    assert first == second
    assert first[0] == 42


def test_allocate_symmetric():
    ctx = iris.iris(1 << 20)
    tensor, peer_bases = ctx.allocate_symmetric(1024, dtype=torch.float32)
    assert (tensor.shape, tensor.dtype) == ((1024,), torch.float32)
    assert (peer_bases.shape, peer_bases.dtype) == ((1,), torch.int64)
    assert peer_bases.device == tensor.device
    assert peer_bases[ctx.cur_rank] == tensor.data_ptr()


def _ops():
    ctx = iris.iris()
    A = ctx.randn((1024, 512), dtype=torch.float16)
    B = ctx.randn((512, 2048), dtype=torch.float16)
    output = ctx.zeros((1024, 2048), dtype=torch.float16)
    ctx.ops.matmul_all_reduce(output, A, B, ctx)
    ctx.barrier()
    products = [
        ctx.heap.peer_tensor(A, r).float() @ ctx.heap.peer_tensor(B, r).float()
        for r in range(ctx.num_ranks)
    ]
    error = (output.float() - sum(products)).abs().max()
    ctx.barrier()
    others = ("all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter")
    return float(error), all(callable(getattr(ctx.ops, name)) for name in others)


@pytest.mark.parametrize("world", [1, 2])
def test_ops(ranks, world):
    for error, whole in ranks(world).run(_ops):
        assert error < 0.2  # values of up to 150, of which float16 has every eighth
        assert whole
