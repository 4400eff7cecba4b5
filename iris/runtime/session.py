"""Ranks for an interactive session: their output comes with the call, and Ctrl-C stops it."""

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from iris.errors import IrisError, LaunchError, PeerError
from iris.runtime.pool import Environment, RankPool, _cause, _error
from iris.runtime.transport import dumps
from iris.runtime.worker import Failure

_STOP_SECONDS = 5.0  # for ranks to come back after Ctrl-C
_CHUNK = 1 << 16


class _Output:
    """What one rank writes to one of its outputs, shown line by line with its rank."""

    def __init__(self, label: str, stream: str) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._label = label
        self._stream = stream  # by name: a notebook replaces sys.stdout
        self._rest = b""

    def relay(self) -> bool:
        """Show whole lines. Return whether anything came."""
        try:
            data = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._show(lines)
        return bool(data)

    def finish(self) -> None:
        """Show all that was written, also a line without its end."""
        while self.relay():
            pass
        if self._rest:
            self._show([self._rest])
            self._rest = b""

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        self.close_writer()
        os.close(self.reader)

    def _show(self, lines: Sequence[bytes]) -> None:
        stream = getattr(sys, self._stream)
        for line in lines:
            stream.write(f"{self._label}{line.decode(errors='replace')}\n")
        if lines:
            stream.flush()


class Session(RankPool):
    """A pool whose ranks keep state for the user, so that none is replaced in silence.

    What ranks write appears during the call, each line with its rank. Ctrl-C interrupts the ranks
    and leaves them usable. After a death every call raises ``PeerError`` until ``restart``.

    Example::

        with Session(4) as session:
            session.call("hello", print, "hello")          # [rank 0] hello ...
    """

    def __init__(self, nprocs: int, env: Environment = None) -> None:
        super().__init__(nprocs, env)
        self._shown: list[_Output] = []
        self._lost = ""
        self._stop_by: float | None = None

    def call(self, name: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(*args)`` on every rank and return the results in rank order.

        Raises the error itself where all ranks raise the same ``IrisError``; ``LaunchError`` with
        every failing rank's frames for any other; ``KeyboardInterrupt`` after Ctrl-C.
        """
        __tracebackhide__ = True  # a notebook shows the user's frames only
        message = dumps((dumps((fn, args, {})), ()))
        self._stop_by = None
        try:
            self._start()
            for rank in self._ranks:
                rank.send(message)
            results, failures = self._collect(None, None)
        except BaseException:
            self._discard()
            raise
        finally:
            for output in self._shown:
                output.finish()
        if not failures:
            return [pickle.loads(results[rank].value) for rank in range(self.nprocs)]
        self._recover(failures)
        self._note_deaths(failures)
        if self._stop_by is not None:
            raise KeyboardInterrupt
        cause = _cause(failures)
        if isinstance(cause, IrisError) and _alike(failures, self.nprocs):
            raise cause
        raise _report(name, failures, self.nprocs) from cause

    def restart(self) -> None:
        """End all ranks; the next call starts new ones."""
        self._discard()
        self._lost = ""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process of each rank; empty while none runs."""
        return tuple(rank.pid for rank in self._ranks)

    def _note_deaths(self, failures: Sequence[tuple[int, Failure]]) -> None:
        dead = [
            f"rank {rank} {failure.headline}" for rank, failure in failures if not failure.reported
        ]
        if not self._ranks:
            self._lost = f"the mesh lost its ranks: {'; '.join(dead) or 'they did not recover'}"

    def _start(self) -> None:
        if self._lost:
            raise PeerError(
                self._lost, help="mesh.restart() starts new ones; what they kept is lost"
            )
        super()._start()
        for output in self._shown:
            output.close_writer()

    def _outputs(self) -> tuple[int, int]:
        label = f"[rank {len(self._ranks)}] "
        out, err = _Output(label, "stdout"), _Output(label, "stderr")
        self._shown += out, err
        return out.writer, err.writer

    def _wait(self, channels: Sequence[Connection], seconds: float | None) -> Sequence[object]:
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                ready = wait(
                    [*channels, *(output.reader for output in self._shown)], self._left(end)
                )
                for output in self._shown:
                    if output.reader in ready:
                        output.relay()
            except KeyboardInterrupt:
                self._interrupt(channels)
                continue
            answered = [channel for channel in channels if channel in ready]
            if answered or (end is not None and time.monotonic() >= end):
                return answered
            if self._stop_by is not None and time.monotonic() >= self._stop_by:
                self._signal(channels, signal.SIGKILL)

    def _left(self, end: float | None) -> float | None:
        ends = [moment for moment in (end, self._stop_by) if moment is not None]
        return max(0.01, min(ends) - time.monotonic()) if ends else None

    def _interrupt(self, channels: Sequence[Connection]) -> None:
        """Stop the ranks that still run; the second time, end them."""
        again = self._stop_by is not None
        self._stop_by = time.monotonic() + _STOP_SECONDS
        self._signal(channels, signal.SIGKILL if again else signal.SIGINT)

    def _signal(self, channels: Sequence[Connection], number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.channel in channels and not rank.join(0):
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    def _discard(self) -> None:
        super()._discard()
        shown, self._shown = self._shown, []
        for output in shown:
            output.finish()
            output.close()


def _alike(failures: Sequence[tuple[int, Failure]], nprocs: int) -> bool:
    """Whether every rank failed, all in the same words."""
    return len(failures) == nprocs and len({failure.headline for _, failure in failures}) == 1


def _report(name: str, failures: Sequence[tuple[int, Failure]], nprocs: int) -> LaunchError:
    """The failures, and in one line the ranks that failed only because they waited for those."""
    waited = sorted(rank for rank, failure in failures if failure.by_peer)
    if not 0 < len(waited) < len(failures):
        return _error(name, failures, nprocs)
    text = _error(name, [each for each in failures if not each[1].by_peer], nprocs)
    noun = "rank" if len(waited) == 1 else "ranks"
    return LaunchError(f"{text}\n--- {noun} {', '.join(map(str, waited))} waited for them")
