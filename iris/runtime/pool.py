"""Rank processes on this host that run functions for the process that started them."""

import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from iris.errors import ConfigError, LaunchError
from iris.runtime.devices import available_cores
from iris.runtime.rendezvous import ABORT_KEY, GENERATION_KEY
from iris.runtime.transport import dumps
from iris.runtime.worker import RENEW, STACK_SIGNAL, Failure, Result, Setup
from iris.runtime.zygote import Zygote, zygote

Environment = Mapping[str, str] | Callable[[int], Mapping[str, str]] | None
_GRACE_SECONDS = 3.0  # for ranks to report after the first failure
_EXIT_SECONDS = 20.0  # for ranks to end after they returned


class _Rank:
    """One rank process, as the launcher sees it."""

    def __init__(self, number: int, forker: Zygote, setup: Setup, outputs: tuple[int, int]) -> None:
        ours, theirs = socket.socketpair()
        self.number = number
        self._forker = forker
        self._stacks = os.memfd_create("iris-stacks")
        with theirs:
            self.pid = forker.fork([theirs.fileno(), *outputs, self._stacks])
        self.channel = Connection(ours.detach())
        self.status: int | None = None
        self.send(pickle.dumps(setup))

    def send(self, data: bytes) -> None:
        with suppress(OSError):  # if it died, the end of its channel will say so
            self.channel.send_bytes(data)

    def receive(self) -> Result | Failure | None:
        """Return the answer, or None if the rank has hung up."""
        try:
            answer = self.channel.recv()
        except (EOFError, OSError):
            return None
        assert isinstance(answer, Result | Failure)
        return answer

    def join(self, seconds: float) -> bool:
        """Wait for the process to end. Return whether it has."""
        deadline = time.monotonic() + seconds
        while self.status is None:
            self.status = self._forker.reap(self.pid)
            if self.status is None:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.002)
        return True

    def kill(self) -> None:
        if not self.join(0):
            os.kill(self.pid, signal.SIGKILL)  # its id is its own until it is reaped
            self.join(_EXIT_SECONDS)

    def stack(self) -> str:
        """Return the Python stack of the running (or crashed) process, most recent call first."""
        if not self.join(0):
            os.kill(self.pid, STACK_SIGNAL)
            time.sleep(0.1)
        return os.pread(self._stacks, 1 << 16, 0).decode(errors="replace")

    def release(self) -> None:
        self.channel.close()
        os.close(self._stacks)


class RankPool:
    """``nprocs`` rank processes that stay alive between calls. Starts them at the first call.

    ``env`` adds variables to the ranks' environment: a mapping, or a function from rank to
    mapping. A failing function leaves the pool usable: ranks that still answer go on with their
    context, and where one died or hung all are started afresh.

    Example::

        with RankPool(4) as pool:
            pool.run(torch.manual_seed, 0)
            ranks = pool.run(lambda: iris.iris().get_rank())    # [0, 1, 2, 3]
    """

    def __init__(self, nprocs: int, env: Environment = None, *, once: bool = False) -> None:
        if nprocs < 1:
            raise ConfigError(f"nprocs={nprocs}: a world has at least one rank")
        self.nprocs = nprocs
        self._env = env
        self._once = once
        self._ranks: list[_Rank] = []
        self._store: TCPStore | None = None

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank and return the results in rank order.

        Raises ``LaunchError`` with every failing rank's traceback; its ``__cause__`` is the first
        exception. ``timeout`` is in seconds (no limit by default). ``fn`` and its arguments
        travel by value where they are defined in ``__main__``.
        """
        call = dumps((fn, args, kwargs))
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            self._start()
            for rank in self._ranks:
                rank.send(call)
            results, failures = self._collect(deadline, timeout)
        except BaseException:
            self._discard()
            raise
        if not failures:
            return [pickle.loads(results[rank].value) for rank in range(self.nprocs)]
        self._recover(failures)
        raise _error(getattr(fn, "__name__", repr(fn)), failures, self.nprocs) from _cause(failures)

    def close(self) -> None:
        """End the ranks. Raises ``LaunchError`` where one crashed while it ended."""
        ranks = self._ranks
        for rank in ranks:
            rank.channel.close()
        deadline = time.monotonic() + _EXIT_SECONDS
        failures = []
        for rank in ranks:
            if not rank.join(deadline - time.monotonic()):
                failures.append(
                    (rank.number, Failure("did not end after it returned", rank.stack()))
                )
            elif rank.status:
                headline = f"{_ending(rank.status)} at exit, after it returned"
                failures.append((rank.number, Failure(headline, rank.stack())))
        self._discard()
        if failures:
            raise _error("at exit", failures, self.nprocs)

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._discard()

    def _start(self) -> None:
        if self._ranks:
            return
        forker = zygote()
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        threads = max(1, available_cores() // self.nprocs)
        for rank in range(self.nprocs):
            env = self._environment(rank, port, threads)
            setup = Setup(env, list(sys.path), os.getcwd(), threads, self._once)
            self._ranks.append(_Rank(rank, forker, setup, self._outputs()))

    def _outputs(self) -> tuple[int, int]:
        """Descriptors that the next rank writes its output and its messages to."""
        return 1, 2

    def _wait(self, channels: Sequence[Connection], seconds: float | None) -> Sequence[object]:
        """Wait until a rank answers or ends. Return the channels that have something to read."""
        return wait(channels, seconds)

    def _environment(self, rank: int, port: int, threads: int) -> dict[str, str]:
        extra = self._env(rank) if callable(self._env) else self._env or {}
        return {
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.nprocs),
            "LOCAL_WORLD_SIZE": str(self.nprocs),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher serves the store, not rank 0
            "TORCHELASTIC_RESTART_COUNT": "0",
            **extra,
        }

    def _collect(
        self, deadline: float | None, timeout: float | None
    ) -> tuple[dict[int, Result], list[tuple[int, Failure]]]:
        """Wait for every rank's answer; after the first failure only for a short grace."""
        results: dict[int, Result] = {}
        failures: list[tuple[int, Failure]] = []
        waiting = list(self._ranks)
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = self._wait([rank.channel for rank in waiting], left)
            if not ready:
                late = f"was still running {_GRACE_SECONDS:g} s after that"
                if not failures:
                    late = f"was still running after {timeout:g} s"
                failures += [(r.number, Failure(late, r.stack(), bool(failures))) for r in waiting]
                break
            for rank in [rank for rank in waiting if rank.channel in ready]:
                waiting.remove(rank)
                answer = rank.receive()
                if isinstance(answer, Result):
                    results[rank.number] = answer
                    continue
                if answer is None:
                    answer = self._death(rank)
                failures.append((rank.number, answer))
                if len(failures) == 1:
                    self._abort(f"rank {rank.number} failed: {answer.headline}")
                    grace = time.monotonic() + _GRACE_SECONDS
                    deadline = grace if deadline is None else min(deadline, grace)
        return results, failures

    def _death(self, rank: _Rank) -> Failure:
        if not rank.join(_GRACE_SECONDS):
            return Failure("closed its channel to the launcher", rank.stack())
        assert rank.status is not None
        return Failure(f"{_ending(rank.status)} before it returned", rank.stack())

    def _abort(self, message: str) -> None:
        """Tell ranks still on their way into the world; those inside see it on the board."""
        if self._store is not None:
            self._store.set(ABORT_KEY, message)

    def _recover(self, failures: Sequence[tuple[int, Failure]]) -> None:
        """Make the pool usable after a failure.

        Where all ranks answer they are renewed, else all start again at the next call.
        """
        ranks = self._ranks
        if self._once or not all(failure.reported for _, failure in failures):
            self._discard()
            return
        assert self._store is not None
        self._store.delete_key(ABORT_KEY)
        self._store.add(GENERATION_KEY, 1)
        for rank in ranks:
            rank.send(RENEW)
        _, broken = self._collect(time.monotonic() + _GRACE_SECONDS, _GRACE_SECONDS)
        if broken:
            self._discard()

    def _discard(self) -> None:
        """Kill whatever still runs, and forget it."""
        ranks, self._ranks, self._store = self._ranks, [], None
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.release()


def _ending(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name}"


def _cause(failures: Sequence[tuple[int, Failure]]) -> BaseException | None:
    for _, failure in failures:
        if failure.cause is not None and not failure.by_peer:
            cause = pickle.loads(failure.cause)
            assert isinstance(cause, BaseException)
            return cause
    return None


def _error(name: str, failures: Sequence[tuple[int, Failure]], nprocs: int) -> LaunchError:
    """Put all failures into one text: causes first, equal ones once."""
    by_text: dict[tuple[str, str], list[int]] = {}
    for rank, failure in sorted(failures, key=lambda item: item[1].by_peer):
        by_text.setdefault((failure.headline, failure.text), []).append(rank)
    lines = [f"{name}: {len(failures)} of {nprocs} ranks failed"]
    for (headline, text), ranks in by_text.items():
        noun = "rank" if len(ranks) == 1 else "ranks"
        lines.append(f"--- {noun} {', '.join(map(str, sorted(ranks)))}: {headline}")
        lines += [text.rstrip()] if text.strip() else []
    return LaunchError("\n".join(lines))
