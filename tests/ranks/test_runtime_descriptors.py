"""Open files that ranks pass each other, as the allocator "vmem" does with its memory."""

import os
import socket
import time

import pytest

from iris.errors import LaunchError
from iris.runtime.context import iris
from iris.runtime.descriptors import exchange_descriptors
from iris.runtime.launch import launch

pytestmark = pytest.mark.ranks


def _open_files():
    return len(os.listdir("/proc/self/fd"))


def _pass_files(counts, ranks):
    """Every member sends files that say whose they are."""
    ctx = iris(1 << 20)
    if ctx.cur_rank not in ranks:
        return True
    group, before = ctx.group(ranks), _open_files()
    mine = [os.memfd_create("test") for _ in range(counts[group.index])]
    for number, file in enumerate(mine):
        os.pwrite(file, f"{ctx.cur_rank}: {number}".encode(), 0)
    received = exchange_descriptors(group, "pass files", mine)
    texts = [[os.pread(file, 99, 0).decode() for file in files] for files in received]
    for file in (*mine, *(file for files in received for file in files)):
        os.close(file)
    assert texts == [
        [] if rank == ctx.cur_rank else [f"{rank}: {n}" for n in range(count)]
        for rank, count in zip(ranks, counts, strict=True)
    ]
    return _open_files() == before


@pytest.mark.parametrize(
    ("counts", "members"), [((2, 3, 1), [0, 1, 2]), ((300, 0, 129), [0, 1, 2]), ((4, 5), [2, 0])]
)
def test_members_receive_each_others_files(ranks, counts, members):
    assert ranks(3).run(_pass_files, counts, members) == [True] * 3


def _lose(how):
    ctx = iris(1 << 20)
    if ctx.cur_rank == 2:
        return ctx.close()  # no member: not to blame
    pair = ctx.group([0, 1])
    if ctx.cur_rank == 1:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.bind("")
            server.listen()
            pair.exchange("pass files", server.getsockname())
            os._exit(9) if how == "dies" else time.sleep(6)
    return exchange_descriptors(pair, "pass files", [0])


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("dies", "PeerError: rank 1 (pid "),
        ("hangs", "TimeoutError: pass files: rank 0 has no answer of rank 1: "),
    ],
)
def test_a_member_that_is_lost_is_named(how, text):
    with pytest.raises(LaunchError) as caught:
        launch(_lose, 3, how, timeout=60, env={"IRIS_TIMEOUT": "0.5"})
    assert text in str(caught.value)
