"""``iris.profile``: host steps, waits and kernels of all ranks in a trace that viewers can show."""

import io
import json
import re
import sys
from itertools import groupby

import pytest
import torch
from hypothesis import given, strategies as st
from rich.console import Console

import iris
from iris import P
from iris.bench.timeline import measure, table
from iris.runtime.timeline import Event, Timeline, lanes
from iris.spmd.profiling import named

pytestmark = pytest.mark.ranks


def check_trace(path):
    """What viewers of the Chrome trace format ask for; the spans of every thread nest."""
    trace = json.loads(path.read_text())
    rows = trace["traceEvents"]
    spans = [row for row in rows if row["ph"] == "X"]
    assert {row["ph"] for row in rows} == {"M", "X"}
    for row in spans:
        assert {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"} == set(row)
        assert row["ts"] >= 0 <= row["dur"]
    named_threads = {(row["pid"], row["tid"]) for row in rows if row["name"] == "thread_name"}
    assert named_threads == {(row["pid"], row["tid"]) for row in spans}
    thread = lambda row: (row["pid"], row["tid"])  # noqa: E731
    ordered = sorted(spans, key=lambda row: (*thread(row), row["ts"], -row["dur"]))
    for _, group in groupby(ordered, thread):
        open_until = []
        for row in group:
            start, end = round(row["ts"] * 1e3), round((row["ts"] + row["dur"]) * 1e3)
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{row} is cut by the span around it"
            open_until.append(end)
    return trace


def matmul(x, w):
    return iris.all_gather(x, "tp", dim=0) @ w


SPECS = {"in_specs": (P("tp"), P(None, "tp")), "out_specs": P(None, "tp")}


def profiled(path):
    ctx = iris.iris(1 << 20)
    f = iris.spmd(**SPECS, name="f")(matmul)
    x, w = torch.ones(4, 4), torch.ones(4, 4)
    with iris.profile(path) as first:
        f(x, w)
    timelines = [first]

    @iris.profile()
    def step():
        return f(x, w)

    assert torch.equal(step(), torch.full((8, 4), 4.0))
    with pytest.raises(ZeroDivisionError):
        iris.profile()(lambda: f(x, w)[0, int(1 / 0)])()
    assert sys.gettrace() is None
    with iris.profile() as again:
        f(x, w)
    return [*timelines, again], ctx.cur_rank


def test_host_steps_and_waits(ranks, tmp_path):
    path = tmp_path / "trace.json"
    (answer, _), (other, _) = ranks(2).run(profiled, path)
    assert answer == other
    first, again = answer
    for rank in range(2):
        names = first.names(rank)
        assert [name for name in names if not name.startswith("wait")] == [
            "trace f", "plan f", "all_gather %0", "mm %1", "call f"
        ]  # fmt: skip
        assert any(name.startswith("wait in trace of f") for name in names)
        wait, *steps = again.names(rank)
        assert wait.startswith("wait in all_gather #0 at test_profile.py")
        assert steps == ["all_gather %0", "mm %1", "call f"]
    lines = {event.args["line"] for event in first.events if event.name == "mm %1"}
    assert {line.partition(":")[0] for line in lines} == {"test_profile.py"}
    trace = check_trace(path)
    titles = [row["args"]["name"] for row in trace["traceEvents"] if row["name"] == "process_name"]
    assert titles == ["rank 0", "rank 1"]
    loaded = Timeline.load(path)
    assert [e.name for e in loaded.events] == [e.name for e in first.events]
    assert repr(loaded).startswith(f"Timeline({len(first.events)} events of 2 ranks in ")
    assert loaded._repr_png_().startswith(b"\x89PNG")


def inside(path):
    iris.iris(1 << 20)
    f = iris.spmd(**SPECS, lowering="triton")(matmul)
    x, w = torch.ones(16, 16), torch.ones(16, 16)
    f(x, w)
    with iris.profile(path, tracing=True) as timeline:
        f(x, w)
    assert not iris.current().tracing.enabled
    return timeline


def test_what_kernels_do_inside(ranks, tmp_path):
    path = tmp_path / "trace.json"
    timeline = ranks(2).run(inside, path)[0]
    check_trace(path)
    for rank in range(2):
        (stage,) = [
            e for e in timeline.events if e.rank == rank and e.name.startswith("all_gather")
        ]
        assert stage.name == "all_gather_matmul %1"
        kernel = [e for e in timeline.events if e.rank == rank and e.track != "host"]
        assert {event.kind for event in kernel} == {"push", "wait", "tile", "emit"}
        assert all(stage.start <= e.start <= e.end <= stage.end for e in kernel)
    assert [about["dropped"] for about in timeline.about["ranks"]] == [0, 0]
    assert timeline.busy("tile").keys() == {0, 1}
    assert min(timeline.busy("tile").values()) > 0


@pytest.mark.parametrize("stage", ["all_gather_matmul", "matmul_all_reduce"])
def test_the_command_shows_a_stage(ranks, stage, tmp_path):
    timeline = ranks(2).run(measure, stage, (32, 32, 64))[0]
    path = tmp_path / "trace.json"
    timeline.save(path)
    check_trace(path)
    kinds = {"wait", "tile", "emit"} | ({"push"} if stage == "all_gather_matmul" else {"sum"})
    assert kinds <= {event.kind for event in timeline.events}
    console = Console(file=io.StringIO(), width=120)
    console.print(table(timeline))
    text = console.file.getvalue()
    assert f"{stage} (32, 32, 64), µs a launch" in text
    assert len(re.findall(r"│ +[01] │ +\d+\.\d │", text)) == 2
    (axes,) = timeline.plot().axes
    assert {label.get_text() for label in axes.get_legend().get_texts()} >= kinds


def test_a_process_without_ranks():
    with iris.profile() as timeline:
        pass
    assert timeline.events == []


def kernel(name, start=0):
    return Event(0, name, start, start + 1, "kernels")


def test_kernels_get_the_names_of_their_steps():
    found = [
        kernel("all_gather_matmul_kernel"),  # only loaded
        kernel("nvjet_gemm"),
        kernel("users_kernel"),
        kernel("all_gather_matmul_kernel"),
        kernel("exchange_kernel"),
    ]
    steps = ["all_gather_matmul %2", "reduce_scatter %5"]
    names = [event.name for event in named(found, steps)]
    assert names == ["all_gather_matmul_kernel", "nvjet_gemm", "users_kernel", *steps]
    other = ["matmul_all_reduce %2", "reduce_scatter %5"]  # they do not fit: no guesses
    names = [event.name for event in named(found, other)]
    assert names == [*(event.name for event in found[:4]), "reduce_scatter %5"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.integers(0, 3)), max_size=30))
def test_spans_of_a_lane_nest(rows):
    """Programs that share an SM: each begins when its last span has ended."""
    free = {}
    spans = []
    for start, length, owner in rows:
        begin = max(start, free.get(owner, 0))
        free[owner] = begin + length
        spans.append((begin, begin + length, owner))
    spans.sort(key=lambda span: (span[0], -span[1]))
    found = lanes(spans)
    for lane in set(found):
        open_until = []
        for (start, end, _), number in zip(spans, found, strict=True):
            if number == lane:
                while open_until and open_until[-1] <= start:
                    open_until.pop()
                assert not open_until or end <= open_until[-1]
                open_until.append(end)
    most = max((sum(s <= at < e for s, e, _ in spans) for at, _, _ in spans), default=0)
    assert len(set(found)) <= max(most, 1) + 1
