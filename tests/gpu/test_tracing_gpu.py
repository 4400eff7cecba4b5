"""Tracing where ranks are on GPUs: the tests of CPU ranks again, clocks, replays, names."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch

import iris
from iris import P
from iris.bench.timeline import measure
from iris.runtime.timeline import Timeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(120),
]

FILE = Path(__file__).parents[1] / "ranks" / "test_tracing.py"
spec = importlib.util.spec_from_file_location("on_gpu.test_tracing", FILE)
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
globals().update({n: test for n, test in vars(module).items() if n.startswith("test_")})
del globals()[
    "test_a_clock_is_read_within_its_uncertainty"
]  # runs a kernel on a thread of the host


def mlp(x, w_up, w_down):
    h = iris.all_gather(x, "tp", dim=0) @ w_up
    return iris.reduce_scatter(h @ w_down, "tp", dim=0)


def program():
    return iris.spmd(in_specs=(P("tp"), P(None, "tp"), P("tp")), out_specs=P("tp"))(mlp)


def operands(ctx, step=0):
    generator = torch.Generator("cuda").manual_seed(10 * step + ctx.cur_rank)
    sizes = (256, 512), (512, 512), (512, 512)
    return [
        torch.randint(-2, 3, size, generator=generator, device="cuda").to(torch.bfloat16)
        for size in sizes
    ]


def replays():
    """Off, on, off: results stay the same; replays record; times lie within the host's."""
    ctx = iris.iris(1 << 26)
    f, args = program(), operands(ctx)
    want = [f(*args).clone() for _ in range(3)][-1]
    ctx.tracing.enable()
    for _ in range(3):
        assert torch.equal(f(*args), want)
    ctx.barrier()
    ctx.tracing.reset()
    ctx.barrier()
    started = time.perf_counter_ns()
    for step in range(4):
        if step == 2 and ctx.cur_rank == 0:
            time.sleep(0.02)
        assert torch.equal(f(*args), want)
    torch.cuda.synchronize()
    ended = time.perf_counter_ns()
    timeline = ctx.tracing.timeline()
    ctx.tracing.disable()
    for _ in range(3):
        assert torch.equal(f(*args), want)
    assert len(ctx.tracing.timeline().events) == len(timeline.events)
    return timeline, started, ended


def test_replays_record_themselves(ranks):
    answers = ranks(2).run(replays)
    timeline = answers[0][0]
    assert timeline.about["clock"].startswith("GPU clocks")
    for rank, (_, started, ended) in enumerate(answers):
        about = timeline.about["ranks"][rank]
        slack = 2000 * about["uncertainty_us"] + 2000
        assert about["dropped"] == 0
        assert about["uncertainty_us"] < 100
        events = [event for event in timeline.events if event.rank == rank]
        assert started - slack < min(event.start for event in events)
        assert max(event.end for event in events) < ended + slack
        assert {"push", "wait"} <= {event.kind for event in events}
        machine = torch.cuda.get_device_properties(0).multi_processor_count
        sms = {int(track.split()[1]) for r, track in timeline.tracks() if r == rank}
        assert 1 < len(sms) <= machine
        assert max(sms) < machine
        # Nobody sums before the slowest rank's part is there: it began 20 ms late once.
        waits = [e.end - e.start for e in events if e.kind == "wait"]
        assert rank == 0 or max(waits) > 10e6
        assert all(e.end >= e.start for e in events)


def profiled(path):
    ctx = iris.iris(1 << 26)
    f, args = program(), operands(ctx)
    with iris.profile() as first:
        f(*args)
        f(*args)
    for _ in range(2):
        f(*args)
    with iris.profile(path) as timeline:
        f(*args)
        f(*args)
        torch.cuda.synchronize()
    plan = f.trace(*args).lower().compile().as_text()
    return first, timeline, plan


def test_profile_names_kernels_as_the_graph_does(ranks, tmp_path):
    first, timeline, plan = ranks(2).run(profiled, tmp_path / "trace.json")[0]
    for rank in range(2):
        steps = [name.partition(" ")[0] for name in first.names(rank)]
        assert {"trace", "plan", "load", "capture", "call", "wait"} <= set(steps)
        assert [n for n in timeline.names(rank) if not n.startswith("wait")] == ["call mlp"] * 2
        kernels = timeline.names(rank, "kernels")
        steps = [name for name in kernels if " %" in name]
        assert len(steps) == 4, kernels
        assert steps[:2] == steps[2:]
        assert all(f"{name.replace(' %', '_')}(" in plan for name in steps)
    assert len(Timeline.load(tmp_path / "trace.json").events) == len(timeline.events)


@pytest.mark.parametrize("stage", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_the_command_measures_a_stage(ranks, stage):
    timeline = ranks(2).run(measure, stage, (512, 1024, 2048))[0]
    times = timeline.about["times_us"]
    assert set(times) == {"gemm", "iris", "iris recorded"}
    assert min(times.values()) > 1
    tiles = [event for event in timeline.events if event.kind == "tile"]
    assert {event.rank for event in tiles} == {0, 1}
