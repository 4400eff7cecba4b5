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
from iris.runtime.groups import names
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
        self._interrupted = False

    def call(self, name: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(*args)`` on every rank and return the results in rank order.

        Raises the error itself where all ranks raise the same ``IrisError``; ``LaunchError`` with
        every failing rank's frames for any other; ``KeyboardInterrupt`` after Ctrl-C.
        """
        __tracebackhide__ = True  # a notebook shows the user's frames only
        message = dumps((fn, args, {}))
        self._stop_by, self._interrupted = None, False
        try:
            self._start()
            for rank in self._ranks:
                rank.send(message)
            results, failures = self._collect(None, None)
        except BaseException as error:
            self._discard()
            self._lost = self._lost or f"the mesh lost its ranks: {type(error).__name__} in a call"
            raise
        finally:
            for output in self._shown:
                output.finish()
        if not failures:
            return [pickle.loads(results[rank].value) for rank in range(self.nprocs)]
        self._stop_by = None
        self._recover(failures)
        self._note_deaths(failures)
        if self._interrupted:
            raise KeyboardInterrupt
        cause = _cause(failures)
        alike = len({failure.headline for _, failure in failures}) == 1
        if isinstance(cause, IrisError) and alike and len(failures) == self.nprocs:
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
        __tracebackhide__ = True
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
        """As in the pool, but ranks whose time is over are stopped as by Ctrl-C, to live on."""
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
                self._stop(channels, at_once=self._interrupted)
                self._interrupted = True
                continue
            answered = [channel for channel in channels if channel in ready]
            if answered:
                return answered
            if self._stop_by is not None and time.monotonic() >= self._stop_by:
                self._stop(channels, at_once=True)
            elif self._stop_by is None and end is not None and time.monotonic() >= end:
                self._stop(channels, at_once=False)

    def _left(self, end: float | None) -> float | None:
        end = end if self._stop_by is None else self._stop_by
        return None if end is None else max(0.01, end - time.monotonic())

    def _stop(self, channels: Sequence[Connection], at_once: bool) -> None:
        """Interrupt the ranks that still run, or end them."""
        self._stop_by = time.monotonic() + _STOP_SECONDS
        number = signal.SIGKILL if at_once else signal.SIGINT
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


def _report(name: str, failures: Sequence[tuple[int, Failure]], nprocs: int) -> LaunchError:
    """The failures, and in one line each the ranks that only waited for those or were stopped."""
    own = [each for each in failures if not each[1].by_peer]
    if not own:
        return _error(name, failures, nprocs)
    text = str(_error(name, own, nprocs))
    others = {True: "were stopped", False: "waited for them"}
    for stopped, what in others.items():
        ranks = [n for n, each in failures if each.by_peer and each.stopped == stopped]
        if ranks:
            text += f"\n--- {names(sorted(ranks))} {what}"
    return LaunchError(text)
