"""More than 2^31 elements, more than 4 GiB, more than 65535 tiles."""

import pytest
import torch

import iris
from iris.lower.kernels.config import GemmConfig

GIB = 1 << 30

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(240),
]


@pytest.fixture(autouse=True)
def _room():
    if torch.cuda.mem_get_info()[0] < 70 * GIB:
        pytest.skip("needs 70 GiB of GPU memory")


def integers(seed, *shape):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, device="cuda").to(torch.bfloat16)


def rows_around(total, shard):
    """Rows at both ends, beside the middle shard's edge, and where offsets pass 2^31."""
    found = [0, 1, shard - 1, shard, total // 3, total - 2, total - 1]
    return torch.tensor(sorted({row for row in found if 0 <= row < total}), device="cuda")


def _gathered_product():
    ctx = iris.iris(10 * GIB)
    m, K, N = 65600, 16, 16384
    xs = [integers(r, m, K) for r in range(2)]
    w = integers(9, K, N)
    rows = rows_around(2 * m, m)
    want = torch.cat(xs)[rows] @ w
    for _ in range(3):
        out = ctx.ops.matmul_all_gather(None, xs[ctx.cur_rank], w, config="fused")
        assert out.numel() > 2**31
        assert torch.equal(out[rows], want)


def test_products_of_more_than_2_31_elements(ranks):
    # triton-lang/triton#6748
    ranks(2).run(_gathered_product, timeout=200)


def _gathered():
    ctx = iris.iris(6 * GIB)
    xs = [integers(r, 131073, 1).expand(131073, 8192) for r in range(2)]
    out = torch.empty(2 * 131073, 8192, device="cuda", dtype=torch.bfloat16)
    step = torch.arange(8192, device="cuda", dtype=torch.int32).remainder(7).to(torch.bfloat16)
    mine = xs[ctx.cur_rank] + step
    rows = rows_around(2 * 131073, 131073)
    want = torch.cat([x[:, :1] for x in xs])[rows] + step
    for _ in range(3):
        out.fill_(7)
        ctx.ccl.all_gather(out, mine)
        assert out.numel() > 2**31
        assert torch.equal(out[rows], want)


def test_gathers_of_more_than_2_31_elements(ranks):
    # ROCm/iris#532, facebookresearch/maskrcnn-benchmark#796
    ranks(2).run(_gathered, timeout=200)


def _tiles():
    ctx = iris.iris(2 * GIB)
    M, K, N = 2**21 + 1, 16, 16
    config = iris.StageConfig("fused", GemmConfig(16, 16, 16, 1, 2, pieces=1, copy=512))
    xs, ws = (
        [integers(s + r, *shape) for r in range(2)] for s, shape in ((0, (M, K)), (5, (K, N)))
    )
    rows = rows_around(M, -(-M // 2))
    parts = [x[rows] @ w for x, w in zip(xs, ws, strict=True)]
    want = sum(part.float() for part in parts).to(torch.bfloat16)
    for _ in range(3):
        out = ctx.ops.matmul_all_reduce(None, xs[ctx.cur_rank], ws[ctx.cur_rank], config=config)
        assert torch.equal(out[rows], want)


def test_more_tiles_than_a_grid_axis_has(ranks):
    # triton-lang/triton#3299
    ranks(2).run(_tiles, timeout=200)


def _sum(numel):
    ctx = iris.iris(GIB)

    @iris.spmd
    def total(x):
        return iris.all_reduce(x.sum(dtype=torch.float64), "ranks")

    x = torch.ones(numel, device="cuda", dtype=torch.float16)
    for call in range(4):  # traced, captured, replayed
        x[-1] = call + ctx.cur_rank
        assert total(x).item() == 2 * (numel - 1) + 2 * call + 1


@pytest.mark.parametrize("numel", [2**31 - 1, 2**31])
def test_sums_of_2_31_elements(ranks, numel):
    # ml-explore/mlx#3602
    ranks(2).run(_sum, numel, timeout=200)
