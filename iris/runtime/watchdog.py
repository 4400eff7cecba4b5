"""A thread that looks after the ranks: which are lost, and which wait too long."""

import sys
import threading
import time
from typing import TYPE_CHECKING

from iris import config
from iris.logging import logger
from iris.runtime.board import SLOW, TOLD, Board
from iris.runtime.callsite import user_line

if TYPE_CHECKING:
    from iris.device.watch import Watch

_PERIOD_SECONDS = 0.5
_NOTICED = 0.75  # of the time that counts as slow: waits are noticed late


class Watchdog:
    """Ends this rank's device waits when a peer is lost or left early, and logs waits longer than
    ``IRIS_SLOW``.

    Each rank's thread writes on the board where its main thread is; of the ranks that wait too
    long, the first one logs where all are, once until it goes on.
    """

    def __init__(self, board: Board, watch: "Watch") -> None:
        self._board = board
        self._watch = watch
        self._period = min(_PERIOD_SECONDS, config.slow() / 4)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="iris-watchdog", daemon=True)
        self._lost = ""
        self._since: float | None = None  # when this rank's wait was noticed
        self._told = False

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._period):
            losses = (self._board.loss(rank) for rank in self._board.pages)
            lost = next((text for text in losses if text is not None), "")
            if not lost and self._board.recent is not None:
                lost = self._board.recent.deserted()
            if lost and lost != self._lost:
                self._watch.abort(lost)
            self._lost = lost
            self._look(self._watch.slow_wait())

    def _look(self, device_wait: str) -> None:
        """Say where this rank is, and whether it is slow; then, if so, where all are."""
        now, text = time.monotonic(), device_wait or self._board.waiting
        self._since = (self._since or now) if text else None
        slow = self._since is not None and now - self._since > config.slow() * _NOTICED
        page, recent = self._board.page, self._board.recent
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        page.status = "; ".join(
            part
            for part in (
                text or "in no wait",
                f"last {recent.last_call()}" if recent else "",
                f"at {user_line(frame)}" if frame else "",
            )
            if part
        )
        was_slow, page.words[SLOW] = page.words[SLOW], slow
        if not slow:
            self._told = page.words[TOLD] = False
        elif was_slow and not self._told:  # by now all threads have seen the same
            self._told = True
            peers = self._board.pages.items()
            if not any(p.words[TOLD] or (p.words[SLOW] and r < self._board.rank) for r, p in peers):
                page.words[TOLD] = True
                self._report()

    def _report(self) -> None:
        pages = sorted(self._board.pages.items())
        lines = [f"  rank {rank}: {page.status or 'not looked at yet'}" for rank, page in pages]
        extra = {"iris_rank": self._board.rank, "iris_num_ranks": len(pages)}
        text = f"a wait is longer than {config.slow():g} s (IRIS_SLOW)\n" + "\n".join(lines)
        logger().warning(text, extra=extra)
