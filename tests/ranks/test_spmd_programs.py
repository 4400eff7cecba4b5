"""Decorated functions on real ranks: right values for every shape, call after call, and clear
errors on all ranks.
"""

import re

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

import iris
from iris import P
from iris.lower import choices
from iris.testing import assert_close, delay, shard, small_integers

pytestmark = pytest.mark.ranks


def _mlp(m, k, f, dtype, seeds):
    ctx = iris.iris(1 << 22)
    rank, world = ctx.cur_rank, ctx.num_ranks

    @iris.spmd(in_specs=(P("tp", None), P(None, "tp"), P("tp", None)), out_specs=P("tp", None))
    def mlp(x, w_up, w_down):
        h = F.relu(iris.all_gather(x, "tp", dim=0) @ w_up)
        return iris.reduce_scatter(h @ w_down, "tp", dim=0)

    for seed in seeds:
        x = small_integers((m, k), seed=seed, dtype=dtype)
        up = small_integers((k, f), seed=seed + 50, dtype=dtype)
        down = small_integers((f, k), seed=seed + 90, dtype=dtype)
        if seed == seeds[-1]:
            delay(world - 1)
        y = mlp(shard(x, 0, rank, world), shard(up, 1, rank, world), shard(down, 0, rank, world))
        expected = F.relu(x.double() @ up.double()) @ down.double()
        assert_close(y.double(), shard(expected, 0, rank, world).to(dtype).double(), dtype)
    return len(mlp._state.programs)


@pytest.mark.parametrize(
    ("world", "m", "k", "f"),
    [
        (1, 4, 3, 5),
        (2, 8, 6, 4),
        (3, 7, 5, 10),
        (4, 12, 6, 8),
        (4, 5, 6, 9),
        (4, 1, 1, 1),
        (2, 4, 0, 2),
    ],
)
def test_mlp_of_any_shape_on_any_world(ranks, world, m, k, f):
    # ByteDance-Seed/Triton-distributed#79
    assert ranks(world).run(_mlp, m, k, f, torch.float32, (0, 1, 2, 3)) == [1] * world


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_mlp_of_any_dtype(ranks, dtype):
    ranks(2).run(_mlp, 6, 4, 4, dtype, (0, 1, 2))


def _text(caught):
    return re.sub(r"test_spmd_programs.py:\d+", "FILE:LINE", str(caught.value))


def _bias_after_the_sum():
    ctx = iris.iris(1 << 22)
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])[:, 2 * ctx.cur_rank : 2 * ctx.cur_rank + 2]
    w, bias = torch.ones(2, 3), torch.tensor([100.0, 200.0, 300.0])

    @iris.spmd(in_specs=(P(None, "tp"), P("tp", None), P()), out_specs=P())
    def good(x, w, bias):
        return iris.all_reduce(x @ w, "tp") + bias

    @iris.spmd(in_specs=(P(None, "tp"), P("tp", None), P()), out_specs=P())
    def bad(x, w, bias):
        return iris.all_reduce(x @ w + bias, "tp")

    results = [good(x, w, bias).tolist() for _ in range(3)]
    with pytest.raises(iris.TypeRuleError) as caught:
        bad(x, w, bias)
    return results[-1], _text(caught)


def test_bias_is_counted_once(ranks):
    # Wenyueh/MinivLLM#80
    for value, text in ranks(2).run(_bias_after_the_sum):
        assert value == [[110, 210, 310], [126, 226, 326]]
        assert text == (
            "add: %0 is a partial sum over 'tp' but %bias is not\n"
            "  at FILE:LINE\n"
            "  %0: f32[2, 3]+tp, made at FILE:LINE\n"
            "  %bias: f32[3]\n"
            "  each rank would use %bias in its part: the sum would count it 2 times\n"
            "help: all_reduce or reduce_scatter %0 over 'tp' first"
        )


def _reuse_of_an_operand():
    ctx = iris.iris(1 << 22)
    a = (ctx.cur_rank + 1) * torch.ones(4, 4)

    @iris.spmd
    def program(a):
        total = iris.all_reduce(a, "tp")
        return total + F.relu(a) @ F.relu(a)

    return [program(a).unique().tolist() for _ in range(3)][-1]


def test_operand_of_a_collective_is_still_good_after_it(ranks):
    # pytorch/pytorch#108811
    assert ranks(2).run(_reuse_of_an_operand) == [[7.0], [19.0]]


def _overwritten_at_once(lowering, rounds):
    ctx = iris.iris(1 << 22)
    program = iris.spmd(lowering=lowering)(lambda t: iris.all_reduce(t, "tp"))
    bad = 0
    for i in range(rounds):
        x = torch.full((1000,), float(i + ctx.cur_rank))
        y = program(x) if i % 2 or lowering == "triton" else iris.all_reduce(x)
        x.fill_(-1)
        if i % 8 == 0:
            delay(i // 8 % 2, 0.002)
        bad += int(not torch.equal(y, torch.full((1000,), 2.0 * i + 1)))
    return bad


@pytest.mark.parametrize(("lowering", "rounds"), [("torch", 400), ("triton", 24)])
def test_input_may_be_overwritten_at_once(ranks, lowering, rounds):
    # ROCm/aiter#3515
    assert ranks(2).run(_overwritten_at_once, lowering, rounds) == [0, 0]


def _unused_collective():
    ctx = iris.iris(1 << 22)

    @iris.spmd
    def drops(x):
        iris.all_reduce(x, "tp")
        return x * 2

    @iris.spmd
    def differs(x):
        y = iris.all_reduce(x, "tp")
        return y if ctx.cur_rank == 0 else x

    values = [drops(torch.ones(2)).tolist() for _ in range(3)][-1]
    with pytest.raises(iris.TraceError) as caught:
        differs(torch.ones(2))
    return values, str(caught.value)


def test_collective_that_one_rank_does_not_use(ranks):
    # pytorch/pytorch#130918
    for values, text in ranks(2).run(_unused_collective):
        assert values == [2.0, 2.0]
        assert text == (
            "differs: ranks traced different programs; the first line that differs:\n"
            "  rank 0: return %0\n  rank 1: return %x\n"
            "help: do not branch on the rank in Python: use iris.axis_index and torch.where"
        )


def _mesh_of_two_axes():
    ctx = iris.iris(1 << 22)
    mesh = iris.mesh((2, 2), ("dp", "tp"))
    dp, tp = divmod(ctx.cur_rank, 2)

    @iris.spmd(mesh=mesh, in_specs=(P("dp", None), P(None, "tp"), P("tp", None)), out_specs=P("dp"))
    def mlp(x, up, down):
        return iris.all_reduce(F.relu(x @ up) @ down, "tp")

    @iris.spmd(mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P())
    def everything(x):
        return iris.all_gather(x, ("dp", "tp"), dim=0)

    x, up, down = small_integers((6, 4)), small_integers((4, 8), 1), small_integers((8, 4), 2)
    expected = F.relu(x @ up) @ down
    for _ in range(3):
        y = mlp(shard(x, 0, dp, 2), shard(up, 1, tp, 2), shard(down, 0, tp, 2))
        assert torch.equal(y, shard(expected, 0, dp, 2))
        assert torch.equal(everything(shard(shard(expected, 0, dp, 2), 0, tp, 2)), expected)
    return True


def test_mesh_of_two_axes(ranks):
    assert all(ranks(4).run(_mesh_of_two_axes))


def _all_gather_once():
    ctx = iris.iris(1 << 22)

    @iris.spmd(in_specs=(P("tp"), P(), P(), P()), out_specs=(P(), P(), P(), P()))
    def qkv(x, wq, wk, wv):
        g = iris.all_gather(x, "tp")
        return g @ wq, iris.all_gather(x, "tp") @ wk, iris.all_gather(x, "tp") @ wv, g

    x = small_integers((4, 3), ctx.cur_rank)
    ws = [small_integers((3, 3), 7 + i) for i in range(3)]
    outs = [qkv(x, *ws) for _ in range(3)][-1]
    gathers = str(qkv.trace(x, *ws).lower().graph).count("all_gather(%x")
    return outs, gathers


def test_identical_gathers_are_done_once(ranks):
    # pytorch/pytorch#146045, bytedance/flux#44
    whole = torch.cat([small_integers((4, 3), r) for r in range(2)])
    for outs, gathers in ranks(2).run(_all_gather_once):
        assert gathers == 1
        for i in range(3):
            assert torch.equal(outs[i], whole @ small_integers((3, 3), 7 + i))
        assert torch.equal(outs[3], whole)


def _functional_collectives():
    ctx = iris.iris(1 << 22)
    rank, world = ctx.cur_rank, ctx.num_ranks
    group = torch.distributed.group.WORLD

    @iris.spmd(in_specs=(P("tp", None), P(None, "tp"), P("tp", None)), out_specs=P("tp", None))
    def mlp(x, up, down):
        h = F.relu(funcol.all_gather_tensor(x, 0, group) @ up)
        return funcol.reduce_scatter_tensor(h @ down, "sum", 0, group)

    @iris.spmd
    def total(x):
        return funcol.all_reduce(x, "avg", group)

    @iris.spmd
    def in_place(x):
        torch.distributed.all_reduce(x)
        return x

    x, up, down = small_integers((4, 6)), small_integers((6, 8), 1), small_integers((8, 6), 2)
    for _ in range(3):
        y = mlp(shard(x, 0, rank, world), shard(up, 1, rank, world), shard(down, 0, rank, world))
        assert torch.equal(y, shard(F.relu(x @ up) @ down, 0, rank, world))
        assert total(torch.full((2,), 2.0 * rank)).tolist() == [1.0, 1.0]
    with pytest.raises(iris.TraceError) as caught:
        in_place(x)
    stages = mlp.trace(*(shard(t, d, rank, world) for t, d in ((x, 0), (up, 1), (down, 0))))
    return [node.op for node in stages.lower().graph.nodes], _text(caught)


def test_functional_collectives_of_torch(ranks):
    for ops, text in ranks(2).run(_functional_collectives):
        assert ops == ["all_gather_matmul", "matmul_reduce_scatter"]
        assert text == (
            "in_place: torch.distributed's allreduce_ works in place and cannot be traced\n"
            "  at FILE:LINE\n"
            "help: use iris.all_reduce, or torch.distributed._functional_collectives"
        )


def _layers(lowering, m, k, f):
    ctx = iris.iris(1 << 24)
    rank, world = ctx.cur_rank, ctx.num_ranks

    @iris.spmd(
        in_specs=(P("tp"), P(None, "tp"), P(None, "tp"), P("tp"), P(), P("tp")),
        out_specs=(P("tp"), P()),
        lowering=lowering,
    )
    def swiglu(x, gate, up, down, bias, residual):
        g = iris.all_gather(x, "tp", dim=0)
        h = F.silu(g @ gate) * (g @ up)
        y = iris.reduce_scatter(h @ down, "tp", dim=0) + residual
        return y, F.relu(iris.all_reduce(h @ down, "tp") + bias)

    down = small_integers((f, k), 3)
    w = [small_integers((k, f), 1), small_integers((k, f), 2)]
    mine = [shard(w[0], 1, rank, world), shard(w[1], 1, rank, world), shard(down, 0, rank, world)]
    bias = small_integers((k,), 9)
    for seed in range(3):
        x = small_integers((m, k), seed)
        if seed == 2:
            delay(0)
        y, z = swiglu(shard(x, 0, rank, world), *mine, bias, shard(x, 0, rank, world))
        total = (F.silu(x @ w[0]) * (x @ w[1])) @ down
        assert_close(y, shard(total + x, 0, rank, world))
        assert_close(z, F.relu(total + bias))
    staged = swiglu.trace(shard(x, 0, rank, world), *mine, bias, shard(x, 0, rank, world))
    return [choice.algorithm for choice in staged.program.choices.values()]


@pytest.mark.parametrize(("world", "m", "k", "f"), [(2, 20, 24, 40), (3, 7, 5, 10), (4, 3, 2, 1)])
def test_fused_kernels_of_any_shape(ranks, world, m, k, f):
    for algorithms in ranks(world).run(_layers, "triton", m, k, f):
        assert set(algorithms) <= {"fused", "one-shot", "kernel", "unfused"}
        assert "fused" in algorithms


def _sizes_change(sizes):
    ctx = iris.iris(1 << 22)
    rank, world = ctx.cur_rank, ctx.num_ranks

    @iris.spmd(in_specs=P("tp"), out_specs=P())
    def whole(x):
        return iris.all_gather(x * 2, "tp", dim=0)

    for seed, rows in enumerate(sizes):
        x = small_integers((rows, 3), seed)
        assert torch.equal(whole(shard(x, 0, rank, world)), 2 * x), rows
    return sum(len(found) for found in whole._state.variants.values())


def test_sizes_that_some_ranks_cannot_tell_apart(ranks):
    # Of 8 and of 7 rows the first three of four ranks hold two.
    ranks(4).run(_sizes_change, [8, 8, 7, 7, 8, 5, 7, 8, 6, 6])


def _gathers(lowering, m):
    ctx = iris.iris(1 << 24)
    rank, world = ctx.cur_rank, ctx.num_ranks

    @iris.spmd(in_specs=(P("tp"), P(), P()), out_specs=(P(), P(), P()), lowering=lowering)
    def both(x, w, v):
        g = iris.all_gather(x, "tp", dim=0)
        y = F.relu(g @ w)
        return y, g, iris.all_gather(F.relu(x @ v), "tp", dim=0)

    @iris.spmd(in_specs=(P(), P(None, "tp")), out_specs=P(), lowering=lowering)
    def columns(x, w):
        return iris.all_gather(x @ w, "tp", dim=-1)

    w, v = small_integers((6, 24), 1), small_integers((6, 5), 2)
    for seed in range(3):
        x = small_integers((m, 6), seed)
        if seed == 2:
            delay(world - 1)
        y, g, z = both(shard(x, 0, rank, world), w, v)
        assert torch.equal(y, F.relu(x @ w))
        assert torch.equal(g, x)
        assert torch.equal(z, F.relu(x @ v))
        assert torch.equal(columns(x, shard(w, 1, rank, world)), x @ w)
    programs = [next(iter(f._state.programs.values())) for f in (both, columns)]
    return [choice.algorithm for program in programs for choice in program.choices.values()]


@pytest.mark.parametrize(
    ("world", "m"), [(2, 9), (3, 4), pytest.param(4, 3, marks=pytest.mark.slow)]
)
def test_gathers_before_and_after_a_product(ranks, world, m):
    # bytedance/flux#44
    for algorithms in ranks(world).run(_gathers, "triton", m):
        assert algorithms == ["fused"] * 3


def _aliases():
    iris.iris(1 << 22)

    @iris.spmd(in_specs=(P(), P()))
    def f(x, y):
        x.mul_(2)
        return x + y

    results = [f(torch.ones(4), torch.ones(4)).tolist()]
    for _ in range(2):
        base = torch.ones(8)
        results.append(f(base[:4], base[2:6]).tolist())
    return results


def test_aliases_are_told_apart_on_several_ranks(ranks):
    # pytorch/pytorch#139789
    for results in ranks(2).run(_aliases):
        assert results == [[3] * 4, [4, 4, 3, 3], [4, 4, 3, 3]]


VECTORS = {
    "linear": torch.nn.functional.linear,
    "product": lambda x, w: x @ w.T,
    "mv": lambda x, w: w @ x,
}


@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_meets_a_split_matrix(ranks, name):
    """torch makes a matrix of the vector, and in place a vector of the result."""

    def run(name):
        ctx = iris.iris(1 << 20)
        product = VECTORS[name]
        program = iris.spmd(in_specs=(P(), P("tp")), out_specs=P())(
            lambda x, w: iris.all_gather(2 * product(x, w), "tp")
        )
        for seed in range(3):
            x, w = small_integers((4,), seed=seed), small_integers((6, 4), seed=seed)
            shard = w.chunk(ctx.num_ranks)[ctx.cur_rank]
            assert torch.equal(program(x, shard), 2 * (w @ x))

    ranks(2).run(run, name)


def _as_on_gpus(rows):
    """A feed-forward block, its stages cut as they are for GPUs."""
    ctx = iris.iris(1 << 22)
    rank, world, usual = ctx.cur_rank, ctx.num_ranks, choices.Limits
    choices.Limits = lambda: choices.ON_GPUS

    @iris.spmd(
        in_specs=(P("tp"), P(None, "tp"), P(None, "tp"), P("tp"), P()),
        out_specs=(P(), P()),
        lowering="triton",
    )
    def block(x, gate, up, down, scale):
        g = iris.all_gather(x, "tp", dim=0, size=rows)
        h = g + iris.all_reduce((F.silu(g @ gate) * (g @ up)) @ down, "tp")
        return h, F.rms_norm(h, (8,), scale)

    try:
        for seed in range(3):
            made = torch.Generator().manual_seed(seed)
            x, gate, up, down, scale = (
                torch.randn(shape, generator=made)
                for shape in ((rows, 8), (8, 6 * world), (8, 6 * world), (6 * world, 8), (8,))
            )
            mine = (
                x.split(-(-rows // world))[rank],
                *(w.chunk(world, 1)[rank] for w in (gate, up)),
                down.chunk(world, 0)[rank],
            )
            delay(world - 1 if seed == 2 else -1)
            h, normed = block(*mine, scale)
            want = x + (F.silu(x @ gate) * (x @ up)) @ down
            torch.testing.assert_close(h, want, atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(normed, F.rms_norm(want, (8,), scale), atol=2e-4, rtol=1e-4)
    finally:
        choices.Limits = usual


@pytest.mark.parametrize("rows", [5, 67])
def test_stages_cut_as_for_gpus(ranks, rows):
    ranks(2).run(_as_on_gpus, rows)
