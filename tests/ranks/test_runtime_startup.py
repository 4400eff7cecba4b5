"""Ranks that do not find each other: what is said, on which ranks, and how soon."""

import os
import re
import socket
import time

import pytest

from iris.errors import LaunchError
from iris.runtime.context import iris
from iris.runtime.launch import launch

pytestmark = pytest.mark.ranks
LIMIT = 60


def _join():
    return iris(1 << 20).get_rank()


@pytest.mark.parametrize("when", ["before iris.iris()", "at the first allocation"])
def test_a_rank_that_is_lost_in_start_up_is_named(when):
    # pytorch/pytorch#194911
    def start():
        if os.environ["RANK"] == "1" and when == "before iris.iris()":
            os._exit(9)
        ctx = iris(1 << 20)
        if ctx.cur_rank == 1:
            os._exit(9)
        ctx.zeros(10)

    started = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(start, 3, timeout=LIMIT)
    assert time.monotonic() - started < 15
    text = str(caught.value)
    assert "rank 1: exited with status 9 before it returned" in text
    assert text.count("PeerError: rank 1") >= 2


def test_a_rank_that_never_starts_is_named():
    def start():
        if os.environ["RANK"] != "1":
            iris(1 << 20)
        else:
            time.sleep(3)

    with pytest.raises(LaunchError) as caught:
        launch(start, 3, timeout=LIMIT, env={"IRIS_TIMEOUT": "1"})
    # Either of the two may run out first.
    named = r"TimeoutError: iris\.iris: rank [02] waited 1\.\d s for rank 1 of 3"
    assert re.search(named, str(caught.value))


@pytest.mark.parametrize(
    ("lose", "named"),
    [
        (lambda: os._exit(9), r"PeerError: rank 1 \(pid \d+\) died\n"),
        (lambda: time.sleep(6), "TimeoutError: .*: rank [02] waited in vain for rank 1\n"),
    ],
    ids=["died", "hangs"],
)
def test_a_rank_that_is_lost_while_torch_distributed_starts_is_named(lose, named):
    def start():
        from iris.runtime.rendezvous import Rendezvous

        if os.environ["RANK"] == "1":
            Rendezvous.init_process_group = lambda *_: lose()
        iris(1 << 20)

    started = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(start, 3, timeout=LIMIT, env={"IRIS_TIMEOUT": "1"})
    assert time.monotonic() - started < 20
    assert re.search(named, str(caught.value)), caught.value
    assert "initialise torch.distributed" in str(caught.value)


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"RANK": "2"}, "RANK=2 is not a rank of WORLD_SIZE=1\nhelp: start ranks with torchrun"),
        ({"WORLD_SIZE": "0"}, "RANK=0 is not a rank of WORLD_SIZE=0\n"),
        ({"RANK": "one"}, "RANK='one' is not a number\nhelp: start ranks with torchrun"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK='' is not a number\n"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port\nhelp: use a free one below"),
    ],
    ids=str,
)
def test_a_bad_environment_says_what_is_wrong(env, text):
    with pytest.raises(LaunchError) as caught:
        launch(_join, 1, timeout=LIMIT, env=env)
    assert f"ConfigError: {text}" in str(caught.value)


@pytest.mark.parametrize(
    ("serves", "text"),
    [
        ("0", "the port is in use\nhelp: set MASTER_PORT to a free one, or start ranks with"),
        ("True", "no answer in 0.3 s\nhelp: see whether rank 0 or the launcher died"),
    ],
    ids=["rank 0 serves", "a launcher serves"],
)
def test_a_port_that_another_program_has(serves, text):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        env = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": serves, "IRIS_TIMEOUT": "0.3"}
        with pytest.raises(LaunchError) as caught:
            launch(_join, 1, timeout=LIMIT, env=env)
    assert f"iris.iris: connect to the store at 127.0.0.1:{port}: {text}" in str(caught.value)
