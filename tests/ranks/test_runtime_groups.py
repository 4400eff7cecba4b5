"""Host barriers and messages between groups of ranks."""

import os
import random
import re
import signal
import time

import numpy as np
import pytest
import torch

from iris.device.barrier import DeviceBarrier
from iris.device.watch import GROUPS, SLOTS
from iris.errors import CollectiveMismatchError, IrisError, LaunchError, PeerError, TimeoutError
from iris.runtime.board import Page
from iris.runtime.context import iris

pytestmark = pytest.mark.ranks


def _flags_after_barrier():
    ctx = iris(1 << 20)
    flags = ctx.zeros(ctx.num_ranks)
    peers = [ctx.heap.peer_tensor(flags, rank) for rank in range(ctx.num_ranks)]
    time.sleep(ctx.cur_rank * 0.1)
    for peer in peers:
        peer[ctx.cur_rank] = ctx.cur_rank + 1
    ctx.barrier()
    return flags.tolist()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_barrier_waits_for_the_slowest(ranks, world):
    for flags in ranks(world).run(_flags_after_barrier):
        assert flags == [rank + 1 for rank in range(world)]


def _rounds(rounds, first_epoch):
    """Meet in the world and in overlapping groups, with random delays; nobody may pass early."""
    ctx = iris(1 << 20)
    pick = random.Random(ctx.cur_rank)
    all_members = [(3, 2, 1, 0), (0, 2), (1, 3), (3, 0), (0, 1, 2)]
    groups = [ctx.group(ranks) for ranks in all_members if ctx.cur_rank in ranks]
    counts = ctx.zeros(len(all_members), dtype=torch.int64)
    peers = [ctx.heap.peer_tensor(counts, rank).numpy() for rank in range(ctx.num_ranks)]
    for group in groups:
        group.epoch = first_epoch
    for done in range(1, rounds + 1):
        for group in groups:
            if pick.random() < 0.005:
                time.sleep(0.001)
            number = all_members.index(group.ranks)
            peers[ctx.cur_rank][number] = done
            assert group.sync(f"round {number}") == first_epoch + done
            assert all(peers[rank][number] >= done for rank in group.ranks)
    return [group.epoch - first_epoch for group in groups]


@pytest.mark.parametrize("first_epoch", [0, 2**31 - 3, 2**32 - 3])
def test_groups_are_isolated_and_epochs_wrap(ranks, first_epoch):
    # pytorch/pytorch#192581, alibaba/rtp-llm#1418
    for epochs in ranks(4).run(_rounds, 500, first_epoch):
        assert set(epochs) == {500}


def _device_barriers(rounds):
    """Meet by ``device_barrier``, twice a round, with delays on random ranks; count who came."""
    ctx = iris(1 << 20)
    pick = random.Random(ctx.cur_rank)
    counts = ctx.zeros(ctx.num_ranks, dtype=torch.int64)
    peers = [ctx.heap.peer_tensor(counts, rank).numpy() for rank in range(ctx.num_ranks)]
    for done in range(1, rounds + 1):
        if pick.random() < 0.002:
            time.sleep(0.002)
        for peer in peers:
            peer[ctx.cur_rank] += 1
        ctx.device_barrier()
        assert peers[ctx.cur_rank].tolist() == [done] * ctx.num_ranks
        ctx.device_barrier()
    return int(counts.sum())


@pytest.mark.parametrize("world", [2, 4])
def test_10000_device_barriers_count_every_arrival(ranks, world):
    assert ranks(world).run(_device_barriers, 5_000) == [5_000 * world] * world


def _exchange(lengths):
    ctx = iris(1 << 20)
    mine = bytes([ctx.cur_rank + 1]) * lengths[ctx.cur_rank]
    found = ctx.world.exchange("payloads", mine)
    return found == [bytes([rank + 1]) * length for rank, length in enumerate(lengths)]


@pytest.mark.parametrize("lengths", [(0, 0, 0), (1, 0, 8192), (8193, 5, 100_000)])
def test_exchange_takes_any_length(ranks, lengths):
    assert ranks(3).run(_exchange, lengths) == [True] * 3


def _mismatch():
    ctx = iris(1 << 20)
    shape = (4, 5) if ctx.cur_rank == 0 else (4, 3)
    with pytest.raises(CollectiveMismatchError) as caught:
        ctx.world.sync(f"all_reduce of f32{list(shape)}")
    ctx.world.sync("the group stays usable")
    return str(caught.value)


def test_mismatch_is_raised_on_all_ranks_with_both_calls(ranks):
    for text in ranks(3).run(_mismatch):
        assert text == (
            "ranks of one group are in different calls\n"
            "  rank 0: all_reduce of f32[4, 5]\n"
            "  rank 1: all_reduce of f32[4, 3]\n"
            "  rank 2: all_reduce of f32[4, 3]\n"
            "help: every rank of a group must make the same calls, with the same shapes and dtypes"
        )


def _retry_from_the_start():
    """Rank 1 fails between two collectives and starts again, one collective behind rank 0."""
    ctx = iris(1 << 20)
    ctx.world.sync("first")
    with pytest.raises(CollectiveMismatchError):
        ctx.world.sync("second" if ctx.cur_rank == 0 else "first")
    epoch = ctx.world.epoch
    return ctx.world.sync("in step again") - epoch


def test_a_rank_that_retries_is_found_out(ranks):
    assert ranks(2).run(_retry_from_the_start) == [1, 1]


def _only_rank_0():
    os.environ["IRIS_TIMEOUT"] = "0.3"
    ctx = iris(1 << 20)
    if ctx.cur_rank == 0:
        with pytest.raises(TimeoutError) as caught:
            ctx.barrier()
        return str(caught.value)
    time.sleep(1)
    return None


def test_timeout_names_the_call_and_the_missing_ranks(ranks):
    text = ranks(3).run(_only_rank_0)[0]
    assert re.match(r"barrier of ranks \(0, 1, 2\): rank 0 waited [\d.]+ s for ranks 1, 2\n", text)
    assert "IRIS_TIMEOUT (now 0.3 s)" in text


def _rank_1_leaves(how):
    ctx = iris(1 << 20)
    if ctx.cur_rank == 1:
        if how == "close":
            ctx.close()
        elif how == "fail":
            ctx.fail("ValueError: no luck")
        return None
    started = time.monotonic()
    with pytest.raises(PeerError) as caught:
        ctx.barrier()
    assert time.monotonic() - started < 5
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("close", "rank 1 closed its context"),
        ("return", "rank 1 closed its context"),
        ("fail", "rank 1 failed: ValueError: no luck"),
    ],
)
def test_a_rank_that_leaves_is_named(ranks, how, why):
    text = ranks(2).run(_rank_1_leaves, how)[0]
    assert text == f"{why}\n  rank 0 was waiting for it in: barrier of ranks (0, 1)"


def _rank_1_is_killed():
    ctx = iris(1 << 20)
    if ctx.cur_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.barrier()


def test_a_killed_rank_is_named_and_the_pool_goes_on(ranks):
    started = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        ranks(3).run(_rank_1_is_killed)
    assert time.monotonic() - started < 10
    text = str(caught.value)
    assert "rank 1: was killed by SIGKILL before it returned" in text
    assert "PeerError: rank 1 (pid " in text
    assert ranks(3).run(_flags_after_barrier) == [[1, 2, 3]] * 3


def _bad_groups():
    ctx = iris(1 << 20)
    assert ctx.group([0, 1]) is ctx.world
    assert ctx.group() is ctx.world
    texts = []
    for bad in ([0, 2], [0, 0], [1 - ctx.cur_rank]):
        with pytest.raises(IrisError) as caught:
            ctx.group(bad)
        texts.append(caught.value.message)
    return texts


def test_bad_groups_are_refused(ranks):
    bad = "ranks must be different numbers from 0 to 1"
    for rank, texts in enumerate(ranks(2).run(_bad_groups)):
        other = f"rank {rank} is not in the group ({1 - rank},)"
        assert texts == [f"group (0, 2): {bad}", f"group (0, 0): {bad}", other]


def _too_many_groups():
    ctx = iris(1 << 20)
    taken = range(SLOTS, SLOTS + GROUPS) if ctx.cur_rank == 1 else ()
    with pytest.raises(IrisError) as caught:
        DeviceBarrier.create(ctx, ctx.world, taken)
    ctx.device_barrier()
    return str(caught.value)


def test_more_groups_than_a_rank_has_flags_for(ranks):
    assert (
        ranks(2).run(_too_many_groups)
        == [
            "device_barrier: a rank of (0, 1) uses it in 192 groups already\n"
            "help: use fewer groups, or barrier(group=...)"
        ]
        * 2
    )


def test_more_groups_than_a_context_has_places_for():
    page = Page.create()
    for key in range(1, 513):
        page.claim(key)
    assert page.claim(7).words[0] == 0
    with pytest.raises(IrisError) as caught:
        page.claim(513)
    assert str(caught.value) == (
        "this context has 512 groups already\n"
        "help: use groups again, or close contexts that are no longer used"
    )


def _process_groups():
    ctx = iris(1 << 20)
    import torch.distributed as dist

    sub = dist.new_group([0, 2])
    if ctx.cur_rank != 1:
        ctx.barrier(group=sub)
        assert ctx.group(sub) is ctx.group([0, 2])
    ctx.barrier(group=dist.group.WORLD)
    return ctx.world.epoch


def test_process_groups_are_taken(ranks):
    assert len(set(ranks(3).run(_process_groups))) == 1


def _broadcasts():
    ctx = iris(1 << 20)
    at = ctx.cur_rank

    def from_1(value):
        return value if at == 1 else None

    number = ctx.broadcast(from_1(42), src=1)
    tensor = ctx.broadcast(from_1(torch.arange(6.0).reshape(2, 3).T), src=1)
    array = ctx.broadcast(from_1(np.arange(5, dtype=np.int16)), src=1)
    bf16 = ctx.broadcast(from_1(torch.tensor([1.5, -2], dtype=torch.bfloat16)), src=1)
    kept = ctx.broadcast(from_1(torch.tensor([3], dtype=torch.bfloat16)), src=1, as_tensor=True)
    large = ctx.broadcast(from_1(torch.arange(100_000)), src=1)
    assert number == 42
    assert type(number) is int
    assert tensor.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert isinstance(tensor, np.ndarray)
    assert array.dtype == np.int16
    assert array.tolist() == [0, 1, 2, 3, 4]
    assert bf16.dtype == np.float32
    assert bf16.tolist() == [1.5, -2]
    assert kept.dtype == torch.bfloat16
    assert kept.device == ctx.device
    assert large.sum() == 99_999 * 50_000
    assert ctx.broadcast({"a": [at]}, src=2) == {"a": [2]}
    if at >= 1:  # src is a global rank, also in a group
        assert ctx.broadcast(at, src=2, group=[1, 2]) == 2
        with pytest.raises(IrisError, match=r"src=0 is not a rank of the group \(1, 2\)"):
            ctx.broadcast(at, src=0, group=[1, 2])
    return True


def test_broadcast(ranks):
    # pytorch/pytorch#130515
    assert ranks(3).run(_broadcasts) == [True] * 3


DTYPES = (torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.bfloat16, torch.complex64)


def _broadcast_dtypes():
    ctx = iris(1 << 20)
    for dtype in DTYPES:
        value = torch.arange(6).to(dtype).reshape(2, 3).T  # strided
        for as_tensor in (False, True):
            got = ctx.broadcast(value if ctx.cur_rank == 1 else None, src=1, as_tensor=as_tensor)
            assert got.shape == (3, 2)
            if as_tensor:
                assert got.dtype == dtype
                got = got.cpu().to(torch.complex64).numpy()
            assert got.tolist() == [[0, 3], [1, 4], [2, 5]]
    return True


def test_broadcast_of_every_kind_of_dtype(ranks):
    assert ranks(2).run(_broadcast_dtypes) == [True] * 2


def _broadcast_what_cannot_travel():
    ctx = iris(1 << 20)
    assert ctx.broadcast((lambda: 7) if ctx.cur_rank == 0 else None)() == 7
    with pytest.raises(IrisError) as caught:
        ctx.broadcast((n for n in "ab") if ctx.cur_rank == 1 else None, src=1)
    assert ctx.broadcast(ctx.cur_rank + 5, src=1) == 6
    return str(caught.value)


def test_a_value_that_cannot_be_sent_is_an_error_on_all_ranks(ranks):
    first, second = ranks(2).run(_broadcast_what_cannot_travel)
    assert first == second
    assert first.startswith(
        "broadcast(src=1): a generator cannot be sent: cannot pickle 'generator'"
    )
