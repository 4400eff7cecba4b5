"""``ctx.ops`` and ``ctx.ccl``: results in a given tensor, nothing beside it touched, clear
errors.
"""

import pytest
import torch

import iris
from iris.testing import delay, small_integers

pytestmark = pytest.mark.ranks


def _rows(x, index, parts):
    chunk = -(-x.shape[0] // parts)
    start = min(index * chunk, x.shape[0])
    return x[start : start + chunk]


def _every_op(m, n, k, dtype, ranks_of):
    ctx = iris.iris(1 << 22)
    group = ranks_of(ctx.cur_rank)
    world, index = len(group), group.index(ctx.cur_rank)
    for seed in range(3):
        if seed == 2:
            delay(group[0])
        A = [small_integers((m, k), r, seed, dtype) for r in group]
        B = [small_integers((k, n), r, seed + 7, dtype) for r in group]
        bias = small_integers((n,), 0, seed, dtype)
        total = sum(a.double() @ b.double() for a, b in zip(A, B, strict=True)) + bias.double()
        mine, weight = A[index].t().contiguous().t(), B[index]
        guard = torch.full((m + 2, n), 7, dtype=dtype)
        ctx.ops.matmul_all_reduce(guard[1:-1], mine, weight, ctx, bias=bias, group=group)
        assert torch.equal(guard[1:-1].double(), total.to(dtype).double())
        assert torch.equal(guard[[0, -1]].double(), torch.full((2, n), 7.0).double())
        out = torch.full_like(_rows(guard[1:-1], index, world), 7)
        ctx.ops.matmul_reduce_scatter(out, mine, weight, group=group, bias=bias)
        assert torch.equal(out.double(), _rows(total.to(dtype).double(), index, world))
        gathered = torch.cat(A).double()
        out = torch.full((m * world, n), 7, dtype=dtype)
        handle = ctx.ops.all_gather_matmul(out, A[index], B[0], group=group, async_op=True)
        handle.wait()
        assert torch.equal(out.double(), (gathered @ B[0].double()).to(dtype).double())
        ctx.ops.matmul_all_gather(out, A[index], B[0], bias=bias, group=group)
        expected = (gathered @ B[0].double() + bias.double()).to(dtype)
        assert torch.equal(out.double(), expected.double())
        wide, tall = torch.cat(A, 1).double(), torch.cat(B)
        out = torch.full((m, n), 7, dtype=dtype)
        ctx.ops.all_gather_matmul(out, A[index], tall, gather_dim=1, group=group)
        assert torch.equal(out.double(), (wide @ tall.double()).to(dtype).double())
    return True


@pytest.mark.parametrize(("m", "n", "k"), [(6, 5, 4), (1, 3, 2), (4, 576, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_op(ranks, m, n, k, dtype):
    # pytorch/pytorch#31421, ROCm/iris#21, ROCm/iris#296
    assert all(ranks(2).run(_every_op, m, n, k, dtype, lambda rank: [0, 1]))


def test_ops_in_strided_groups(ranks):
    split = lambda rank: [0, 2] if rank % 2 == 0 else [1, 3]  # noqa: E731
    assert all(ranks(4).run(_every_op, 4, 3, 2, torch.float32, split))


def _collectives():
    ctx = iris.iris(1 << 20)
    rank, world = ctx.cur_rank, ctx.num_ranks
    xs = [small_integers((4, 6), r) for r in range(world)]
    x = xs[rank].clone()
    ctx.ccl.all_reduce(x, x)
    assert torch.equal(x, sum(xs))
    out = torch.empty(4, 6 * world)
    ctx.ccl.all_gather(out, xs[rank], dim=1)
    assert torch.equal(out, torch.cat(xs, 1))
    out = torch.empty(4 // world, 6)
    ctx.ccl.reduce_scatter(out, xs[rank], op="max")
    assert torch.equal(out, torch.stack(xs).amax(0)[rank * 2 : rank * 2 + 2])
    out = torch.empty(4, 6)
    ctx.ccl.all_to_all(out, xs[rank])
    assert torch.equal(out, torch.cat([part[rank * 2 : rank * 2 + 2] for part in xs]))
    return True


def test_collectives_into_a_given_tensor(ranks):
    assert all(ranks(2).run(_collectives))


def test_bad_operands():
    with iris.iris(1 << 20) as ctx:
        with pytest.raises(iris.SpecError) as caught:
            ctx.ops.matmul_all_reduce(torch.ones(2, 2), torch.ones(2, 3), torch.ones(4, 5))
        assert str(caught.value) == (
            "matmul_all_reduce: A [2, 3] and B [4, 5] do not multiply\n"
            "  output is [2, 2], the result is [2, 5]\n"
            "help: see help(ctx.ops)"
        )
        with pytest.raises(iris.SpecError, match="takes two matrices"):
            ctx.ops.matmul_all_gather(torch.ones(2), torch.ones(2), torch.ones(2))


def test_the_example_of_the_reference_page():
    ctx = iris.iris()
    A = ctx.randn((1024, 512), dtype=torch.float16)
    B = ctx.randn((512, 2048), dtype=torch.float16)
    output = ctx.zeros((1024, 2048), dtype=torch.float16)
    ctx.ops.matmul_all_reduce(output, A, B, ctx)
    assert torch.allclose(output.float(), A.float() @ B.float(), rtol=2e-2, atol=0.2)
