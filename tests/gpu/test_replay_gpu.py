"""Replays on GPU ranks: what is captured and what is not, memory, streams, soaks and faults.

``SOAK_REPLAYS`` is how many replays of each stage the slow test makes.
"""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import iris
from iris import P
from iris.bench.mps import share_of
from iris.lower.replay import Capture, Pieces
from iris.testing import small_integers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def launch(fn, world, *args, limit, **env):
    """Run on new processes, each with its share of the GPU; waits last ``limit`` seconds."""
    env |= {"IRIS_TIMEOUT": str(limit)}
    if world > torch.cuda.device_count():
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(share_of(world))
    return iris.launch(fn, world, *args, timeout=100, env=env)


def runner(function):
    """What runs the program that was traced last."""
    return [*function._state.programs.values()][-1].runner


# Stages: the specs of arguments and result, the shapes of x and of weights, and the function.
W = P(None, "tp"), P("tp", None)
STAGES = {
    "mlp": (
        (P("tp"), *W),
        P("tp"),
        lambda x, w, v: iris.reduce_scatter(F.relu(iris.all_gather(x, "tp") @ w) @ v, "tp"),
    ),
    "all_gather_matmul": (
        (P("tp"), *W),
        P(None, "tp"),
        lambda x, w, v: F.relu(iris.all_gather(x, "tp") @ w),
    ),
    "gathered columns": (
        (P(None, "tp"), P(), P()),
        P(),
        lambda x, w, v: iris.all_gather(x, "tp", dim=1) @ w,
    ),
    "matmul_reduce_scatter": (
        (P(None, "tp"), P("tp"), P()),
        P("tp"),
        lambda x, w, v: iris.reduce_scatter(x @ w, "tp"),
    ),
    "matmul_all_reduce": (
        (P(None, "tp"), P("tp"), P()),
        P(),
        lambda x, w, v: iris.all_reduce(x @ w, "tp") + 1,
    ),
    "matmul_all_reduce of a row": (  # flashinfer-ai/flashinfer#3053
        (P(None, "tp"), P("tp"), P()),
        P(),
        lambda x, w, v: iris.all_reduce(x[:1] @ w, "tp"),
    ),
    "matmul_all_gather": (
        (P("tp"), P(), P()),
        P(),
        lambda x, w, v: iris.all_gather(F.relu(x @ w), "tp"),
    ),
    "all_gather": ((P("tp"), P(), P()), P(), lambda x, w, v: iris.all_gather(x, "tp")),
    "all_to_all": (
        (P("tp"), P(), P()),
        P(None, "tp"),
        lambda x, w, v: iris.all_to_all(x, "tp", split_dim=1, concat_dim=0),
    ),
}  # fmt: skip


def local(x, spec, rank, world):
    """This rank's shard, where sizes divide."""
    for dim, axes in enumerate(spec.dims):
        if axes:
            x = x.tensor_split(world, dim)[rank]
    return x.contiguous()


def _soak(stage, rounds):
    ctx = iris.iris(1 << 28)
    rank, world, device = ctx.cur_rank, ctx.num_ranks, ctx.device
    in_specs, out_spec, fn = STAGES[stage]
    program = iris.spmd(in_specs=in_specs, out_specs=out_spec, name="soak")(fn)
    m, k, f = 16 * world, 64, 32 * world

    def data(seed, *shape):
        return small_integers(shape, seed=seed, dtype=torch.bfloat16).to(device)

    w, v = data(90, k, f), data(91, f, k)
    wholes = [data(seed, m, k) for seed in range(8)]
    xs = [local(x, in_specs[0], rank, world) for x in wholes]
    weights = local(w, in_specs[1], rank, world), local(v, in_specs[2], rank, world)
    first = [program(x, *weights).clone() for x in xs]
    for x, y in zip(wholes, first, strict=True):
        expected = local(
            _reference(stage, x.double(), w.double(), v.double()), out_spec, rank, world
        )
        error = (y.double() - expected).abs().max() / expected.abs().max()
        assert error.item() < 2e-2, (stage, error)
    delays, wrong = random.Random(rank), torch.zeros((), device=device, dtype=torch.int64)
    for i in range(rounds):
        if delays.random() < 0.001:
            torch.cuda._sleep(delays.randrange(2_000_000))
        wrong += (program(xs[i % 8], *weights) != first[i % 8]).sum()
    iris.synchronize()
    assert isinstance(runner(program).captured, Capture)
    return int(wrong)


def _reference(stage, x, w, v):
    gathered = F.relu(x @ w)
    return {
        "mlp": lambda: gathered @ v,
        "all_gather_matmul": lambda: gathered,
        "matmul_all_gather": lambda: gathered,
        "matmul_all_reduce": lambda: x @ w + 1,
        "matmul_all_reduce of a row": lambda: x[:1] @ w,
        "all_gather": lambda: x,
        "all_to_all": lambda: x,
    }.get(stage, lambda: x @ w)()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_replays_are_the_same_bits(run, stage, world):
    # vllm-project/vllm#46913, vllm-project/vllm#30650, ROCm/iris#226
    assert run(_soak, world, stage, 500) == [0] * world


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_a_hundred_thousand_replays_are_the_same_bits(run, stage, world):
    rounds = int(os.environ.get("SOAK_REPLAYS", "100000"))
    assert run(_soak, world, stage, rounds) == [0] * world


def _kernels():
    ctx = iris.iris(1 << 26)
    rank, world, device = ctx.cur_rank, ctx.num_ranks, ctx.device
    in_specs, out_spec, fn = STAGES["mlp"]
    program = iris.spmd(in_specs=in_specs, out_specs=out_spec, name="mlp", outputs="reuse")(fn)
    shapes = (16 * world, 64), (64, 32 * world), (32 * world, 64)
    args = [
        local(torch.ones(shape, device=device, dtype=torch.bfloat16), spec, rank, world)
        for shape, spec in zip(shapes, in_specs, strict=True)
    ]
    for _ in range(3):
        program(*args)
    iris.synchronize()
    meetings = ctx.world.epoch
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            program(*args)
        torch.cuda.synchronize()
    assert ctx.world.epoch == meetings
    return [event.name for event in profile.events() if "CUDA" in str(event.device_type)]


def test_a_two_stage_mlp_is_two_kernels_without_meetings_or_zeroing(run):
    for names in run(_kernels, 2):
        ours = [name for name in names if name.endswith("_kernel")]
        assert len(ours) == 10, names
        assert not [name for name in names if "emset" in name or "fill" in name.lower()]


GAIN = torch.tensor(2.0)  # on the CPU: a graph would keep its first value


@torch.library.custom_op("iris_tests::halve_while_large", mutates_args=())
def halve_while_large(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    while x.abs().max().item() > 8:  # waits for the GPU
        x /= 2
    return x


@halve_while_large.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _host_steps(outputs):
    ctx = iris.iris(1 << 26)
    rank, world, device = ctx.cur_rank, ctx.num_ranks, ctx.device

    @iris.spmd(in_specs=(P("tp"), P()), outputs=outputs)
    def program(x, bias):
        y = iris.all_gather(x * 3, "tp") + bias
        z = torch.ops.iris_tests.halve_while_large(y)
        z = F.relu(z).masked_fill(z > 4, 0.0)
        return z * GAIN, (y.cpu() + 1).to(device).sum(0)

    bias = torch.ones(4, device=device)
    problems = []
    for seed in range(8):
        xs = [small_integers((3, 4), r, seed) for r in range(world)]
        bias.fill_(seed % 3)  # in place: seen
        GAIN.fill_(seed + 1)
        z, total = program(xs[rank].to(device), bias)
        whole = torch.cat(xs) * 3 + seed % 3
        halved = whole.clone()
        while halved.abs().max() > 8:
            halved /= 2
        halved = F.relu(halved).masked_fill(halved > 4, 0.0)
        if not torch.equal(z.cpu(), halved * (seed + 1)) or not torch.equal(
            total.cpu(), (whole + 1).sum(0)
        ):
            problems.append(seed)
    captured = runner(program).captured
    graphs = sum(isinstance(call, Capture) for _, call in captured.calls)
    return (
        problems,
        isinstance(captured, Pieces),
        graphs,
        str(program.explain(xs[rank].to(device), bias)),
    )


@pytest.mark.parametrize("outputs", ["fresh", "reuse"])
def test_steps_that_cannot_be_captured_split_the_program(outputs):
    for problems, split, graphs, text in launch(_host_steps, 2, outputs, limit=20):
        assert problems == []
        assert split
        assert graphs >= 2
        assert "outside the CUDA graph" in text
        assert "waits for the GPU on the host" in text
        assert "halve_while_large" in text
        assert "reads or makes a tensor on the CPU" in text


def _sizes():
    from iris.spmd import decorator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decorator, "CACHED_PROGRAMS", 3)
        return _changing_sizes()


def _changing_sizes():
    ctx = iris.iris(1 << 26)
    rank, world, device = ctx.cur_rank, ctx.num_ranks, ctx.device

    @iris.spmd(in_specs=(P("tp"), P()), out_specs=P())
    def program(x, w):
        return iris.all_gather(x @ w, "tp")

    w = small_integers((64, 256), seed=99).to(device)
    held, wrong = [], 0
    for _ in range(4):
        for m in (16, 4096, 48, 512, 1024, 2048, 16, 4096):
            for seed in range(3):
                x = small_integers((m, 64), seed=seed).to(device)
                y = program(local(x, P("tp"), rank, world), w)
                wrong += not torch.equal(y, x @ w)
        del x, y
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    assert len(program._state.programs) == 3
    return wrong, held


def test_memory_of_dropped_graphs_comes_back(run):
    for wrong, held in run(_sizes, 2):
        assert wrong == 0
        assert held[-1] <= held[1], held


def _streams():
    ctx = iris.iris(1 << 26)
    rank, device = ctx.cur_rank, ctx.device

    @iris.spmd(in_specs=P("tp"), out_specs=P())
    def gather(x):
        return iris.all_gather(x, "tp")

    @iris.spmd(in_specs=(P(None, "tp"), P("tp")), out_specs=P())
    def product(x, w):
        return iris.all_reduce(x @ w, "tp")

    streams = [torch.cuda.Stream() for _ in range(3)]
    w = torch.eye(64, device=device).tensor_split(ctx.num_ranks)[rank].contiguous()
    draw, wrong = random.Random(3), 0  # the same on all ranks, as the calls are
    delays = random.Random(rank)
    for i in range(200):
        stream = streams[draw.randrange(3)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if delays.random() < 0.05:
                torch.cuda._sleep(1_000_000)
            x = torch.full((8, 64 // ctx.num_ranks), float(i), device=device)
            if draw.random() < 0.5:
                y = product(gather(x)[:8].contiguous(), w)
            else:
                y = gather(product(x, w)[:8, :4].contiguous())
        torch.cuda.current_stream().wait_stream(stream)
        x.record_stream(torch.cuda.current_stream())
        wrong += int((y != i).any())
    iris.synchronize()
    return wrong


@pytest.mark.parametrize("world", [2, 4])
def test_programs_interleaved_on_several_streams(run, world):
    assert run(_streams, world) == [0] * world


def _writes(outputs):
    ctx = iris.iris(1 << 26)
    rank, world, device = ctx.cur_rank, ctx.num_ranks, ctx.device

    @iris.spmd(outputs=outputs)
    def step(cache, x, place):
        cache.index_copy_(0, place, x)
        x.mul_(2)
        return iris.all_gather(cache.sum(0, keepdim=True), "tp"), cache[:1]

    cache, problems = torch.zeros(8, 4, device=device), []
    mirrors = [torch.zeros(8, 4) for _ in range(world)]
    place = torch.zeros(1, dtype=torch.int64, device=device)
    held = []
    for i in range(24):
        if i == 12:
            cache = cache.clone()  # elsewhere from now on
        xs = [torch.full((1, 4), float(10 * i + r)) for r in range(world)]
        x = xs[rank].to(device, copy=True)
        held.append(x)  # so that each has an address of its own
        place.fill_(i % 8)
        total, first = step(cache, x, place)
        for mirror, own in zip(mirrors, xs, strict=True):
            mirror[i % 8] = own
        expected = torch.stack([mirror.sum(0) for mirror in mirrors])
        right = torch.equal(total.cpu(), expected) and torch.equal(first.cpu(), mirrors[rank][:1])
        right &= torch.equal(cache.cpu(), mirrors[rank]) and torch.equal(x.cpu(), 2 * xs[rank])
        problems += [] if right else [i]
    return problems


@pytest.mark.parametrize("outputs", ["fresh", "reuse"])
def test_writes_to_arguments_are_part_of_the_graph(run, outputs):
    assert run(_writes, 2, outputs) == [[], []]


def _own_graph():
    ctx = iris.iris(1 << 26)
    rank, world, device = ctx.cur_rank, ctx.num_ranks, ctx.device

    @iris.spmd(in_specs=P("tp"), out_specs=P())
    def gather(x):
        return iris.all_gather(x * 2, "tp")

    x = torch.zeros(4, 8, device=device)
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(iris.UnsupportedError, match="call it once before the capture")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        gather(x[:2])
    for _ in range(3):
        gather(x)
    torch.cuda.synchronize()
    ctx.barrier()
    with torch.cuda.graph(graph):
        y = gather(x) + 1
    wrong = 0
    for i in range(20):
        x.fill_(i + rank)
        graph.replay()
        z = gather(x)
        for r in range(world):
            wrong += int((y[4 * r : 4 * r + 4] != 2 * (i + r) + 1).any())
            wrong += int((z[4 * r : 4 * r + 4] != 2 * (i + r)).any())
    iris.synchronize()
    return wrong


def test_a_graph_of_the_caller_may_hold_a_program(run):
    assert run(_own_graph, 2) == [0, 0]


def _killed(f, x, last):
    for i in range(1_000_000):
        f(x)
        if last and i == 50:
            os.kill(os.getpid(), signal.SIGKILL)


MISMATCHES = ("another program", "another shape", "raised between")


def _fault(kind, folder):
    """What this rank raised, in a file: a rank that dies ends the others soon after."""
    ctx = iris.iris(1 << 26)
    rank, device = ctx.cur_rank, ctx.device

    @iris.spmd(name="f")
    def f(x):
        return iris.all_gather(x, "tp")

    @iris.spmd(name="g")
    def g(x):
        return iris.all_gather(2 * x, "tp")

    x, y = torch.ones(4, 4, device=device), torch.ones(8, 4, device=device)
    for _ in range(4):
        f(x), g(x), f(y)
    iris.synchronize()
    ctx.barrier()
    last = rank == ctx.num_ranks - 1

    calls = {
        "killed": lambda: _killed(f, x, last),
        "skips a call": lambda: time.sleep(15) if last else f(x),
        "another program": lambda: (g if last else f)(x),
        "another shape": lambda: f(y if last else x),
        "raised between": lambda: g(x) if last else (f(x), g(x)),  # the last is one call ahead
    }
    started, text = time.monotonic(), "nothing was raised"
    try:
        calls[kind]()
        iris.synchronize()
    except iris.IrisError as error:
        text = f"{type(error).__name__}: {error}"
        if kind in MISMATCHES:  # all ranks are here
            ctx.reset()
            again = [g(x) for _ in range(3)]
            assert torch.equal(torch.stack(again), torch.full((3, 12, 4), 2.0, device=device))
    seconds = time.monotonic() - started
    if not (last and kind == "skips a call"):
        Path(folder, f"rank{rank}").write_text(f"{seconds:.1f}\n{text}")
        time.sleep(2)  # until the others have noticed too


FAULTS = {
    "killed": (r"PeerError: rank 2 \(pid \d+\) died", 2),
    "skips a call": (r"TimeoutError: .*waited 4 s for rank 2", 2),
    "another program": (r"CollectiveMismatchError: .*rank 0: program f .*rank 2: program g ", 3),
    "another shape": (
        r"CollectiveMismatchError: .*f32\[4, 4\].*rank 2: program f .*f32\[8, 4\]",
        3,
    ),
    "raised between": (r"CollectiveMismatchError: .*rank 0: program f .*rank 2: program g ", 3),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_an_error_on_every_survivor(kind, tmp_path):
    text, survivors = FAULTS[kind]
    if kind == "killed":  # without MPS, whose server a killed client can take along
        alone = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "none")}
        with pytest.raises(iris.LaunchError, match="killed by SIGKILL"):
            launch(_fault, 3, kind, str(tmp_path), limit=4, **alone)
    else:
        launch(_fault, 3, kind, str(tmp_path), limit=4)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"rank{rank}" for rank in range(survivors)]
    for file in files:
        seconds, found = file.read_text().split("\n", 1)
        assert re.search(text, found, re.DOTALL), found
        assert float(seconds) < 12
