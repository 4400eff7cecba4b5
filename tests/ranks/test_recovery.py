"""Waits that run out: what is said, on which ranks, and how to go on; waits that are only slow."""

import importlib
import logging
import os
import re
import signal
import time

import pytest
import torch

import iris
from iris import P
from iris.device import watch
from iris.lower.kernels.matmul_all_reduce import MatmulAllReduce

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(90)]


@iris.spmd(in_specs=(P("tp", None), P(None, "tp"), P("tp", None)), out_specs=P("tp", None))
def mlp(x, up, down):
    return iris.reduce_scatter((iris.all_gather(x, "tp", dim=0) @ up).relu() @ down, "tp", dim=0)


def operands(ctx, call):
    """This rank's shards, and its rows of the right result; all integers."""
    W, rank = ctx.num_ranks, ctx.cur_rank
    draw = torch.Generator().manual_seed(call)
    x, up, down = (
        torch.randint(-2, 3, n, generator=draw).float()
        for n in ((4 * W, 6), (6, 8 * W), (8 * W, 6))
    )
    want = (x @ up).relu() @ down
    mine = [x.chunk(W)[rank], up.chunk(W, 1)[rank], down.chunk(W)[rank]]
    return [shard.to(ctx.device) for shard in mine], want.chunk(W)[rank]


def call(ctx, number):
    shards, want = operands(ctx, number)
    got = mlp(*shards)
    ctx.synchronize()
    return torch.equal(got.cpu(), want)


def limit(ctx, seconds):
    """Set how long this rank's waits last."""
    os.environ["IRIS_TIMEOUT"] = str(seconds)
    ctx.watch.record[watch.LIMIT] = seconds * 10**9


def lose_and_reset(lowering):
    """The last rank comes late to its third call; then all reset and go on."""
    os.environ["IRIS_LOWERING"] = lowering
    try:
        ctx = iris.iris(1 << 21)
        late = ctx.cur_rank == ctx.num_ranks - 1
        right = [call(ctx, number) for number in range(2)]
        limit(ctx, 1)
        texts = []
        for attempt in range(2):
            if late and attempt == 0:
                time.sleep(1.6)
            with pytest.raises(iris.TimeoutError) as error:
                call(ctx, 2)
            texts.append(str(error.value))
        with pytest.raises(iris.TimeoutError) as error:
            ctx.barrier()
        texts.append(str(error.value))
        os.environ["IRIS_TIMEOUT"] = "20"
        ctx.reset()
        limit(ctx, 20)
        right += [call(ctx, number) for number in range(3, 6)]
        ctx.barrier()
        return right, texts
    finally:
        del os.environ["IRIS_LOWERING"]


@pytest.mark.parametrize(("world", "lowering"), [(2, "torch"), (3, "triton")])
def test_a_lost_wait_is_the_same_error_on_all_ranks_and_can_be_reset(ranks, world, lowering):
    answers = ranks(world).run(lose_and_reset, lowering)
    late = world - 1
    stage = "all_gather" if lowering == "torch" else "all_gather_matmul"
    for right, texts in answers:
        text = texts[0].partition("\nhelp:")[0]
        assert re.fullmatch(
            rf"{stage} #0 at test_recovery.py:\d+ in program mlp [0-9a-f]{{8}}: rank \d waited "
            rf"\d(\.\d)? s for ranks? ([\d, ]*){late}\n  epoch: expected \d+, seen \d+(, \d+)*",
            text,
        ), text
        assert right == [True] * 5
        for again in texts[1:]:
            assert text in again
        assert "ctx.reset()" in texts[2]


def remove_signal(module, name):
    """A stage one of whose signals is not sent."""
    os.environ["IRIS_TIMEOUT"] = "0.5"
    module = importlib.import_module(f"iris.lower.kernels.{module}")
    real = getattr(module, name)
    setattr(module, name, lambda *args: None)
    try:
        ctx = iris.iris(1 << 20)
        stage = MatmulAllReduce.create(
            ctx, ctx.world, M=4, N=4, K=4, dtype=torch.float32, one_shot=False
        )
        x = torch.ones(4, 4)
        stage(x, x, out=torch.empty(4, 4))
        with pytest.raises(iris.TimeoutError) as error:
            ctx.synchronize()
        return str(error.value)
    finally:
        setattr(module, name, real)
        os.environ["IRIS_TIMEOUT"] = "20"


@pytest.mark.parametrize("name", ["publish_to", "publish"], ids=["parts", "sums"])
def test_a_signal_that_is_never_sent_is_a_timeout(ranks, name):
    module = "sums" if name == "publish_to" else "matmul_all_reduce"
    for text in ranks(2).run(remove_signal, module, name):
        first, second, _ = text.split("\n")
        assert re.fullmatch(
            r"matmul_all_reduce to \[4, 4\]: rank \d waited 0.5 s for rank \d", first
        )
        assert second == "  epoch: expected 1, seen 0"


def slow_rank(lowering):
    """Rank 1 sleeps in its own code: what the others' watchdogs log, and whether all goes on."""
    os.environ.update(IRIS_LOWERING=lowering, IRIS_SLOW="1")
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    handler = Keep()
    iris.logging.logger().addHandler(handler)
    try:
        ctx = iris.iris(1 << 21)
        right = [call(ctx, 0)]
        ctx.barrier()
        if ctx.cur_rank == 1:
            time.sleep(3)
        right.append(call(ctx, 1))
        ctx.barrier()
        return right, records
    finally:
        iris.logging.logger().removeHandler(handler)
        for name in ("IRIS_LOWERING", "IRIS_SLOW"):
            del os.environ[name]


@pytest.mark.parametrize("lowering", ["torch", "triton"])
def test_a_slow_wait_is_logged_once_with_where_every_rank_is(ranks, lowering):
    answers = ranks(3).run(slow_rank, lowering)
    assert all(right == [True, True] for right, _ in answers)
    logged = [text for _, records in answers for text in records]
    (report,) = [text for text in logged if not text.startswith("simulation: ")]
    lines = report.splitlines()
    assert lines[0] == "a wait is longer than 1 s (IRIS_SLOW)"
    # On GPUs the second call of a program with kernels is its capture, which begins with a meeting.
    waits = (
        r"waits in (all_gather.* #0 at test_recovery.py:\d+ in )?program mlp [0-9a-f]{8}.*, for "
    )
    for rank in (0, 2):
        assert re.match(rf"  rank {rank}: {waits}", lines[1 + rank]), report
        assert re.search(r"rank 1 \(epoch expected \d+, seen \d+\)", lines[1 + rank]), report
    assert re.fullmatch(
        r"  rank 1: in no wait; last call \d+ of ranks \(0, 1, 2\), .*; at test_recovery.py:\d+",
        lines[2],
    ), report


def killed():
    os.environ["IRIS_LOWERING"] = "triton"
    try:
        ctx = iris.iris(1 << 21)
        assert call(ctx, 0)
        if ctx.cur_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(iris.PeerError, match=r"rank 1 \(pid \d+\) died"):
            call(ctx, 1)
        assert time.monotonic() - started < 10  # IRIS_TIMEOUT is 20
    finally:
        del os.environ["IRIS_LOWERING"]


def test_a_kernel_that_waits_for_a_dead_rank_ends_before_its_time(ranks):
    with pytest.raises(iris.LaunchError) as error:
        ranks(2).run(killed)
    assert "killed: 1 of 2 ranks failed" in str(error.value).replace("isolated", "killed")
    assert "rank 1: was killed by SIGKILL" in str(error.value)


def leaves_a_call_early():
    """The last rank makes one call less than the others, and closes its context."""
    os.environ["IRIS_LOWERING"] = "triton"
    try:
        ctx = iris.iris(1 << 21)
        assert all(call(ctx, number) for number in range(3))
        if ctx.cur_rank == ctx.num_ranks - 1:
            return None
        started = time.monotonic()
        with pytest.raises(iris.PeerError) as error:
            call(ctx, 3)
        assert time.monotonic() - started < 10  # IRIS_TIMEOUT is 20
        return str(error.value)
    finally:
        del os.environ["IRIS_LOWERING"]


def test_a_kernel_that_waits_for_a_rank_that_left_ends_before_its_time(ranks):
    *texts, _ = ranks(3).run(leaves_a_call_early)
    for text in texts:
        assert re.fullmatch(
            r"rank 2 closed its context and did not come to call \d+ of ranks \(0, 1, 2\), "
            r"program mlp [0-9a-f]{8} of \(x: .*\)",
            text,
        ), text


def missing_in_reset():
    os.environ["IRIS_TIMEOUT"] = "0.5"
    try:
        ctx = iris.iris(1 << 20)
        if ctx.cur_rank == 0:
            with pytest.raises(iris.TimeoutError, match=r"ctx.reset\(\): rank 0 .* for rank 1"):
                ctx.reset()
            return True
        time.sleep(1)
        return True
    finally:
        os.environ["IRIS_TIMEOUT"] = "20"


def test_a_reset_needs_every_rank(ranks):
    assert ranks(2).run(missing_in_reset) == [True, True]


def ends_with_live_programs():
    os.environ["IRIS_LOWERING"] = "triton"
    ctx = iris.iris(1 << 21)
    right = [call(ctx, number) for number in range(3)]
    iris.synchronize()
    return right, ctx.cur_rank  # nothing is closed: the process just ends


def test_processes_end_in_order_with_live_programs():
    # pytorch/pytorch#115388
    answers = iris.launch(ends_with_live_programs, 2, timeout=40)
    assert answers == [([True] * 3, rank) for rank in range(2)]
