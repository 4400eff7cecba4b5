"""What kernels record: ``ctx.tracing``, ``DeviceContext`` with tracing, and the exported traces."""

import functools
import json
import math
import sys
import threading

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import iris
import iris.device.pickling  # kernels of this file travel to the ranks
from iris import DeviceContext, P
from iris.device.tracing import clock_kernel
from iris.runtime.timeline import Timeline
from iris.runtime.tracing import Anchor, Clock, _ask, _nested, _ordered, _shared
from iris.testing import small_integers

pytestmark = pytest.mark.ranks


@triton.jit(do_not_specialize=["go"])
def every_method(words, x, kind, go, rank: tl.constexpr, W: tl.constexpr, TRACING: tl.constexpr):
    if go != 0:
        ctx = DeviceContext.initialize(words, rank, W, tracing=TRACING)
        peer: tl.constexpr = (rank + 1) % W
        i = tl.arange(0, 64)
        since = ctx.trace_begin()
        value = ctx.load(x + i, peer)
        ctx.store(x + 64 + i, value, peer, mask=i < 10)
        ctx.put(x + i, x + 128 + i, peer, mask=i < 5)
        ctx.get(x + i, x + 192 + i, peer)
        ctx.copy(x + i, x + 256 + i, peer, peer)
        ctx.atomic_add(x + 320, 1, peer)
        ctx.barrier()
        ctx.trace_end(since, kind, peer, nbytes=77)


def launch(ctx, kind, tracing=True):
    """Load the kernel on all ranks, then run it."""
    x = ctx.zeros(1024, dtype=torch.int32)
    for go in (0, 1):
        ctx.barrier()
        words = ctx.get_device_context()
        every_method[(1,)](words, x, kind, go, ctx.cur_rank, ctx.num_ranks, tracing)
    ctx.barrier()


def records_methods(tracing):
    ctx = iris.iris(1 << 20)
    ctx.tracing.enable(max_events=100)
    launch(ctx, ctx.tracing.kind("all of it"), tracing)
    return ctx.tracing.timeline()


def test_methods_of_the_context_record_themselves(ranks):
    timeline = ranks(2).run(records_methods, True)[1]
    for rank in range(2):
        events = [event for event in timeline.events if event.rank == rank]
        found = [(e.kind, e.args.get("peers"), e.args.get("bytes")) for e in events]
        peer = [1 - rank]
        assert found[:7] == [
            ("all of it", peer, 77),
            ("load", peer, 256),
            ("store", peer, 40),
            ("put", peer, 20),
            ("get", peer, 256),
            ("copy", peer, 256),
            ("atomic", peer, 4),
        ]
        inside = ["barrier", "signal", "signal", f"wait for {rank}", f"wait for {1 - rank}"]
        assert sorted(event.name for event in events[7:]) == sorted(inside)
        whole = events[0]
        assert all(whole.start <= e.start <= e.end <= whole.end for e in events)
        assert len({event.track for event in events}) == 1
        assert whole.track.startswith("SM" if torch.cuda.is_available() else "program 0")
    assert ranks(2).run(records_methods, False)[0].events == []


def overflows(folder):
    ctx = iris.iris(1 << 20)
    ctx.tracing.enable(max_events=5)
    launch(ctx, 20)
    first = ctx.tracing.timeline(merge=False).about["ranks"]
    own = ctx.tracing.export(folder / "own.1.json.gz")
    files = [own, ctx.tracing.export(folder / "all.json", True)]
    ctx.tracing.reset()
    ctx.barrier()
    after = ctx.tracing.timeline(merge=False).about["ranks"]
    ctx.tracing.disable()
    launch(ctx, 20)  # compiled in, and switched off
    off = ctx.tracing.timeline(merge=False).about["ranks"]
    counts = [
        [(rank["events"], rank["dropped"]) for rank in about] for about in (first, after, off)
    ]
    return counts, files


def test_what_finds_no_room_is_counted_and_said(ranks, tmp_path, capfd):
    (counts, own), (_, other) = ranks(2).run(overflows, tmp_path)
    assert counts == [[(5, 7)] * 2, [(0, 0)] * 2, [(0, 0)] * 2]
    assert [own, other] == [
        [tmp_path / "own.1-rank0.json.gz", tmp_path / "all.json"],
        [tmp_path / "own.1-rank1.json.gz", None],
    ]
    merged = json.loads((tmp_path / "all.json").read_text())
    about = merged["otherData"]["ranks"][1]
    assert about.pop("uncertainty_us") < (100 if torch.cuda.is_available() else 1e-9)
    assert about == {"rank": 1, "events": 5, "dropped": 7}
    titles = [row["args"] for row in merged["traceEvents"] if row["name"] == "process_name"]
    assert titles == [{"name": "rank 0"}, {"name": "rank 1"}]
    again = Timeline.load(tmp_path / "all.json")
    alone = Timeline.load(own[0])
    assert [e.name for e in again.events if e.rank == 0] == [e.name for e in alone.events]
    assert [rank for rank, _ in again.tracks()] == [0, 1]


def misuse():
    ctx = iris.iris(1 << 20)
    texts = []
    calls = [ctx.tracing.reset, ctx.tracing.timeline]
    calls += [functools.partial(ctx.tracing.enable, bad) for bad in (0, 1.5, "5", math.inf)]
    for call in calls:
        with pytest.raises(iris.IrisError) as error:
            call()
        texts.append(str(error.value))
    return texts


def test_misuse_says_the_way_out(ranks):
    never = "tracing was never enabled in this context\nhelp: call ctx.tracing.enable() first"
    rule = "must be a whole number from 1 to 2**62"
    bad = [f"max_events={x} {rule}" for x in ("0", "1.5", "'5'", "inf")]
    assert ranks(1).run(misuse) == [[never, never, *bad]]


def merges_on_one_rank():
    ctx = iris.iris(1 << 20)
    ctx.tracing.enable(5)
    with pytest.raises(iris.IrisError, match="ranks of one group are in different calls") as error:
        ctx.tracing.timeline(merge=ctx.cur_rank == 0)
    return str(error.value).split("\n")[1:3]


def test_ranks_merge_all_or_none(ranks):
    calls = ["  rank 0: ctx.tracing, merge=True", "  rank 1: ctx.tracing, merge=False"]
    assert ranks(2).run(merges_on_one_rank) == [calls, calls]


def enabled_without_room():
    """What finds no memory changes nothing."""
    ctx = iris.iris(1 << 20)
    ctx.tracing.enable(5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"allocate memory|out of memory"):
            ctx.tracing.enable(1 << 48)
    launch(ctx, -1)
    return ctx.tracing.timeline().about["ranks"][0]


def test_a_buffer_that_finds_no_memory_changes_nothing(ranks):
    (about,) = ranks(1).run(enabled_without_room)
    assert (about["events"], about["dropped"]) == (5, 5)


def mlp(x, w_up, w_down):
    h = iris.all_gather(x, "tp", dim=0) @ w_up
    return iris.reduce_scatter(h @ w_down, "tp", dim=0)


def traced_program():
    ctx = iris.iris(1 << 22)
    f = iris.spmd(in_specs=(P("tp"), P(None, "tp"), P("tp")), out_specs=P("tp"), lowering="triton")(
        mlp
    )
    rank = ctx.cur_rank
    timelines = []
    for step in range(3):  # on, off, on again: the program is the same
        (ctx.tracing.disable if step == 1 else ctx.tracing.enable)(*(() if step == 1 else (5000,)))
        x = [small_integers((16, 16), r, step) for r in range(2)]
        up = [small_integers((16, 24), r, step + 5) for r in range(2)]
        down = [small_integers((24, 8), r, step + 9) for r in range(2)]
        y = f(*(shards[rank].to(ctx.device) for shards in (x, up, down))).cpu()
        parts = [torch.cat(x) @ u @ d for u, d in zip(up, down, strict=True)]
        assert torch.equal(y, sum(parts)[16 * rank :][:16])
        timelines.append(ctx.tracing.timeline())
    return timelines


def test_stages_of_a_program_record_themselves(ranks):
    first, off, again = ranks(2).run(traced_program)[0]
    assert [e.name for e in off.events] == [e.name for e in first.events]  # nothing was added
    for timeline in (first, again):
        for rank in range(2):
            events = [event for event in timeline.events if event.rank == rank]
            gather = [e for e in events if e.args["stage"] == "all_gather_matmul %1"]
            scatter = [e for e in events if e.args["stage"] == "matmul_reduce_scatter %3"]
            assert len(gather) + len(scatter) == len(events)
            assert {event.kind for event in gather} == {"push", "wait", "tile", "emit"}
            assert {event.kind for event in scatter} == {"tile", "emit", "sum", "wait"}
            # It pushed its rows to both ranks, in whole blocks, which are larger on a GPU; tiles
            # waited for the ranks whose rows they need.
            pushed = sum(e.args.get("bytes", 0) for e in gather if e.kind == "push")
            rows = 2 * 16 * 16 * 4
            assert pushed >= rows if torch.cuda.is_available() else pushed == rows
            tiles = [(e.args["row"], e.args["column"]) for e in gather if e.kind == "tile"]
            assert len(tiles) == len(set(tiles)) > (0 if torch.cuda.is_available() else 1)
            waited = {peer for e in gather if e.kind == "wait" for peer in e.args["peers"]}
            assert waited == {0, 1}
        assert {event.rank for event in timeline.events} == {0, 1}


def test_a_clock_is_read_within_its_uncertainty():
    """The kernel reads the host's clock here, so both times of an anchor should be one."""
    mail, rounds = torch.zeros(9, dtype=torch.int64), 8
    answer = threading.Thread(target=lambda: clock_kernel[(1,)](mail, rounds, LIMIT=30 * 10**9))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        answer.start()
        anchors = [_ask(mail.numpy(), number) for number in range(1, rounds + 1)]
        answer.join()
    finally:
        sys.setswitchinterval(before)
    for anchor in filter(None, anchors):
        assert abs(anchor.device - anchor.host) <= anchor.uncertainty
    assert anchors[-1] is not None


def test_what_begins_early_in_a_pipelined_loop_begins_at_the_end_of_the_last():
    words = np.zeros((5, 8), np.int64)
    words[:, 6:] = [(0, 9), (2, 6), (8, 10), (5, 14), (0, 30)]  # the fourth began in the first
    words[4, 5] = 1  # another program
    found = _ordered(_nested(words))[:, 6:].tolist()
    assert found == [[0, 30], [0, 9], [2, 6], [9, 14], [9, 10]]


def test_an_event_that_ends_with_the_one_around_it_stays_within_it():
    words = np.zeros((3, 8), np.int64)
    words[:, 6:] = [(3, 10), (1, 10), (1, 10)]  # as recorded: the innermost first
    words[:, 0] = 1, 2, 3
    found = _ordered(_nested(words))[:, [0, 6, 7]].tolist()
    assert found == [[3, 1, 10], [2, 1, 10], [1, 3, 10]]


def test_times_of_a_clock_that_drifts():
    start, host = 1_700_000_000_000_000_000, 5_000_000_000
    drifting = lambda passed: start + passed + passed * 40 // 10**6  # noqa: E731
    length = 3_000_000_000
    clock = Clock("a", Anchor(start, host, 7), Anchor(drifting(length), host + length, 5))
    passed = [0, 1, 10**6, length // 2, length]
    found = clock.on_host(np.array([drifting(time) for time in passed]))
    assert all(abs(a - host - b) <= 1 for a, b in zip(found, passed, strict=True))
    assert clock.uncertainty == 7
    still = Clock("host", Anchor(), Anchor())
    assert still.on_host(np.array([3, 2**60])) == [3, 2**60]


def test_ranks_of_one_gpu_use_the_better_clock():
    clocks = [Clock(name, Anchor(0, 0, error), Anchor(1, 1, error)) for name, error in
              (("a", 9), ("b", 4), ("a", 2), ("b", 6))]  # fmt: skip
    assert [clock.uncertainty for clock in _shared(clocks)] == [2, 4, 2, 4]
