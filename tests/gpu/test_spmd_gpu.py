"""Decorated programs on GPU ranks: fused kernels, traced, captured and replayed, against plain
torch.
"""

import random
import time

import pytest
import torch
import torch.nn.functional as F

import iris
from iris import P
from iris.testing import small_integers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def shard(x, dim, index, parts):
    chunk = -(-x.shape[dim] // parts)
    start = min(index * chunk, x.shape[dim])
    return x.narrow(dim, start, max(0, min(chunk, x.shape[dim] - start))).contiguous()


def close(y, expected, dtype):
    """Largest difference over the largest value, within what the dtype allows."""
    if not y.numel():
        return True
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}[dtype]
    return ((y.double() - expected).abs().max() / expected.abs().max()).item() < tolerance


def _mlp(m, k, f, dtype, lowering, calls):
    ctx = iris.iris(1 << 30)
    rank, world = ctx.cur_rank, ctx.num_ranks

    @iris.spmd(
        in_specs=(P("tp", None), P(None, "tp"), P(None, "tp"), P("tp", None), P("tp", None)),
        out_specs=P("tp", None),
        lowering=lowering,
    )
    def mlp(x, gate, up, down, residual):
        g = iris.all_gather(x, "tp", dim=0)
        h = F.silu(g @ gate) * (g @ up)
        return iris.reduce_scatter(h @ down, "tp", dim=0) + residual

    @iris.spmd(in_specs=(P(None, "tp"), P("tp", None), P()), out_specs=P(), lowering=lowering)
    def row(h, w, bias):
        return iris.all_reduce(h @ w.t().contiguous().t(), "tp") + bias

    generator = torch.Generator(ctx.device).manual_seed(5)

    def data(*shape):
        return torch.randn(shape, generator=generator, device=ctx.device).to(dtype)

    gate, up, down, bias = data(k, f), data(k, f), data(f, k), data(k)
    local = [shard(gate, 1, rank, world), shard(up, 1, rank, world), shard(down, 0, rank, world)]
    delays = random.Random(rank)
    for call in range(calls):
        x = data(m, k) / k**0.5
        if call % 3 == 2 and delays.random() < 0.5:
            time.sleep(0.003)
        y = mlp(shard(x, 0, rank, world), *local, shard(x, 0, rank, world))
        z = x.double()
        h = F.silu(z @ gate.double()) * (z @ up.double())
        expected = shard(h @ down.double() + z, 0, rank, world)
        assert close(y, expected, dtype), (call, y, expected)
        hidden = data(m, f) / f**0.5
        y = row(shard(hidden, 1, rank, world), local[2], bias)
        assert close(y, hidden.double() @ down.double() + bias.double(), dtype), call
    torch.cuda.synchronize()
    ctx.watch.check(synchronized=True)
    program = next(iter(mlp._state.programs.values()))
    return program.runner.captured is not None, str(program.choices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("m", "k", "f"), [(256, 128, 512), (7, 64, 96), (1, 33, 5), (1000, 520, 264)]
)
def test_mlp_fused_and_replayed(run, dtype, m, k, f):
    for captured, _ in run(_mlp, 2, m, k, f, dtype, "triton", 8):
        assert captured


@pytest.mark.parametrize("world", [1, 3, 4, 8])
def test_mlp_on_other_worlds(run, world):
    for captured, _ in run(_mlp, world, 200, 128, 384, torch.bfloat16, "triton", 6):
        assert captured


def test_mlp_with_torch_ops(run):
    for captured, _ in run(_mlp, 2, 64, 64, 128, torch.bfloat16, "torch", 6):
        assert captured  # between the meetings of ranks on the host


def _replays(rounds):
    ctx = iris.iris(1 << 28)
    rank, world = ctx.cur_rank, ctx.num_ranks

    @iris.spmd(in_specs=(P("tp", None), P(None, "tp"), P("tp", None)), out_specs=P("tp", None))
    def mlp(x, up, down):
        return iris.reduce_scatter(F.relu(iris.all_gather(x, "tp") @ up) @ down, "tp")

    device = ctx.device
    up = torch.randint(-2, 3, (64, 32), device=device).to(torch.bfloat16)
    down = torch.randint(-2, 3, (32, 64), device=device).to(torch.bfloat16)
    ups = [torch.empty_like(up) for _ in range(world)]
    torch.distributed.all_gather_object(gathered := [None] * world, (up.cpu(), down.cpu()))
    ups, downs = ([pair[i].to(device) for pair in gathered] for i in (0, 1))
    xs = [torch.randint(-2, 3, (16, 64), device=device).to(torch.bfloat16) for _ in range(8)]
    torch.distributed.all_gather_object(all_xs := [None] * world, [x.cpu() for x in xs])
    expected = []
    for i in range(8):
        whole = torch.cat([part[i] for part in all_xs]).to(device)
        total = sum(F.relu(whole @ u).float() @ d.float() for u, d in zip(ups, downs, strict=True))
        expected.append(shard(total, 0, rank, world))
    delays, wrong = random.Random(rank), torch.zeros((), device=device, dtype=torch.int64)
    first = [mlp(x, up, down).clone() for x in xs]
    for i in range(rounds):
        if delays.random() < 0.001:
            torch.cuda._sleep(delays.randrange(2_000_000))
        y = mlp(xs[i % 8], up, down)
        wrong += (y != first[i % 8]).sum()
    torch.cuda.synchronize()
    ctx.watch.check(synchronized=True)
    errors = [
        ((a.float() - b).abs().max() / b.abs().max()).item()
        for a, b in zip(first, expected, strict=True)
    ]
    return int(wrong), max(errors)


@pytest.mark.parametrize("world", [2, 4])
def test_replays_with_fresh_data_and_delays(run, world):
    for wrong, error in run(_replays, world, 20_000):
        assert wrong == 0
        assert error < 1e-2


def _surroundings():
    ctx = iris.iris(1 << 28)
    rank, world, device = ctx.cur_rank, ctx.num_ranks, ctx.device

    @iris.spmd(in_specs=(P("tp", None), P(None, "tp"), P("tp", None)), out_specs=P("tp", None))
    def f(x, up, down):
        return iris.reduce_scatter(iris.all_gather(x, "tp") @ up @ down, "tp")

    @iris.spmd
    def noisy(x):
        return F.dropout(x, 0.5)

    @iris.spmd
    def same(x):
        x.add_(1)
        return x, x * 2

    eye = torch.eye(64, device=device, dtype=torch.float32)
    up, down = shard(eye, 1, rank, world), shard(eye, 0, rank, world)
    problems = []
    for m in [16, 4096, 16, 48, 4096] * 4:  # workspaces of old graphs must not move
        x = torch.rand(m // world, 64, device=device)
        y = f(f(x, up, down), up, down)
        problems += [] if torch.allclose(y, x, rtol=1e-5) else [("feedback", m)]
    side = torch.cuda.Stream()
    x = torch.rand(16 // world, 64, device=device)
    for i in range(20):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if i % 2 else torch.cuda.current_stream()):
            x.fill_(float(i))
            y = f(x, up, down)
        torch.cuda.current_stream().wait_stream(side)
        if not torch.equal(y, torch.full_like(y, float(i))):
            problems.append(("streams", i))
    ones = torch.ones(1000, device=device)
    torch.manual_seed(1)
    a = [noisy(ones) for _ in range(4)]
    torch.manual_seed(1)
    b = [noisy(ones) for _ in range(4)]
    if torch.equal(a[2], a[3]) or not all(torch.equal(p, q) for p, q in zip(a, b, strict=True)):
        problems.append("random")
    for i in range(5):
        x = torch.full((8,), float(i), device=device)
        kept, doubled = same(x)
        if kept is not x or x[0] != i + 1 or doubled[0] != 2 * i + 2:
            problems.append(("in place", i))
    torch.cuda.synchronize()
    return problems


def test_feedback_streams_random_numbers_and_writes(run):
    for problems in run(_surroundings, 2):
        assert problems == []


def _numbers_on_the_cpu():
    ctx = iris.iris(1 << 26)
    gain = torch.tensor(2.0)

    @iris.spmd
    def program(x, w):
        mean = iris.all_reduce(torch.full((), 3.0), "tp", "avg")
        return iris.all_gather(x, "tp") @ w * gain + torch.tensor(0.5), x * mean

    faults = []
    for seed in range(4):
        xs = [small_integers((2, 4), r, seed) for r in range(ctx.num_ranks)]
        w, mine = small_integers((4, 3), 0, seed), xs[ctx.cur_rank]
        gain.fill_(seed + 1)
        y, z = program(mine.to(ctx.device), w.to(ctx.device))
        due = torch.cat(xs) @ w * (seed + 1) + 0.5
        if not torch.equal(y.cpu(), due) or not torch.equal(z.cpu(), 3 * mine):
            faults.append(seed)
    return faults


def test_kernels_take_numbers_that_are_on_the_cpu(run):
    assert run(_numbers_on_the_cpu, 2) == [[], []]
