"""The local mesh in a session: a real notebook kernel, output, errors, interrupts, deaths, ends."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jupyter_client.manager import start_new_kernel

import iris
from iris import P
from iris.spmd.local import LocalMesh

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with iris.local_mesh(4, heap_size=1 << 24) as mesh:
        yield mesh


def total(x):
    return iris.all_reduce(x.sum(0), "tp")


def _total(mesh):
    return iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P())(total)


class Kernel:
    """A notebook's kernel."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def cell(self, source: str, interrupt_at: str = "") -> dict[str, str]:
        """Run a cell. Return what it shows, by kind: see KINDS.

        ``interrupt_at``: the kernel is interrupted when the cell has printed that.
        """
        number, shown = self.client.execute(textwrap.dedent(source)), dict.fromkeys(KINDS, "")
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                shown[content["name"]] += content["text"]
            elif kind == "error":
                shown["error"] = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
            elif kind in ("execute_result", "display_data"):
                shown[kind] = content["data"]["text/plain"]
            elif kind == "status" and content["execution_state"] == "idle":
                return shown
            if interrupt_at and interrupt_at in shown["stdout"]:
                interrupt_at = ""
                self.manager.interrupt_kernel()


KINDS = ("stdout", "stderr", "execute_result", "display_data", "error")


@pytest.fixture
def kernel(monkeypatch) -> Iterator[Kernel]:
    monkeypatch.delenv("IRIS_DEVICE")
    kernel = Kernel()
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


def test_a_notebook(kernel):
    started = kernel.cell("""
        import os, time, warnings, torch, iris
        from iris import P
        mesh = iris.local_mesh(2)
        mesh
    """)
    assert started["execute_result"] == "LocalMesh(ranks=2: 2 running)"
    f = """
        @iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
        def f(x):
            return x * {}
        f(torch.ones(4))
    """
    assert kernel.cell(f.format(2))["execute_result"] == "tensor([2., 2., 2., 2.])"
    assert kernel.cell(f.format(3))["execute_result"] == "tensor([3., 3., 3., 3.])"
    explained = kernel.cell("f.explain(torch.ones(4))")
    assert explained["execute_result"].strip().startswith("f on tp=2")
    assert (explained["stdout"], explained["display_data"]) == ("", "")
    said = kernel.cell("""
        def hello():
            print("hello")
            warnings.warn("careful")
        mesh.run(hello)
    """)
    assert sorted(said["stdout"].splitlines()) == ["[rank 0] hello", "[rank 1] hello"]
    for rank in (0, 1):
        assert re.search(rf"\[rank {rank}\] In\[\d+\]:3: UserWarning: careful", said["stderr"])
    failed = kernel.cell("""
        def check(rank):
            raise ValueError("bad luck")
        mesh.run(lambda: check(iris.current().get_rank()))
    """)["error"]
    assert failed.count("--- ranks 0, 1: ValueError: bad luck") == 1
    assert re.search(r'File "In\[\d+\]", line 2, in check\n    raise ValueError', failed)
    assert "local.py" not in failed

    hang = """
        def hang():
            print("here", flush=True)
            while iris.current().get_rank() == 0:
                {}
            iris.all_reduce(torch.ones(1))
        mesh.run(hang)
    """
    pids = kernel.cell("print(*mesh.pids)")["stdout"].split()
    stopped = kernel.cell(hang.format("time.sleep(1)"), interrupt_at="[rank 0] here")
    assert "KeyboardInterrupt" in stopped["error"]
    assert kernel.cell("f(torch.ones(2))")["execute_result"] == "tensor([3., 3.])"
    assert kernel.cell("print(*mesh.pids)")["stdout"].split() == pids
    kernel.manager.restart_kernel(now=True)
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, "ranks are left behind"
        time.sleep(0.05)


def test_output_comes_with_its_rank(mesh, capsys):
    def speak():
        rank = iris.current().get_rank()
        sys.stdout.write(f"line of {rank}\nunfinished")
        if rank == 1:
            warnings.warn("careful", stacklevel=1)
            os.system("echo from C")

    mesh.run(speak)
    out, err = capsys.readouterr()
    for rank in range(4):
        lines = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert lines[0] == f"[rank {rank}] line of {rank}"
        assert f"[rank {rank}] unfinished" in lines or rank == 1
    assert "from C" in out
    assert "[rank 1]" in err
    assert "UserWarning: careful" in err
    assert "[rank 0]" not in err


def test_errors_that_all_ranks_raise_come_as_they_are(mesh):
    @iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P())
    def forgotten(x):
        return x.sum(0)

    with pytest.raises(iris.TypeRuleError, match="all_reduce missing"):
        forgotten(torch.ones(4, 2))
    assert torch.equal(_total(mesh)(torch.ones(4, 2)), torch.full((2,), 4.0))


def test_frames_of_every_failing_rank_once(mesh):
    def broken(rank):
        if rank in (1, 2):
            raise ValueError("bad luck")
        if rank == 3:
            raise KeyError("worse") from OSError("the disk")
        iris.all_reduce(torch.ones(1))

    with pytest.raises(iris.LaunchError) as caught:
        mesh.run(lambda: broken(iris.current().get_rank()))
    text = str(caught.value)
    assert text.count("--- ranks 1, 2: ValueError: bad luck") == 1
    assert text.count("--- rank 3: KeyError: 'worse'") == 1
    assert text.count('raise ValueError("bad luck")') == 1
    assert text.count("raised from OSError: the disk") == 1
    assert text.startswith("<lambda>: 3 of 4 ranks failed")
    assert text.endswith("--- rank 0 waited for them")
    assert "local_rank.py" not in text
    assert isinstance(caught.value.__cause__, ValueError | KeyError)
    assert torch.equal(_total(mesh)(torch.ones(4, 2)), torch.full((2,), 4.0))


def test_ranks_that_still_run_are_stopped_and_live_on(mesh):
    def uneven():
        if iris.current().get_rank() == 2:
            raise ValueError("early")
        time.sleep(60)

    pids = mesh.pids
    with pytest.raises(iris.LaunchError) as caught:
        mesh.run(uneven)
    assert str(caught.value).startswith(
        "uneven: 1 of 4 ranks failed\n--- rank 2: ValueError: early"
    )
    assert str(caught.value).endswith("\n--- ranks 0, 1, 3 were stopped")
    assert torch.equal(_total(mesh)(torch.ones(4, 2)), torch.full((2,), 4.0))
    assert mesh.pids == pids


def test_an_error_while_tracing_shows_the_line(mesh, capsys):
    @iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    def f(x):
        return x.no_such_method()

    @iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    def g(x):
        return x @ torch.ones(3, 3)

    with pytest.raises(iris.LaunchError, match=r"return x\.no_such_method\(\)"):
        f(torch.ones(4))
    with pytest.raises(iris.LaunchError, match="a and b must have same reduction dim") as caught:
        g(torch.ones(8, 2))
    assert str(caught.value).count("in g\n") == 1
    assert capsys.readouterr().err == ""


def _interrupt_when(ready) -> None:
    def wait() -> None:
        deadline = time.monotonic() + 20
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait).start()


def test_interrupt_leaves_the_mesh_usable(mesh, tmp_path):
    mesh.run(lambda: os.environ.update(KEPT="yes"))

    def hang(path):
        rank = iris.current().get_rank()
        (path / str(rank)).touch()
        if rank == 0:
            time.sleep(60)
        iris.all_reduce(torch.ones(1))

    _interrupt_when(lambda: len(list(tmp_path.iterdir())) == 4)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        mesh.run(hang, tmp_path)
    assert time.monotonic() - started < 25
    assert torch.equal(_total(mesh)(torch.ones(4, 2)), torch.full((2,), 4.0))
    assert mesh.run(lambda: os.environ.get("KEPT")) == ["yes"] * 4
    assert mesh.run(lambda: iris.current()._board.waiting) == [""] * 4  # else called slow later


def test_a_second_interrupt_ends_ranks_that_do_not_stop(mesh, tmp_path):
    def stubborn(path):
        while iris.current().get_rank() == 1:
            (path / str(time.monotonic_ns())).touch()
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(60)

    for count in (1, 2):
        _interrupt_when(lambda count=count: len(list(tmp_path.iterdir())) == count)
    with pytest.raises(KeyboardInterrupt):
        mesh.run(stubborn, tmp_path)
    with pytest.raises(iris.PeerError, match="rank 1 was killed by SIGKILL"):
        mesh.run(int)
    mesh.restart()
    assert mesh.run(int) == [0] * 4


def shared_kilobytes() -> int:
    return int(Path("/proc/self/status").read_text().partition("RssShmem:")[2].split()[0])


def test_death_restart_and_close(capfd):
    mesh = iris.local_mesh(2, "tp", heap_size=1 << 20, env={"IRIS_SLOW": "7"})
    f, x = _total(mesh), torch.ones(2, 2)
    before = f(x)
    assert mesh.run(lambda: os.environ["IRIS_SLOW"]) == ["7"] * 2
    os.kill(mesh.pids[1], signal.SIGKILL)
    with pytest.raises(iris.LaunchError, match="rank 1: was killed by SIGKILL"):
        f(x)
    with pytest.raises(iris.PeerError, match="rank 1 was killed by SIGKILL") as caught:
        f(x)
    assert str(caught.value).endswith(
        "help: mesh.restart() starts new ones; what they kept is lost"
    )
    mesh.restart()
    after, used = f(x), shared_kilobytes()
    weight = torch.ones(1 << 24)  # its copy is what goes with the mesh
    large = iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(lambda x: x * weight[:2])
    assert torch.equal(large(x), x)
    assert shared_kilobytes() > used + (1 << 15)
    assert repr(mesh) == "LocalMesh(tp=2: 2 running)"
    pids = mesh.pids
    mesh.close()
    mesh.close()
    assert repr(mesh) == "LocalMesh(tp=2: closed)"
    assert shared_kilobytes() < used + (1 << 14)
    assert torch.equal(before, after)
    with pytest.raises(iris.IrisError, match="the local mesh is closed"):
        f(x)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


SCRIPT = """
import os, signal, sys, threading, torch, iris
from iris import P
if sys.argv[1] == "interrupted":  # while the process that forks ranks starts
    start = iris.local_mesh
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        start(2)
    except KeyboardInterrupt:
        mesh = start(2)
else:
    mesh = iris.local_mesh(2)
assert mesh.run(os.getpid) == list(mesh.pids)
if sys.argv[1] == "orphaned":
    os.kill(mesh.run(os.getppid)[0], 9)  # what forks ranks, and what they die with
    for error in (iris.LaunchError, iris.PeerError):
        try:
            while True:
                mesh.run(int)
        except error as found:
            assert "was killed by SIGKILL" in str(found), found
    mesh.restart()
if sys.argv[1] == "restarted":  # by another process
    os.environ["TORCH_OTHER"] = "1"
    mesh.restart()
@iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
def f(x):
    return 2 * x
assert f(torch.ones(4)).tolist() == [2] * 4
print(*mesh.pids, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


WAYS = ("returns", "killed", "restarted", "orphaned")
SLOWLY = [pytest.param(way, marks=pytest.mark.slow) for way in WAYS]


@pytest.mark.parametrize("way_out", ["interrupted", *SLOWLY])
def test_process_exit_leaves_nothing(way_out, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, way_out], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == (-signal.SIGKILL if way_out == "killed" else 0), done.stderr
    assert done.stderr == ""
    pids = done.stdout.split()
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, "ranks are left behind"
        time.sleep(0.05)
