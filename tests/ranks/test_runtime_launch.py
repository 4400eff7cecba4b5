"""The launcher: results, every kind of failure, and nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from iris.errors import ConfigError, LaunchError, PeerError
from iris.runtime.context import iris
from iris.runtime.launch import launch
from iris.runtime.pool import RankPool

pytestmark = pytest.mark.ranks
LIMIT = 60


def _where():
    ctx = iris(1 << 20)
    return ctx.get_rank(), ctx.get_num_ranks(), os.getpid()


@pytest.mark.parametrize("nprocs", [1, 2, 5])
def test_results_come_in_rank_order_from_processes_that_end(nprocs):
    results = launch(_where, nprocs, timeout=LIMIT)
    assert [(rank, world) for rank, world, _ in results] == [(r, nprocs) for r in range(nprocs)]
    assert not any(_is_alive(pid) for _, _, pid in results)


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_arguments_and_closures_travel():
    factor = 3

    def times(x, plus=0):
        return x * factor + plus

    assert launch(times, 2, 5, plus=1, timeout=LIMIT) == [16, 16]


def test_the_environment_reaches_ranks(monkeypatch):
    monkeypatch.setenv("IRIS_SOME_TEST", "yes")

    def read():
        return [os.environ.get(n) for n in ("IRIS_SOME_TEST", "EXTRA", "RANK", "LOCAL_WORLD_SIZE")]

    assert launch(read, 2, timeout=LIMIT, env={"EXTRA": "1"})[1] == ["yes", "1", "1", "2"]
    assert launch(read, 2, timeout=LIMIT, env=lambda r: {"EXTRA": f"r{r}"})[1][1] == "r1"


def test_a_world_has_a_rank():
    with pytest.raises(ConfigError, match="nprocs=0"):
        launch(_where, 0)


def _fail(rank, how):
    ctx = iris(1 << 20)
    if ctx.cur_rank == rank:
        how()
    ctx.barrier()
    ctx.barrier()


def test_an_assert_is_reported_and_peers_say_why():
    def wrong():
        assert 1 + 1 == 3, "arithmetic"

    started = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(_fail, 3, 1, wrong, timeout=LIMIT)
    assert time.monotonic() - started < 15
    text = str(caught.value)
    lines = text.splitlines()
    assert lines[0] == "_fail: 3 of 3 ranks failed"
    assert lines[1].startswith("--- rank 1: AssertionError: arithmetic")
    assert 'test_runtime_launch.py", line' in text
    assert "assert 1 + 1 == 3" in text
    assert "PeerError: rank 1 failed: AssertionError: arithmetic" in text
    assert "rank 0 was waiting for it in: barrier of ranks (0, 1, 2)" in text
    assert isinstance(caught.value.__cause__, AssertionError)


def test_a_sudden_exit_is_reported():
    with pytest.raises(LaunchError) as caught:
        launch(_fail, 2, 0, lambda: os._exit(7), timeout=LIMIT)
    assert "--- rank 0: exited with status 7 before it returned" in str(caught.value)
    assert "PeerError: rank 0 (pid " in str(caught.value)


def test_a_crash_shows_the_python_stack():
    def crash():
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(LaunchError) as caught:
        launch(_fail, 2, 1, crash, timeout=LIMIT)
    text = str(caught.value)
    assert "--- rank 1: was killed by SIGSEGV before it returned" in text
    assert "in crash" in text


def test_a_hang_shows_where():
    started = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(_fail, 2, 1, lambda: time.sleep(1000), timeout=2)
    assert time.monotonic() - started < 20
    text = str(caught.value)
    assert "was still running after 2 s" in text
    assert "in <lambda>" in text


def test_a_crash_at_exit_is_reported():
    def crash_later():
        import atexit

        if int(os.environ["RANK"]) == 1:
            atexit.register(os.kill, os.getpid(), signal.SIGABRT)
        return "fine"

    with pytest.raises(LaunchError) as caught:
        launch(crash_later, 2, timeout=LIMIT)
    assert "rank 1: was killed by SIGABRT at exit, after it returned" in str(caught.value)


def test_an_exit_status_at_exit_is_reported():
    def exit_later():
        import atexit

        if int(os.environ["RANK"]) == 0:
            atexit.register(os._exit, 5)

    with pytest.raises(LaunchError, match="rank 0: exited with status 5 at exit"):
        launch(exit_later, 2, timeout=LIMIT)


def test_a_result_that_cannot_travel_is_reported():
    with pytest.raises(LaunchError, match="cannot pickle"):
        launch(lambda: (n for n in range(3)), 1, timeout=LIMIT)


def _tensors():
    ones = torch.ones(3)
    return [ones.to(torch.float8_e5m2), ones.to(torch.uint32), ones.to(torch.bfloat16)[::2]]


def test_tensors_of_every_dtype_travel():
    for results in launch(_tensors, 2, timeout=LIMIT):
        for found, expected in zip(results, _tensors(), strict=True):
            assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
            assert found.tolist() == expected.tolist()


def test_a_rank_that_returns_early_is_named():
    def leave():
        ctx = iris(1 << 20)
        if ctx.cur_rank == 0:
            ctx.barrier()

    with pytest.raises(LaunchError, match="PeerError: rank 1 closed its context"):
        launch(leave, 2, timeout=LIMIT)


def test_a_pool_goes_on_after_failures():
    with RankPool(2) as pool:
        first = pool.run(_where)
        with pytest.raises(LaunchError, match="ValueError"):
            pool.run(_fail_in_current)
        assert pool.run(_current_world) == [2, 2]  # same processes, same context
        assert pool.run(os.getpid) == [pid for _, _, pid in first]
        with pytest.raises(LaunchError, match="exited with status 3"):
            pool.run(lambda: os._exit(3))
        assert [rank for rank, _, _ in pool.run(_where)] == [0, 1]
        with pytest.raises(LaunchError, match="ValueError: before the others"):
            pool.run(_fail_before_meeting)
        assert [rank for rank, _, _ in pool.run(_where)] == [0, 1]


def _fail_in_current():
    from iris.runtime.context import current

    if current().cur_rank == 0:
        current().world.sync("first")
        raise ValueError("no luck")
    current().world.sync("first")
    with pytest.raises(PeerError, match="rank 0 failed: ValueError: no luck"):
        current().barrier()


def _fail_before_meeting():
    if os.environ["RANK"] == "1":
        raise ValueError("before the others meet")
    iris(1 << 20)


def _current_world():
    from iris.runtime.context import current

    current().barrier()
    current().zeros(1000)
    return current().num_ranks


# Whole programs, run the way users run them.


def _python(code, *args, **options):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, *args] if code is None else [sys.executable, "-c", code, *args]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def _finish(process):
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    return out


JOB = """
import os, sys, time
from iris.runtime.context import iris
from iris.runtime.launch import launch

def work():
    ctx = iris(1 << 20)
    os.write(1, f"{os.getpid()}\\n".encode())
    while True:
        ctx.barrier()
        if ctx.cur_rank == 0:
            os.write(1, f"at {time.monotonic()}\\n".encode())
        time.sleep(0.05)

if __name__ == "__main__":
    launch(work, 2)
"""


def _leftovers():
    shm = {path.name for path in Path("/dev/shm").iterdir()}
    sockets = {
        line.split()[-1]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if "iris" in line.split()[-1]
    }
    return shm | sockets


def _gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while any(map(_is_alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _children(pid):
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *_children(int(child))]
    return found


@pytest.mark.slow
def test_jobs_run_side_by_side_and_each_ends_alone():
    # pytorch/pytorch#126510, ROCm/ATOM#1511
    before = _leftovers()
    one, other = jobs = [_python(JOB) for _ in range(2)]
    ranks = [[int(job.stdout.readline()) for _ in range(2)] for job in jobs]
    families = [_children(job.pid) for job in jobs]
    assert all(set(pids) < set(family) for pids, family in zip(ranks, families, strict=True))
    os.kill(ranks[0][0], signal.SIGKILL)
    _, err = one.communicate(timeout=30)
    assert one.returncode == 1
    assert "was killed by SIGKILL before it returned" in err
    assert _gone(families[0])
    ended = time.monotonic()
    while float(other.stdout.readline().removeprefix("at ")) < ended:
        pass
    other.kill()  # the launcher, this time
    assert _gone(families[1])
    other.communicate()
    assert _leftovers() <= before
    assert launch(_where, 2, timeout=LIMIT)[1][:2] == (1, 2)


WITH_A_FORK = """
import os, sys, time
from iris.runtime.launch import launch

launch(int, 1)  # starts what forks ranks
if os.fork() == 0:
    time.sleep(30)
    os._exit(0)
launch(lambda: [os.write(1, f"{os.getpid()}\\n".encode()), time.sleep(1000)], 2)
"""


def test_a_fork_of_a_killed_launcher_keeps_no_rank():
    job = _python(WITH_A_FORK)
    pids = [int(job.stdout.readline()) for _ in range(2)]
    (helper,) = set(_children(job.pid)) - {*pids, *_parents(pids)}
    job.kill()
    try:
        assert _gone(pids)
        assert _is_alive(helper)
    finally:
        os.kill(helper, signal.SIGKILL)
    job.communicate()


def _parents(pids):
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
    return {int(stat.rpartition(")")[2].split()[1]) for stat in stats}


IN_A_FORK = """
import os
from iris.runtime.launch import launch

launch(int, 1)
child = os.fork()
for turn in range(5):
    assert launch(lambda: (child, turn), 2) == [(child, turn)] * 2
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_process_and_its_fork_launch_side_by_side():
    _finish(_python(IN_A_FORK))


SCRIPT = """
    import os, sys
    import iris, torch

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the driver has not been started
    assert not torch.cuda.is_available()
    if sys.argv[1:] == ["fail once"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        assert os.environ["RANK"] != "1", "fails before iris.iris()"
    ctx = iris.iris(1 << 20)
    x = ctx.full((4,), ctx.get_rank())
    ctx.barrier()
    if sys.argv[1:] == ["fail"] and ctx.get_rank() == 1:
        raise ValueError("rank 1 gives up")
    ctx.barrier()
    print(sum(int(ctx.heap.peer_tensor(x, r)[0]) for r in range(ctx.get_num_ranks())))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def test_a_plain_script_is_a_world_of_one(script):
    assert _finish(_python(None, script)) == "0\n"


TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


@pytest.mark.slow
def test_torchrun_may_start_ranks_again(script):
    options = ("--nproc-per-node=2", "--max-restarts=1")
    out = _finish(_python(None, *TORCHRUN, *options, script, "fail once"))
    # Each rank prints its 1; the lines of several processes may run into one another.
    assert "".join(out.split()) == "11"


def test_under_torchrun_peers_say_why_a_rank_died(script):
    job = _python(None, *TORCHRUN, "--nproc-per-node=3", script, "fail")
    _, err = job.communicate(timeout=LIMIT)
    assert job.returncode != 0
    assert "ValueError: rank 1 gives up" in err
    assert "PeerError: rank 1 failed: ValueError: rank 1 gives up" in err
