"""Signals and bounded waits."""

import contextlib
import re
import time

import pytest
import torch
import triton
import triton.language as tl

import iris
import iris.device.pickling  # kernels of this file travel to the ranks
from iris.device import ops, signals, target, watch
from iris.device.context import DeviceContext

pytestmark = pytest.mark.ranks


@triton.jit(do_not_specialize=["rounds"])
def ping_pong(
    words, flags, data, out, rank: tl.constexpr, W: tl.constexpr, rounds, BLOCK: tl.constexpr
):
    """In turns, write a block to the other rank and signal; wait, and sum up what came."""
    ctx = DeviceContext.initialize(words, rank, W)
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    turn = 1
    while turn <= rounds:
        ctx.store(data + i, i + turn * (rank + 1), to_rank=1 - rank)
        ctx.signal(flags, turn, to_rank=1 - rank)
        ctx.wait(flags, turn, from_rank=1 - rank)
        total += tl.load(data + i, volatile=True)
        ctx.signal(flags + 1, turn, to_rank=1 - rank)  # consumed: the other may write again
        ctx.wait(flags + 1, turn, from_rank=1 - rank)
        turn += 1
    tl.store(out + i, total)


def play(rounds):
    ctx = iris.iris(1 << 20)
    flags = ctx.zeros(2, dtype=torch.int32)
    data = ctx.zeros(256, dtype=torch.int32)
    out = torch.zeros(256, dtype=torch.int64, device=ctx.device)
    for turns in (0, rounds):  # at 0 it only gets loaded, before any rank waits
        ctx.barrier()
        ping_pong[(1,)](
            ctx.get_device_context(), flags, data, out, ctx.cur_rank, 2, turns, BLOCK=256
        )
    ctx.barrier()
    ctx.watch.check()
    sent = rounds * (rounds + 1) // 2 * (2 - ctx.cur_rank)
    assert out.tolist() == [rounds * i + sent for i in range(256)]
    assert flags.tolist() == [rounds, rounds]


def test_what_was_stored_before_a_signal_is_there_after_the_wait(ranks):
    # triton-lang/triton#11676
    ranks(2).run(play, 10_000 if torch.cuda.is_available() else 20)


@triton.jit(do_not_specialize=["stage", "epoch", "peer"])
def wait_for(flag, record, stage, epoch, peer, out):
    came = signals.wait(flag, epoch, record, stage, peer)
    tl.store(out, came.to(tl.int32))


def limit(ctx, seconds):
    """Set how long this rank's waits on the device last."""
    ctx.watch.record[watch.LIMIT] = round(seconds * 1e9)


def finish(ctx):
    """Let the device come to an end and look for lost waits."""
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
    ctx.watch.check(synchronized=True)


def waits_at(dtype, flag, epoch):
    ctx = iris.iris(1 << 20)
    word = torch.tensor([flag], dtype=dtype, device=ctx.device)
    out = torch.zeros(1, dtype=torch.int32, device=ctx.device)
    wait_for[(1,)](word, ctx.watch.record, 0, epoch, 0, out)
    assert int(out) == 1


@pytest.mark.parametrize(
    ("dtype", "flag", "epoch"),
    [
        (torch.int32, 5, 5),
        (torch.int32, 6, 5),
        (torch.int32, -(2**31), 2**31 - 1),  # the flag is one further
        (torch.int32, 3, -2),
        (torch.int64, 2**32 + 1, 2**32 - 1),
    ],
)
def test_epochs_compare_by_difference(ranks, dtype, flag, epoch):
    ranks(1).run(waits_at, dtype, flag, epoch)


def run_out():
    ctx = iris.iris(1 << 20)
    limit(ctx, [1, 1000, 1000][ctx.cur_rank])
    stage = ctx.watch.stage("all_gather_matmul", [0, 2])
    flag = torch.full((1,), 6, dtype=torch.int32, device=ctx.device)
    out = torch.ones(1, dtype=torch.int32, device=ctx.device)
    wait_for[(1,)](flag, ctx.watch.record, stage, 6, 1, out)
    ctx.barrier()
    started = time.monotonic()
    if ctx.cur_rank == 2:  # comes late
        time.sleep(1.5)
    wait_for[(1,)](flag, ctx.watch.record, stage, 7, 1, out)
    with pytest.raises(iris.TimeoutError) as error:
        finish(ctx)
    assert int(out) == 0
    assert time.monotonic() - started < 20
    return str(error.value)


def test_a_lost_wait_ends_all_waits_and_says_the_same_on_all_ranks(ranks):
    texts = ranks(3).run(run_out)
    assert (
        texts
        == [
            "all_gather_matmul: rank 0 waited 1 s for rank 2\n"
            "  epoch: expected 7, seen 6\n"
            "help: look for the error or the missing call on rank 2; "
            "raise IRIS_TIMEOUT (now 1 s) if it is only slow; go on with ctx.reset()"
        ]
        * 3
    )


class JustLate:
    """Sets a flag as soon as the wait for it has run out. See `iris.device.target.observer`."""

    def __init__(self, ctx, flag):
        self.state, self.flag = ctx.watch.record[watch.STATE :], flag

    @contextlib.contextmanager
    def polling(self):
        if self.state[0] != 0:
            self.flag.fill_(1)
        yield


def flag_that_is_just_late():
    ctx = iris.iris(1 << 20)
    limit(ctx, 0.01)
    flag, out = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    target.observer = JustLate(ctx, flag)
    try:
        wait_for[(1,)](flag, ctx.watch.record, ctx.watch.stage("gather", [0]), 1, 0, out)
    finally:
        target.observer = None
    with pytest.raises(iris.TimeoutError) as error:
        finish(ctx)
    return int(flag), int(out), str(error.value).partition("\nhelp")[0]


def test_a_flag_that_comes_as_its_wait_runs_out_is_late(ranks):
    text = "gather: rank 0 waited 0.01 s for rank 0\n  epoch: expected 1, seen 0"
    assert ranks(1).run(flag_that_is_just_late) == [(1, 0, text)]


@triton.jit(do_not_specialize=["epoch", "n"])
def wait_for_many(flags, record, epoch, out, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    came = signals.wait(flags + lane, epoch, record, 0, lane + 10, lane < n)
    tl.store(out, came.to(tl.int32))


def run_out_of_many():
    ctx = iris.iris(1 << 20)
    limit(ctx, 0.3)
    flags = torch.tensor([9, 9, 7, 9, 0, 0, 0, 0], dtype=torch.int32, device=ctx.device)
    out = torch.ones(1, dtype=torch.int32, device=ctx.device)
    wait_for_many[(1,)](flags, ctx.watch.record, 7, out, 4, BLOCK=8)
    assert int(out) == 1  # masked flags do not count
    wait_for_many[(1,)](flags, ctx.watch.record, 9, out, 4, BLOCK=8)
    with pytest.raises(iris.TimeoutError, match=re.escape("rank 0 waited 0.3 s for rank 12")):
        finish(ctx)
    wait_for_many[(1,)](flags, ctx.watch.record, 20, out, 4, BLOCK=8)
    with pytest.raises(iris.TimeoutError, match="expected 9, seen 7"):  # the first one lost
        finish(ctx)


def test_a_wait_for_many_flags_names_one_that_is_missing(ranks):
    ranks(1).run(run_out_of_many)


def aborted():
    ctx = iris.iris(1 << 20)
    flag = torch.zeros(1, dtype=torch.int32, device=ctx.device)
    out = torch.ones(1, dtype=torch.int32, device=ctx.device)
    ctx.watch.check()
    wait_for[(1,)](flag, ctx.watch.record, 0, 0, 0, out)
    started = time.monotonic()
    if ctx.device.type == "cuda":  # the kernel is running when the watchdog finds out
        wait_for[(1,)](flag, ctx.watch.record, 0, 1, 0, out)
        ctx.watch.abort("rank 3 has died (signal 9)")
    else:
        ctx.watch.abort("rank 3 has died (signal 9)")
        wait_for[(1,)](flag, ctx.watch.record, 0, 1, 0, out)
    assert int(out) == 0
    assert time.monotonic() - started < 10
    with pytest.raises(iris.PeerError, match=r"rank 3 has died \(signal 9\)"):
        ctx.watch.check()


def test_a_watchdog_ends_waits_with_its_reason(ranks):
    ranks(1).run(aborted)


@triton.jit(do_not_specialize=["rank", "peer", "target"])
def arrive_and_wait(flag, bases, record, rank, peer, target):
    signals.arrive(ops.translate(flag, bases, rank, peer))
    signals.wait(flag, target, record, 0, peer)


def arrivals(programs):
    ctx = iris.iris(1 << 20)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    # Only the last program waits for all of the peer: none waits for one that has not started.
    arguments = (flag, ctx.get_heap_bases(), ctx.watch.record, ctx.cur_rank, 1 - ctx.cur_rank)
    arrive_and_wait[(programs - 1,)](*arguments, 0)
    arrive_and_wait[(1,)](*arguments, programs)
    ctx.barrier()
    ctx.watch.check()
    assert int(flag) == programs


def test_programs_that_share_a_flag_add_up(ranks):
    ranks(2).run(arrivals, 5)
