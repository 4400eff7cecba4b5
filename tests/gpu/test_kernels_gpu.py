"""The kernels compiled: descriptors and pointers, cut tiles, odd shapes, graphs, many launches.

Operands are small integers, so every result is exact.
"""

from functools import partial

import pytest
import torch
import triton.language as tl

import iris
import iris.device.pickling  # epilogues of this file travel to the ranks
from iris.device.target import device_function
from iris.lower.kernels import collectives
from iris.lower.kernels.all_gather_matmul import AllGatherMatmul
from iris.lower.kernels.all_reduce_norm import AllReduceNorm
from iris.lower.kernels.config import GemmConfig
from iris.lower.kernels.host import Turns, rows_of, shard_rows
from iris.lower.kernels.matmul_all_gather import MatmulAllGather
from iris.lower.kernels.matmul_all_reduce import MatmulAllReduce
from iris.lower.kernels.matmul_reduce_scatter import MatmulReduceScatter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(180),
]

KINDS = {
    "gather": AllGatherMatmul,
    "scatter": MatmulReduceScatter,
    "reduce": MatmulAllReduce,
    "product": MatmulAllGather,
}
# (M, N, K, layout, config): whole tiles with left-over ones that are cut, odd sizes that need
# pointers, few rows. Each is a kernel to compile, so most are run on one world only.
WIDE = GemmConfig(stages=3, pieces=2)
EVERYWHERE = [
    (1000, 520, 264, "linear", None),
    (37, 129, 75, "plain", None),
    (3, 64, 512, "linear", None),
]
ON_FOUR = [
    (512, 1536, 1024, "linear", None),
    (512, 1536, 1024, "plain", WIDE),
    (8, 2048, 2048, "plain", None),
    (1, 2048, 2048, "linear", None),
]


def integers(seed, *shape, dtype=torch.bfloat16):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, device="cuda").to(dtype)


def rounded(x, w):
    """The product, by the CPU: loading a kernel of cuBLAS can wait behind a peer's kernel, which
    waits for this rank. And cuBLAS errs where a process may use 58 multiprocessors.
    """
    return (x.cpu().float() @ w.cpu().float()).to(x.dtype).to(x.device)


class Case:
    """One stage with operands that change, and its right results."""

    def __init__(self, ctx, kind, M, N, K, layout, config, **options):
        self.ctx, self.kind, self.layout = ctx, kind, layout
        self.M, self.N, self.K = M, N, K
        rank, world = ctx.cur_rank, ctx.num_ranks
        self.first, self.m = rank * shard_rows(M, world), rows_of(M, world, rank)
        size = {"columns": [N]} if kind == "gather" else {"N": N}
        self.stage = KINDS[kind].create(
            ctx, ctx.world, M=M, K=K, dtype=torch.bfloat16, config=config, **size, **options
        )
        by_rows = kind in ("gather", "product")
        self.x = torch.empty(self.m if by_rows else M, K, device="cuda", dtype=torch.bfloat16)
        w = torch.empty(N, K, device="cuda", dtype=torch.bfloat16)
        self.w = w.T if layout == "linear" else torch.empty(K, N, device="cuda", dtype=w.dtype)
        rows = self.m if kind == "scatter" else M
        self.around = torch.empty(rows + 2, N, device="cuda", dtype=w.dtype)
        self.out = self.around[1:-1]

    def fill(self, step):
        """Put new operands in place; return what the result must be."""
        ranks = range(self.ctx.num_ranks)
        shared = integers(step, self.M, self.K)
        xs = [integers(step + 7 * r, *self.x.shape) for r in ranks]
        if self.kind == "product":
            xs = [integers(step + 7 * r, rows_of(self.M, len(ranks), r), self.K) for r in ranks]
        ws = [integers(step + 50 + r, self.K, self.N) for r in ranks]
        self.around.fill_(7)
        self.w.copy_(ws[self.ctx.cur_rank])
        if self.kind == "gather":
            self.x.copy_(shared[self.first : self.first + self.m])
            return rounded(shared, self.w)
        self.x.copy_(xs[self.ctx.cur_rank])
        parts = [rounded(x, w) for x, w in zip(xs, ws, strict=True)]
        if self.kind == "product":
            return torch.cat(parts)
        total = sum(part.float() for part in parts).to(self.x.dtype)
        return total[self.first :][: self.m] if self.kind == "scatter" else total

    def launch(self, dry=0):
        if self.kind == "gather":
            self.stage(self.x, [self.w], out=[self.out], dry=dry)
        else:
            self.stage(self.x, self.w, out=self.out, dry=dry)

    def check(self, want, step):
        error = (self.out.float() - want.float()).abs().max() if want.numel() else 0
        assert torch.equal(self.out, want), f"{self.kind} step {step}: off by {error}"
        assert bool((self.around[[0, -1]] == 7).all())


def load(ctx, launches):
    """Compile all kernels, shared out among ranks, and load them, before any rank waits in one."""
    for dry in (Turns(ctx.world), 1):
        for launch in launches:
            launch(dry=dry)
        torch.cuda.synchronize()
        ctx.barrier()


def run_case(ctx, case):
    for step in range(3):
        want = case.fill(step)
        case.launch()
        torch.cuda.synchronize()
        ctx.watch.check(synchronized=True)  # a wait that was lost explains what is wrong
        case.check(want, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.launch()
    ctx.barrier()
    for step in range(3, 13):
        want = case.fill(step)
        if step % 3 == ctx.cur_rank:
            torch.cuda._sleep(1_000_000)
        graph.replay()
        case.check(want, step)
    ctx.watch.check()


def stage_cases(kind, shapes):
    ctx = iris.iris(1 << 28)
    cases = []
    for M, N, K, layout, config in shapes:
        options = {"one_shot": layout == "plain" or M < 3} if kind == "reduce" else {}
        cases.append(Case(ctx, kind, M, N, K, layout, config, **options))
    load(ctx, [case.launch for case in cases])
    for case in cases:
        run_case(ctx, case)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_stages(ranks, kind, world):
    shapes = EVERYWHERE + (ON_FOUR if world == 4 else [])
    ranks(world).run(stage_cases, kind, shapes, timeout=120)


def many_launches(kind):
    """200 launches without the host: each sees the operands of its own turn."""
    ctx = iris.iris(1 << 28)
    case = Case(ctx, kind, 256, 384, 512, "linear", None)
    wants, outs = [], []
    case.fill(0)
    load(ctx, [case.launch])
    for step in range(200):
        wants.append(case.fill(step % 10))
        if step % 17 == 5 * ctx.cur_rank:
            torch.cuda._sleep(200_000)
        case.launch()
        outs.append(case.out.clone())
    for step, (out, want) in enumerate(zip(outs, wants, strict=True)):
        assert torch.equal(out, want), step
    ctx.watch.check()


@pytest.mark.parametrize("kind", KINDS)
def test_many_launches(ranks, kind):
    ranks(4).run(many_launches, kind)


def collective_trials(ctx, numel):
    """(name, stage, operand, right result) of plain collectives of ``numel`` elements a rank."""
    group, world, rank = ctx.world, ctx.num_ranks, ctx.cur_rank
    xs = [integers(r, numel) for r in range(world)]
    x, total = xs[rank], sum(part.float() for part in xs).to(torch.bfloat16)
    shares = [rows_of(numel, world, r) for r in range(world)]
    begin = rank * shard_rows(numel, world)
    for two_shot in (False, True):
        stage = collectives.all_reduce(ctx, group, [numel], "sum", x.dtype, two_shot=two_shot)
        yield "two-shot" if two_shot else "one-shot", stage, x, total
    stage = collectives.all_gather(ctx, group, [numel], [numel] * world, 0, x.dtype)
    yield "gather", stage, x, torch.cat(xs)
    stage = collectives.reduce_scatter(ctx, group, [numel], shares, 0, "sum", x.dtype)
    yield "scatter", stage, x, total[begin : begin + shares[rank]]


def collective_case():
    ctx = iris.iris(1 << 28)
    trials = [trial for numel in (1, 7, 4096, 1 << 20) for trial in collective_trials(ctx, numel)]
    outs = [torch.full_like(want, 7) for _, _, _, want in trials]
    load(
        ctx,
        [partial(stage, x, out=out) for (_, stage, x, _), out in zip(trials, outs, strict=True)],
    )
    for (name, stage, x, want), out in zip(trials, outs, strict=True):
        for _ in range(3):
            out.fill_(7)
            stage(x, out=out)
            assert torch.equal(out, want), (name, x.numel())
    ctx.watch.check()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_collectives(ranks, world):
    ranks(world).run(collective_case)


@device_function
def plus_residual(tiles, rows, columns, M, N, args):
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    return tiles[0] + tl.load(args[0] + at, mask=mask, other=0).to(tl.float32)


def norm_case():
    ctx = iris.iris(1 << 26)
    cases = []
    for M, N in ((1, 4096), (64, 1000), (300, 512)):
        xs = [integers(r, M, N) for r in range(ctx.num_ranks)]
        stage = AllReduceNorm.create(
            ctx, ctx.world, M=M, N=N, dtype=xs[0].dtype, after=plus_residual
        )
        out, summed = torch.empty_like(xs[0]), torch.empty_like(xs[0])
        operands = (xs[ctx.cur_rank], integers(9, N))
        cases.append((stage, operands, integers(8, M, N), xs, out, summed))
    load(
        ctx,
        [
            partial(stage, *operands, out=out, summed=summed, args=(residual,))
            for stage, operands, residual, _, out, summed in cases
        ],
    )
    for stage, operands, residual, xs, out, summed in cases:
        stage(*operands, out=out, summed=summed, args=(residual,))
        _, weight = operands
        want = sum(part.float() for part in xs).to(out.dtype) + residual
        assert torch.equal(summed, want)
        normal = torch.nn.functional.rms_norm(want.float(), weight.shape, weight.float(), 1e-6)
        torch.testing.assert_close(out, normal.to(out.dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("world", [2, 4])
def test_all_reduce_norm(ranks, world):
    ranks(world).run(norm_case)
