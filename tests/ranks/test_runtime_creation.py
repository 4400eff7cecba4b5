"""Creation functions on the heap equal torch's, in values, shapes, dtypes and errors."""

import pytest
import torch

from iris.errors import UnsupportedError
from iris.runtime.context import iris
from iris.runtime.providers import Provider, TorchSymmetricMemory

pytestmark = pytest.mark.ranks

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
CALLS = {
    "zeros": (1000,),
    "ones": (10, 100),
    "full": ((1000,), 3),
    "rand": (1000,),
    "randn": (1000,),
    "randint": (0, 100, (1000,)),
    "arange": (1000,),
    "linspace": (0, 99, 100),
}


@pytest.fixture
def ctx():
    with iris(1 << 22) as context:
        yield context


def _outcome(make, *args, **options):
    torch.manual_seed(7)
    try:
        return make(*args, **options)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return type(error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_every_dtype_equals_torch(ctx, name, dtype):
    expected = _outcome(getattr(torch, name), *CALLS[name], dtype=dtype, device=ctx.device)
    found = _outcome(getattr(ctx, name), *CALLS[name], dtype=dtype)
    if isinstance(expected, type):
        assert isinstance(found, type)  # refused, as torch does
        return
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert ctx.is_symmetric(found)
    assert found.view(torch.uint8).equal(expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        ("zeros", ((),), {}),
        ("zeros", (3,), {}),
        ("zeros", (3, 4), {}),
        ("zeros", ((3, 4),), {}),
        ("zeros", ([3, 4],), {}),
        ("zeros", (torch.Size([3, 4]),), {}),
        ("zeros", (2, 0, 3), {}),
        ("ones", (5,), {"requires_grad": True}),
        ("full", ((2, 2), True), {}),
        ("full", ((2, 2), 1.5), {}),
        ("arange", (5,), {}),
        ("arange", (1, 2.5, 0.5), {}),
        ("arange", (0, 10), {"step": 3}),
        ("linspace", (-1, 1, 7), {}),
        ("linspace", (), {"start": 3, "end": 10, "steps": 5}),
        ("randint", (5, (2, 3)), {}),
        ("randint", (), {"low": 2, "high": 5, "size": (4,)}),
        ("randn", (2, 3), {"requires_grad": True}),
        ("rand", (4,), {"dtype": torch.float64}),
    ],
)
def test_arguments_are_torchs(ctx, name, args, options):
    torch.manual_seed(3)
    expected = getattr(torch, name)(*args, device=ctx.device, **options)
    torch.manual_seed(3)
    found = getattr(ctx, name)(*args, **options)
    assert found.dtype == expected.dtype
    assert found.requires_grad == expected.requires_grad
    assert found.is_leaf
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)
    assert ctx.is_symmetric(found)


def test_a_generator_is_used(ctx):
    def seeded():
        return torch.Generator(ctx.device).manual_seed(1)

    found = [ctx.randn(5, generator=seeded()) for _ in range(2)]
    expected = torch.randn(5, generator=seeded(), device=ctx.device)
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)


def test_out_receives_the_result(ctx):
    out = ctx.empty(5, dtype=torch.int16)
    assert ctx.arange(5, out=out) is out
    assert out.tolist() == [0, 1, 2, 3, 4]
    assert ctx.full((5,), 9, out=out) is out
    assert out.tolist() == [9] * 5


def test_like_keeps_strides(ctx):
    like = torch.ones(4, 6, dtype=torch.bfloat16).T
    found = ctx.zeros_like(like)
    assert (found.stride(), found.dtype) == (like.stride(), like.dtype)
    assert found.eq(0).all()
    assert ctx.zeros_like(like, dtype=torch.int8, requires_grad=False).dtype == torch.int8


def test_uniform(ctx):
    found = ctx.uniform((100, 10), -2.0, 3.0, dtype=torch.float64)
    assert found.dtype == torch.float64
    assert found.min() >= -2
    assert found.max() < 3
    assert found.std() > 1
    assert ctx.uniform(4).shape == (4,)


def test_allocate_symmetric(ctx):
    tensor, peers = ctx.allocate_symmetric(1024, dtype=torch.float16)
    assert (tensor.shape, tensor.dtype) == ((1024,), torch.float16)
    assert (peers.shape, peers.dtype) == ((1,), torch.int64)
    assert int(peers[ctx.cur_rank]) == tensor.data_ptr()
    assert ctx.allocate_symmetric((2, 3))[0].shape == (2, 3)


def test_providers(ctx):
    assert isinstance(ctx, Provider)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="TorchSymmetricMemory needs a GPU"):
            TorchSymmetricMemory()


def test_the_default_dtype_is_torchs(ctx):
    torch.set_default_dtype(torch.float64)
    try:
        assert ctx.zeros(2).dtype == torch.float64
        assert ctx.allocate_symmetric(2)[0].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_gradients_flow_through_heap_tensors(ctx):
    weight = ctx.ones(3, requires_grad=True)
    (weight * ctx.arange(3)).sum().backward()
    assert weight.grad.tolist() == [0, 1, 2]


def _peers():
    ctx = iris(1 << 20)
    tensor, peers = ctx.allocate_symmetric(100, dtype=torch.int32)
    tensor.fill_(ctx.cur_rank)
    ctx.barrier()
    bases = ctx.get_heap_bases().tolist()
    offset = tensor.data_ptr() - bases[ctx.cur_rank]
    assert peers.tolist() == [base + offset for base in bases]
    # Each rank draws for itself.
    return [int(ctx.heap.peer_tensor(tensor, r)[5]) for r in range(3)], ctx.randn(4).tolist()


def test_peer_tables_point_to_the_same_tensor(ranks):
    results = ranks(3).run(_peers)
    assert [values for values, _ in results] == [[0, 1, 2]] * 3
