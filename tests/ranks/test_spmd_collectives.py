"""Collectives on real ranks, traced and eager: any group, strides, dtype, and nothing at all."""

import pytest
import torch

import iris
from iris import P
from iris.testing import delay, shard, small_integers

pytestmark = pytest.mark.ranks


def _collectives(fn, shapes, dtype, rounds=3, lowering="torch"):
    """Run ``fn(x)`` decorated and eagerly on data that differs by rank, row and column; return
    both by rank.
    """
    ctx = iris.iris(1 << 22)
    program = iris.spmd(lowering=lowering)(fn)
    results = []
    for seed in range(rounds):
        x = small_integers(shapes[ctx.cur_rank], ctx.cur_rank, seed, dtype)
        if seed == rounds - 1:
            delay(0)
        traced, eager = program(x), fn(x)
        assert traced.dtype == eager.dtype
        assert torch.equal(traced.double(), eager.double()), (traced, eager)
        results.append(eager)
    return results[-1]


def _columns(x):
    return iris.all_gather(x[:, ::2], "tp", dim=-1)


def _transposed_scatter(x):
    return iris.reduce_scatter(x.t(), "tp", dim=0)


def _transposed_reduce(x):
    return iris.all_reduce(x.t(), "tp", "max")


def _exchange(x):
    return iris.all_to_all(x, "tp", split_dim=1, concat_dim=0)


def _rotate(x):
    n = iris.axis_size("tp")
    return iris.ppermute(x, "tp", [(i, (i + 1) % n) for i in range(n)])


def _column_of_last(x):
    return iris.broadcast(x[:, 0], "tp", src=1)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (_columns, lambda xs, r: torch.cat([x[:, ::2] for x in xs], 1)),
        (_transposed_scatter, lambda xs, r: shard(sum(x.t() for x in xs), 0, r, len(xs))),
        (_transposed_reduce, lambda xs, r: torch.stack([x.t() for x in xs]).amax(0)),
        (_exchange, lambda xs, r: torch.cat([shard(x, 1, r, len(xs)) for x in xs], 0)),
        (_rotate, lambda xs, r: xs[r - 1]),
        (_column_of_last, lambda xs, r: xs[1][:, 0]),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_collectives_traced_and_eager(ranks, fn, expected, world, dtype):
    shapes = [(5, 4)] * world
    got = ranks(world).run(_collectives, fn, shapes, dtype)
    xs = [small_integers((5, 4), rank, 2, dtype) for rank in range(world)]
    for rank in range(world):
        assert torch.equal(got[rank].double(), expected(xs, rank).double())


def _scatter_in_groups():
    ctx = iris.iris(1 << 22)
    x = torch.arange(16.0).reshape(4, 4)[:, ctx.cur_rank]
    group = [0, 2] if ctx.cur_rank % 2 == 0 else [1, 3]
    return iris.reduce_scatter(x, group=group).tolist()


def test_reduce_scatter_in_interleaved_groups(ranks):
    # jax-ml/jax#19709
    assert ranks(4).run(_scatter_in_groups) == [[2, 10], [4, 12], [18, 26], [20, 28]]


def _strided_scatter():
    ctx = iris.iris(1 << 22)
    x = torch.arange(24.0).reshape(4, 3, 2).transpose(1, 2)
    program = iris.spmd(lambda t: iris.reduce_scatter(t, "tp", dim=0))
    return [
        iris.reduce_scatter(x, dim=0),
        program(x),
        x[ctx.cur_rank : ctx.cur_rank + 1] * ctx.num_ranks,
    ]


def test_reduce_scatter_honours_strides(ranks):
    # pytorch/pytorch#130251
    for eager, traced, expected in ranks(4).run(_strided_scatter):
        assert torch.equal(eager, expected)
        assert torch.equal(traced, expected)


def _layouts_differ():
    ctx = iris.iris(1 << 22)
    x = small_integers((4, 6), ctx.cur_rank)
    return iris.all_reduce(x if ctx.cur_rank == 0 else x.t().contiguous().t(), "tp")


def test_ranks_may_pass_other_strides(ranks):
    # pytorch/pytorch#163712
    expected = small_integers((4, 6), 0) + small_integers((4, 6), 1)
    for got in ranks(2).run(_layouts_differ):
        assert torch.equal(got, expected)


def _uneven_gather():
    ctx = iris.iris(1 << 22)
    whole = torch.arange(50.0).reshape(5, 10)
    x = shard(whole, 0, ctx.cur_rank, ctx.num_ranks)

    @iris.spmd(in_specs=P("tp"), out_specs=P())
    def gather(x):
        return iris.all_gather(x, "tp", dim=0)

    @iris.spmd(in_specs=P("tp"), out_specs=P())
    def mean(x):
        n = x.new_full((), x.numel())
        return iris.all_reduce(x.sum(), "tp") / iris.all_reduce(n, "tp")

    for _ in range(3):
        assert torch.equal(gather(x), whole)
        assert torch.equal(iris.all_gather(x), whole)
        assert mean(x).item() == whole.mean().item()
    return True


def test_uneven_and_empty_shards(ranks):
    # pytorch/pytorch#103306, #162692
    assert all(ranks(4).run(_uneven_gather))


def _empty_operands():
    iris.iris(1 << 22)
    x = torch.empty(1, 0, 2)
    shapes = [
        tuple(iris.all_gather(x, dim=0).shape),
        tuple(iris.all_reduce(x).shape),
        tuple(iris.reduce_scatter(torch.empty(0, 4)).shape),
        tuple(iris.broadcast(x).shape),
    ]
    return shapes, iris.all_reduce(torch.ones(2)).tolist()


def test_empty_operands(ranks):
    # pytorch/pytorch#85234
    for shapes, after in ranks(4).run(_empty_operands):
        assert shapes == [(4, 0, 2), (1, 0, 2), (0, 4), (1, 0, 2)]
        assert after == [4.0, 4.0]


def _every_dtype(names):
    ctx = iris.iris(1 << 22)
    wrong = []
    for name in names:
        dtype = getattr(torch, name)
        parts = [(torch.arange(17) + 3 * r).to(dtype) for r in range(ctx.num_ranks)]
        got = iris.all_gather(parts[ctx.cur_rank])
        sent = iris.broadcast(parts[ctx.cur_rank], src=1)
        expected = b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)
        if got.view(torch.uint8).numpy().tobytes() != expected or not torch.equal(
            sent.view(torch.uint8), parts[1].view(torch.uint8)
        ):
            wrong.append(name)
    return wrong


def test_data_movement_takes_every_dtype(ranks):
    # pytorch/pytorch#126556, Azure/msccl-executor-nccl#38
    names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64"
    names += " float8_e4m3fn float8_e5m2"
    assert ranks(2).run(_every_dtype, names.split()) == [[], []]


def _sums():
    ctx = iris.iris(1 << 22)
    own = torch.tensor([4, 8])[ctx.cur_rank]
    return {
        "avg": iris.all_reduce(own.to(torch.int32), op="avg").item(),
        "int8": iris.all_reduce(
            torch.tensor([[120], [100]][ctx.cur_rank], dtype=torch.int8)
        ).item(),
        "fp8": iris.all_reduce(torch.ones(64, dtype=torch.float8_e4m3fn)).float().tolist(),
        "bf16": iris.all_reduce(torch.full((3,), 256.0, dtype=torch.bfloat16)).tolist(),
    }


def test_sums_of_narrow_types(ranks):
    # InfiniTensor/InfiniCCL#37, NVIDIA/nccl#422
    for got in ranks(2).run(_sums):
        assert got == {"avg": 6, "int8": -36, "fp8": [2.0] * 64, "bf16": [512.0] * 3}


@pytest.mark.parametrize(
    "fn", [_columns, _transposed_scatter, _transposed_reduce, _exchange, _rotate]
)
def test_collectives_as_kernels(ranks, fn):
    ranks(3).run(_collectives, fn, [(5, 4)] * 3, torch.bfloat16, 3, "triton")


def _sent_to_some():
    ctx = iris.iris(1 << 22)
    pairs = [(0, 1), (1, 0), (0, 2)]
    send = iris.spmd(lowering="triton")(lambda x: iris.ppermute(x, "tp", pairs))
    torch.use_deterministic_algorithms(True)  # what nobody writes to is filled with NaN
    try:
        for seed in range(3):
            xs = [small_integers((2, 3), rank, seed) for rank in range(3)]
            due = [xs[1], xs[0], xs[0], torch.zeros(2, 3)]
            assert torch.equal(send(xs[ctx.cur_rank % 3]), due[ctx.cur_rank])
    finally:
        torch.use_deterministic_algorithms(False)


def test_ranks_that_nothing_is_sent_to_get_zeros(ranks):
    ranks(4).run(_sent_to_some)


def _lazily_conjugated(lowering):
    ctx = iris.iris(1 << 22)
    rank, world = ctx.cur_rank, ctx.num_ranks
    send = iris.spmd(lowering=lowering)(
        lambda x: (iris.all_gather(x, "tp"), iris.all_reduce(x.mH, "tp"))
    )
    multiply = iris.spmd(lowering=lowering)(
        lambda x, w, b: (iris.all_gather(x, "tp") @ w + b, iris.broadcast(x, "tp"))
    )
    for seed in range(3):
        parts = [
            torch.complex(small_integers((2, 3), r, seed), small_integers((2, 3), r, seed + 9))
            for r in range(world)
        ]
        for view in (torch.conj, torch.clone, torch.resolve_conj):  # of the same memory
            xs = [view(x) for x in parts]
            gathered, total = send(xs[rank])
            assert torch.equal(gathered, torch.cat(xs))
            assert torch.equal(total, sum(xs).mH)
        for view in (lambda x: x.conj().imag, lambda x: x.imag):
            xs = [view(x) for x in parts]
            w, b = xs[rank].t(), xs[rank][0, :2]
            product, first = multiply(xs[rank], w, b)
            assert torch.equal(product, torch.cat(xs) @ w + b)
            assert torch.equal(first, xs[0])
    return len(send.programs), len(multiply.programs)


@pytest.mark.parametrize("lowering", ["torch", "triton"])
def test_what_torch_is_yet_to_conjugate_or_negate(ranks, lowering):
    # A graph keeps the bits it was captured with, so such an operand has a program of its own.
    assert ranks(2).run(_lazily_conjugated, lowering) == [(2, 2)] * 2
