"""Failures reported for other stacks, tried as programs: each test names the reports it repeats."""

import functools

import pytest
import torch
import torch.nn.functional as F

import iris
from iris import P
from iris.testing import delay, shard, small_integers

pytestmark = pytest.mark.ranks

BOTH = pytest.mark.parametrize("lowering", ["torch", "triton"])


def thrice(program, make, expected):
    """Call ``program`` on ``make(seed, rank)`` three times, once late; all ranks' data is known."""
    ctx = iris.current()
    for seed in range(3):
        delay(0 if seed == 2 else -1)
        got = program(*make(seed, ctx.cur_rank))
        want = expected([make(seed, rank) for rank in range(ctx.num_ranks)], ctx.cur_rank)
        for one, other in zip(
            *(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True
        ):
            assert one.shape == other.shape
            assert torch.equal(one.double(), other.to(one.dtype).double()), (seed, one, other)


def _products(lowering, m, n, k, dtype):
    """Products beside each collective, of operands in either layout, against sums in float64."""
    ctx = iris.iris(1 << 23)
    world = ctx.num_ranks
    spmd = iris.spmd(lowering=lowering)

    def make(seed, rank):
        x = small_integers((m, k), rank, seed, dtype)
        w = small_integers((n, k), rank, seed + 5, dtype).t()
        return x.t().contiguous().t() if seed == 1 else x, w.contiguous() if seed == 1 else w

    def parts(given):
        return [x.double() @ w.double() for x, w in given]

    def gathered(given):
        return torch.cat([x for x, _ in given]).double()

    thrice(
        spmd(lambda x, w: iris.all_reduce(x @ w, "tp")), make, lambda given, _: sum(parts(given))
    )
    thrice(
        spmd(lambda x, w: iris.reduce_scatter(x @ w, "tp")),
        make,
        lambda given, rank: shard(sum(parts(given)), 0, rank, world),
    )
    thrice(
        spmd(lambda x, w: iris.all_gather(x @ w, "tp")),
        make,
        lambda given, _: torch.cat(parts(given)),
    )

    def gather_matmul(x, w):
        g = iris.all_gather(x, "tp")
        return g @ w, g

    thrice(
        spmd(gather_matmul),
        make,
        lambda given, rank: (gathered(given) @ given[rank][1].double(), gathered(given)),
    )


@pytest.mark.parametrize(
    ("lowering", "m", "n", "k"), [("torch", 3, 20, 1), ("torch", 1, 5, 0), ("triton", 4, 12, 3)]
)
def test_products_in_any_layout_and_size(ranks, lowering, m, n, k):
    # ROCm/iris#21, bytedance/flux#44, pytorch/pytorch#162917, ROCm/iris#238,
    # ROCm/composable_kernel#512, pytorch/pytorch#31421, vllm-project/vllm#34412
    ranks(2).run(_products, lowering, m, n, k, torch.float32)


def test_columns_that_fill_half_a_tile(ranks):
    # ROCm/iris#21, ROCm/composable_kernel#512
    ranks(2).run(_products, "torch", 64, 576, 133, torch.float32)


def _scatter_dims(lowering):
    ctx = iris.iris(1 << 22)
    world = ctx.num_ranks

    def make(seed, rank):
        x, w = small_integers((2, 4, 3), rank, seed), small_integers((3, 6), rank, seed + 3)
        return x, w

    for dim in (0, 1, 2, -1):
        program = iris.spmd(lowering=lowering)(
            lambda x, w, dim: iris.reduce_scatter(x @ w, "tp", dim=dim)
        )
        thrice(
            lambda x, w, program=program, dim=dim: program(x, w, dim),
            make,
            lambda given, rank, dim=dim: shard(sum(x @ w for x, w in given), dim, rank, world),
        )


@BOTH
def test_scatter_along_any_dim_of_a_product(ranks, lowering):
    # pytorch/pytorch#153595, pytorch/pytorch#162736
    ranks(2).run(_scatter_dims, lowering)


def _uneven_totals():
    ctx = iris.iris(1 << 22)
    rank, world = ctx.cur_rank, ctx.num_ranks

    @iris.spmd(in_specs=(P(None, "tp"), P()), out_specs=P())
    def columns(x, w):
        return iris.all_gather(x, "tp", dim=1) @ w

    @iris.spmd(in_specs=(P(None, "tp"), P("tp", None)), out_specs=P("tp"))
    def rows(x, w):
        return iris.reduce_scatter(x @ w, "tp")

    @iris.spmd(in_specs=P(), out_specs=P())
    def there_and_back(x):
        return iris.all_gather(iris.reduce_scatter(x, "tp", op="avg"), "tp")

    for seed in range(3):
        x, w = small_integers((5, 32), seed), small_integers((32, 32), seed + 1)
        y = shard(x, 1, rank, world)
        assert torch.equal(columns(y, w), x @ w)
        total = x.new_zeros(32, 32).copy_(w)
        wide = shard(total, 1, rank, world)
        assert torch.equal(rows(wide, shard(w, 0, rank, world)), shard(w @ w, 0, rank, world))
        assert torch.equal(there_and_back(x), x)


def test_totals_that_do_not_divide(ranks):
    # pytorch/pytorch#165653, pytorch/pytorch#103306
    ranks(3).run(_uneven_totals)
    ranks(4).run(_uneven_totals)


UNEVEN = [((5, 3, 8), 0), ((7, 8), 0), ((1, 7, 2, 8), 1)]


def _uneven_rows(lowering, mesh_shape, cases):
    """Rows of several dims, split unevenly: [S, B, K] of 5 or 7 by S, over one or two axes."""
    iris.iris(1 << 22)
    axes = ("dp", "tp")[-len(mesh_shape) :]
    mesh, axis = iris.mesh(mesh_shape, axes), axes if len(axes) > 1 else "tp"
    results = []

    def split(x, dim):
        for axis_dim, index in enumerate(mesh.get_coordinate()):
            x = shard(x, dim, index, mesh_shape[axis_dim])
        return x

    def programs(dims, dim):
        spec, last = [None] * dims, [None] * (dims - 1)
        spec[dim] = axis
        make = functools.partial(iris.spmd, mesh=mesh, lowering=lowering, config="fused")
        return (
            make(in_specs=(P(*spec), P()), out_specs=P())(
                lambda x, w: iris.all_gather(x, axis, dim=dim) @ w
            ),
            make(in_specs=(P(*last, axis), P(axis)), out_specs=P(*spec))(
                lambda x, w: iris.reduce_scatter(x @ w, axis, dim=dim)
            ),
            make(in_specs=(P(*spec), P()))(lambda x, w: iris.all_gather(x @ w, axis, dim=dim)),
        )

    for shape, dim in cases:
        gathered, scattered, sent = programs(len(shape), dim)
        for seed in range(3):
            delay(seed - 1)
            x, w = small_integers(shape, 0, seed), small_integers((8, 6), 0, seed + 9)
            assert torch.equal(gathered(split(x, dim), w), x @ w), (shape, seed)
            want = split(x @ w, dim)
            assert torch.equal(scattered(split(x, len(shape) - 1), split(w, 0)), want), (
                shape,
                seed,
            )
        if len(shape) == 2:
            assert torch.equal(sent(split(x, dim), w), x @ w)
        if len(shape) != 3:
            continue
        with pytest.raises(iris.TraceError) as caught:
            sent(split(x, dim), w)
        results += str(caught.value).splitlines()[1:]
    return results


@BOTH
def test_rows_of_several_dims_that_do_not_divide(ranks, lowering):
    found = ranks(2).run(_uneven_rows, lowering, (2,), UNEVEN)
    assert found[0] == found[1]
    first, second, way_out = found[0]
    assert first.startswith("  rank 0: all_gather(f32[3, 3, 6]~tp, axis=tp, dim=0)")
    assert second.startswith("  rank 1: all_gather(f32[2, 3, 6]~tp, axis=tp, dim=0)")
    assert way_out == (
        "help: give every rank the same shape: "
        "a dim that is folded into another has to split evenly"
    )


def test_rows_over_two_axes_that_do_not_divide(ranks):
    ranks(4).run(_uneven_rows, "triton", (2, 2), UNEVEN[:2])


def _means():
    ctx = iris.iris(1 << 22)
    rank, world = ctx.cur_rank, ctx.num_ranks

    @iris.spmd(in_specs=P("tp"), out_specs=P())
    def mean(x):
        n = x.new_full((), x.numel())
        return iris.all_reduce(x.sum(), "tp") / iris.all_reduce(n, "tp")

    wholes = torch.arange(12.0).reshape(3, 4), torch.arange(4.0).reshape(1, 4)
    return [mean(shard(x, 0, rank, world)).item() for x in wholes for _ in range(3)]


def test_mean_over_uneven_and_empty_shards(ranks):
    # pytorch/pytorch#162692
    assert ranks(2).run(_means) == [[5.5] * 3 + [1.5] * 3] * 2


def _half_of_a_bias():
    ctx = iris.iris(1 << 22)
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])[:, 2 * ctx.cur_rank : 2 * ctx.cur_rank + 2]
    w, bias = torch.ones(2, 3), torch.tensor([100.0, 200.0, 300.0])
    by_hand = iris.spmd(lambda x, w, b: iris.all_reduce(x @ w + b / ctx.num_ranks, "tp"))
    fused = iris.spmd(lambda x, w, b: iris.all_reduce(x @ w, "tp") + b)
    half = iris.spmd(lambda x, w: iris.reduce_scatter(x @ w, "tp"))
    halves = torch.full((2, 3), 0.5)
    return (
        [[f(x, w, bias).tolist() for _ in range(3)][-1] for f in (by_hand, fused)],
        [half(halves, halves.reshape(3, 2)).tolist() for _ in range(3)][-1],
    )


def test_bias_in_parts_and_fractions(ranks):
    # Wenyueh/MinivLLM#80, ROCm/iris#296
    due = [[110, 210, 310], [126, 226, 326]]
    assert ranks(2).run(_half_of_a_bias) == [([due, due], [[1.5, 1.5]])] * 2


def _views():
    ctx = iris.iris(1 << 22)
    world = ctx.num_ranks
    rows = ctx.zeros(4, 8)
    rows += torch.arange(4.0)[:, None]
    column = torch.tensor([[0.0, 0], [1, 1]])[:, 0]
    programs = (
        (lambda t: iris.all_reduce(t[2], "tp"), rows, torch.full((8,), 2.0 * world)),
        (lambda t: iris.broadcast(t[3], "tp", src=1), rows, torch.full((8,), 3.0)),
        (lambda t: iris.all_gather(t, "tp"), column, torch.tensor([0.0, 1] * world)),
        (lambda t: iris.broadcast(t, "tp"), column, torch.tensor([0.0, 1])),
        (lambda t: iris.all_gather(t[:, ::2], "tp", dim=1), rows, rows[:, ::2].repeat(1, world)),
        (lambda t: iris.all_reduce(t.t(), "tp"), rows, world * rows.t()),
    )
    for fn, x, expected in programs:
        program = iris.spmd(fn)
        for got in (fn(x), *(program(x) for _ in range(3))):
            assert torch.equal(got, expected)
    w = small_integers((8, 3), ctx.cur_rank)
    turned = iris.spmd(lambda x, w: iris.all_reduce((x @ w).t(), "tp"))
    total = sum(rows @ small_integers((8, 3), rank) for rank in range(world))
    for _ in range(3):
        assert torch.equal(turned(rows, w), total.t())
    layout = rows if ctx.cur_rank else rows.t().contiguous().t()
    assert torch.equal(iris.spmd(lambda t: iris.all_reduce(t, "tp"))(layout), world * rows)
    own = rows.t().clone()
    ctx.ccl.all_reduce(own.t(), own.t())  # in place, through a view
    assert torch.equal(own, world * rows.t())


def test_operands_are_what_their_strides_and_offsets_say(ranks):
    # pytorch/pytorch#159548, pytorch/pytorch#163712, NVIDIA/Megatron-LM#5337,
    # torch-spyre/torch-spyre#3018, pytorch/pytorch#137259
    ranks(2).run(_views)


def _sizes(lowering, world):
    ctx = iris.iris(1 << 22)
    reduce = iris.spmd(lowering=lowering)(lambda x: iris.all_reduce(x, "tp"))
    for numel in (1, 7, 9, 256, 257, 0) if lowering == "torch" else (9, 257, 0):
        xs = [small_integers((numel,), rank, numel, torch.float16) for rank in range(world)]
        for _ in range(2):
            assert torch.equal(reduce(xs[ctx.cur_rank]), sum(xs))
    empty = torch.empty(1, 0, 2)
    for fn in (
        lambda x: iris.all_gather(x, "tp", dim=0),
        lambda x: iris.reduce_scatter(x, "tp", dim=1),
        lambda x: iris.broadcast(x, "tp"),
        lambda x: iris.ppermute(x, "tp", [(0, 1)]),
        lambda x: iris.all_to_all(x, "tp", split_dim=1, concat_dim=0),
    ):
        assert iris.spmd(lowering=lowering)(fn)(empty).numel() == 0
    product = iris.spmd(lowering=lowering)(lambda x, w: iris.all_reduce(x @ w, "tp"))
    for rows in (8, 0, 8):
        x, w = small_integers((rows, 4), rows), small_integers((4, 3), 2)
        assert torch.equal(product(x, w), world * (x @ w))


@BOTH
def test_sizes_around_tiles_and_nothing_at_all(ranks, lowering):
    # ROCm/rocm-systems#3010, pytorch/pytorch#85234, triton-lang/triton-ascend#984
    ranks(2).run(_sizes, lowering, 2)


def _rows_do_not_matter(lowering, dtype):
    """All of it goes in two steps, the rows in one: of three ranks the order of a sum counts."""
    ctx = iris.iris(1 << 24)
    torch.manual_seed(ctx.cur_rank)
    x, w = torch.randn(100, 1400).to(dtype), torch.randn(4, 5).to(dtype)
    reduce = iris.spmd(lowering=lowering)(lambda x: iris.all_reduce(x, "tp"))
    product = iris.spmd(lowering=lowering)(lambda x, w: iris.all_reduce(x @ w, "tp"))
    whole, eager, products = reduce(x), iris.all_reduce(x), product(x[:, :4], w)
    for k in (1, 90):
        assert torch.equal(reduce(x[:k].clone()), whole[:k])
        assert torch.equal(iris.all_reduce(x[:k].clone()), eager[:k])
        assert torch.equal(product(x[:k, :4], w), products[:k])


@pytest.mark.parametrize(
    ("lowering", "dtype"),
    [
        ("torch", torch.bfloat16),
        ("torch", torch.float32),
        ("triton", torch.bfloat16),
        pytest.param("triton", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_sums_of_some_rows_are_rows_of_the_sum(ranks, lowering, dtype):
    # vllm-project/vllm#57042
    ranks(3).run(_rows_do_not_matter, lowering, dtype)


def _numbers(lowering):
    ctx = iris.iris(1 << 22)
    rank = ctx.cur_rank

    @iris.spmd(lowering=lowering)
    def averages(x):
        return iris.all_reduce(x, "tp", "avg")

    @iris.spmd(lowering=lowering)
    def ones(x, w):
        return iris.all_reduce(x @ w, "tp")

    @iris.spmd(lowering=lowering)
    def scaled(x, w, scale):
        return iris.all_gather(x, "tp") @ w * scale

    @iris.spmd(lowering=lowering)
    def by_rank(x):
        return x * iris.axis_index("tp")

    found = {"avg": [averages(torch.tensor([4 * (rank + 1), 3 + rank])).tolist()] * 3}
    x = torch.ones(2, 1024, dtype=torch.bfloat16)
    found["ones"] = ones(x, x.t().contiguous()).unique().tolist()
    for dtype, most in ((torch.float16, 65500.0), (torch.bfloat16, 65280.0)):
        one = torch.full((1, 1), 1.0, dtype=dtype)
        for scale in (0.5, 1, most):
            assert torch.equal(scaled(one, one, scale), (one * scale).expand(2, 1)), (dtype, scale)
    for dtype in (torch.bfloat16, torch.int32):
        x = torch.arange(3).to(dtype)
        y = by_rank(x)
        assert y.dtype == (x * torch.tensor(rank)).dtype
        assert torch.equal(y, x * rank)
    return found


@BOTH
def test_numbers_and_dtypes(ranks, lowering):
    # InfiniTensor/InfiniCCL#37, jax-ml/jax#732, jax-ml/ml_dtypes#63, triton-lang/triton#6176
    wanted = {"avg": [[6, 3]] * 3, "ones": [2048.0]}
    assert ranks(2).run(_numbers, lowering) == [wanted] * 2


def _bytes():
    ctx = iris.iris(1 << 22)
    gather = iris.spmd(lambda x: iris.all_gather(x, "tp"))
    send = iris.spmd(lambda x: iris.broadcast(x, "tp", src=1))
    total = iris.spmd(lambda x: iris.all_reduce(x, "tp"))
    names = "bool uint8 int64 float8_e4m3fn float8_e5m2 bfloat16"
    for dtype in (getattr(torch, name) for name in names.split()):
        for size in (17, 63, 64):
            parts = [(torch.arange(size) % 7 + r).to(dtype) for r in range(ctx.num_ranks)]
            mine = parts[ctx.cur_rank]
            raw = lambda x: x.view(torch.uint8)  # noqa: E731
            assert torch.equal(raw(gather(mine)), torch.cat([raw(part) for part in parts]))
            assert torch.equal(raw(send(mine)), raw(parts[1]))
            if dtype.is_floating_point or dtype == torch.uint8:
                due = sum(part.float() for part in parts).to(dtype)
                assert torch.equal(raw(total(mine)), raw(due)), dtype


def test_every_dtype_moves_and_narrow_ones_add_up(ranks):
    # pytorch/pytorch#126556, Azure/msccl-executor-nccl#38
    ranks(2).run(_bytes)


def _narrow_products():
    ctx = iris.iris(1 << 22)
    a, b = torch.tensor([[100, -100]], dtype=torch.int8), torch.tensor([[100], [-100]])
    b = b.to(torch.int8)
    wide = iris.spmd(lambda a, b: iris.all_reduce(torch._int_mm(a, b), "tp"))
    output = torch.zeros(1, 1, dtype=torch.int32)
    ctx.ops.matmul_all_reduce(output, a, b)
    return [wide(a, b).item() for _ in range(3)], output.item()


def test_products_of_int8_are_int32(ranks):
    # triton-lang/triton#2296
    assert ranks(2).run(_narrow_products) == [([40000] * 3, 40000)] * 2


def _still_used():
    ctx = iris.iris(1 << 22)

    @iris.spmd(in_specs=P("tp"), out_specs=(P("tp"), P()))
    def gather_and_use(x):
        g = iris.all_gather(x, "tp")
        return F.relu(x) + g[: x.shape[0]], g

    thrice(
        gather_and_use,
        lambda seed, rank: (small_integers((2, 3), rank, seed),),
        lambda given, rank: (
            F.relu(given[rank][0]) + given[0][0],
            torch.cat([x for (x,) in given]),
        ),
    )
    pair = ctx.full((3,), 3.0)
    times = iris.spmd(lambda x, y: iris.all_reduce(x * y, "tp"))
    other = torch.full((3,), 4.0)
    found = [times(pair, other), times(pair, pair), times(other, pair), times(other, other)]
    return [y.unique().tolist() for y in found]


def test_operands_used_again_and_one_symmetric_tensor_twice(ranks):
    # pytorch/pytorch#108811, jax-ml/jax#9635
    assert ranks(2).run(_still_used) == [[[24.0], [18.0], [24.0], [32.0]]] * 2
