"""Creation functions on the heap equal torch's, in values, shapes, dtypes and errors."""

import pytest
import torch

from iris.errors import CollectiveMismatchError, IrisError, UnsupportedError
from iris.runtime.context import iris
from iris.runtime.providers import Provider, TorchSymmetricMemory

pytestmark = pytest.mark.ranks

# All that a strided tensor can have; "quantised" ones are another kind.
DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and "q" not in str(d)}, key=str
)
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


def _same(found, expected):
    """Equal in dtype, shape and bits, or refused by both."""
    if isinstance(expected, type):
        return isinstance(found, type)
    same = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return same and found.view(torch.uint8).equal(expected.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_equals_torch(ctx, dtype):
    # ROCm/iris#47
    for name, args in CALLS.items():
        expected = _outcome(getattr(torch, name), *args, dtype=dtype, device=ctx.device)
        found = _outcome(getattr(ctx, name), *args, dtype=dtype)
        assert _same(found, expected), name
        assert isinstance(found, type) or ctx.is_symmetric(found)
    like = torch.ones(2, 3, device=ctx.device)
    expected = _outcome(torch.zeros_like, like, dtype=dtype)
    assert _same(_outcome(ctx.zeros_like, like, dtype=dtype), expected)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_of_every_method_and_dtype_equals_torch(ctx, dtype):
    for name, args in CALLS.items():
        shape = getattr(torch, name)(*args, device="meta").shape
        expected = torch.empty(shape, dtype=dtype, device=ctx.device)
        found = ctx.empty(shape, dtype=dtype)
        wanted = _outcome(getattr(torch, name), *args, out=expected)
        got = _outcome(getattr(ctx, name), *args, out=found)
        assert isinstance(wanted, type) == isinstance(got, type), name
        assert isinstance(wanted, type) or (got is found and _same(found, expected)), name


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


def test_out_that_does_not_fit_is_refused(ctx):
    x = ctx.ones(4)
    for out, given in (
        (torch.ones(3), "torch.float32 of shape (3,), elsewhere"),
        (x, "torch.float32 of shape (4,)"),
        (x[:3].view(torch.int32), "torch.int32 of shape (3,)"),
        (torch.ones(3).numpy(), "ndarray"),
        ("x", "str"),
    ):
        with pytest.raises(IrisError) as caught:
            ctx.rand(3, dtype=torch.float32, out=out)
        assert str(caught.value) == (
            "out= must be a torch.float32 tensor of shape (3,) on the heap, "
            f"and is {given}\nhelp: create it with ctx.empty(...)"
        )
    assert x.tolist() == [1] * 4


def test_out_keeps_its_gradient_and_its_strides(ctx):
    weight = ctx.ones(4, requires_grad=True)
    with torch.no_grad():
        ctx.full((2,), 5, out=weight[::2])
        ctx.empty(4, out=weight)
    assert weight.requires_grad
    assert weight.tolist() == [5, 1, 5, 1]


def test_where_and_how_a_tensor_lies(ctx):
    assert ctx.zeros(2, device=torch.device(ctx.device.type, ctx.get_device_id())).shape == (2,)
    with pytest.raises(IrisError, match="device='meta', but the heap of this rank is on"):
        ctx.zeros(2, device="meta")
    sparse = torch.ones(3).to_sparse()
    for make in (lambda: ctx.zeros(2, layout=torch.sparse_coo), lambda: ctx.as_symmetric(sparse)):
        with pytest.raises(IrisError, match=r"the heap has no torch\.sparse_coo tensors"):
            make()
    assert not any(ctx.is_symmetric(x) for x in (sparse, torch.ones(3).numpy(), None))


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


def _table_of_a_group():
    """A peer table of ranks 2 and 0, while rank 1 does something else."""
    ctx = iris(1 << 20)
    if ctx.cur_rank == 1:
        ctx.barrier()
        return None
    tensor, peers = ctx.allocate_symmetric(50, dtype=torch.int32, group=[2, 0])
    tensor.fill_(ctx.cur_rank + 1)
    ctx.barrier(group=[2, 0])
    place = [2, 0].index(ctx.cur_rank)
    assert int(peers[place]) == tensor.data_ptr()
    there = ctx.heap.find(tensor)[0].peer(1 - place).view(torch.int32)
    assert int(peers[1 - place]) == there.data_ptr()
    found = len(peers), int(there[7])
    with pytest.raises(CollectiveMismatchError) as caught:
        ctx.allocate_symmetric(50 + place, dtype=torch.int8, group=[2, 0])
    ctx.barrier()
    return found, str(caught.value)


def test_a_group_allocates_without_the_others(ranks):
    (first, text), nothing, (third, same) = ranks(3).run(_table_of_a_group)
    assert (first, nothing, third) == ((2, 3), None, (2, 1))
    assert text == same
    lines = text.splitlines()
    assert lines[0] == "ranks of one group allocate different tensors"
    assert lines[1].startswith("  rank 2: 50 bytes of int8[50] at test_runtime_creation.py:")
    assert lines[2].startswith("  rank 0: 51 bytes of int8[51] at test_runtime_creation.py:")


def test_peer_tables_point_to_the_same_tensor(ranks):
    results = ranks(3).run(_peers)
    assert [values for values, _ in results] == [[0, 1, 2]] * 3
