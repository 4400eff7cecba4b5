"""A thread that ends this rank's device waits when a peer is lost, before they time out."""

import threading
from typing import TYPE_CHECKING

from iris.runtime.board import Board

if TYPE_CHECKING:
    from iris.device.watch import Watch

_PERIOD_SECONDS = 0.5


class Watchdog:
    """Looks at all peers now and then; GPU ranks have one (host waits look for themselves)."""

    def __init__(self, board: Board, watch: "Watch") -> None:
        self._board = board
        self._watch = watch
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="iris-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(_PERIOD_SECONDS):
            for rank in self._board.pages:
                reason = self._board.loss(rank)
                if reason is not None:
                    self._watch.abort(reason)
                    return
