"""What the Iris class offers when something went wrong: look, wait, and start again."""

import time
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from iris import config
from iris.errors import PeerError, TimeoutError
from iris.runtime.board import LOST, RESETS, Board
from iris.runtime.checks import Checks
from iris.runtime.devices import synchronize
from iris.runtime.groups import Group, names

if TYPE_CHECKING:
    from iris.device.watch import Watch
    from iris.runtime.copy_proxy import Engine


class Counting(Protocol):
    """What counts launches, on all ranks alike."""

    def restart(self) -> None:
        """Count from 0 again."""


class Recovery:
    """Methods of the Iris class; see there."""

    checks: Checks | None
    device: torch.device
    watch: "Watch"
    world: Group
    counting: "weakref.WeakSet[Counting]"
    _board: Board
    _engine: "Engine | None"
    _groups: dict[tuple[int, ...], Group]

    def check(self) -> None:
        """With ``IRIS_CHECK=1``, look for writes beside blocks and, on CPU ranks, for races.

        Collective over the world. Raises ``CheckError`` on all ranks; see docs/checking.md.
        """
        if self.checks is not None:
            self.checks.look(self.world)

    def reset(self) -> None:
        """Make the context usable again after a wait ran out. Collective over the world.

        Programs stay compiled, tensors and the heap stay as they are; results of calls that were
        cut short have no meaning. Flags of your own are yours to set back. Raises ``PeerError``
        where a rank is gone, and ``TimeoutError`` where one does not come.

        Example::

            try:
                y = mlp(x, w_up, w_down)
            except iris.TimeoutError:
                ctx.reset()                     # on every rank
        """
        self._board.check_open()
        if self._board.page.state != LOST:
            self.watch.abort("ctx.reset() was called")  # this rank's kernels may be waiting
        synchronize(self.device)
        self._gather()
        self.renew()
        self._gather()

    def renew(self) -> None:
        """Forget failures and unfinished waits.

        Only while no rank is in any call (``RankPool`` between tasks, and ``reset``).
        """
        if self._engine is not None:
            self._engine.renew()
        self._board.page.renew()
        for group in self._groups.values():
            group.renew()
        for stage in list(self.counting):
            stage.restart()
        self.watch.renew()
        if self.checks is not None:
            self.checks.renew()

    def _gather(self) -> None:
        """Meet all ranks, whatever state their groups are in."""
        board, deadline = self._board, time.monotonic() + config.timeout()
        goal = board.page.words[RESETS] + 1
        board.page.words[RESETS] = goal
        while missing := [r for r, page in board.pages.items() if page.words[RESETS] < goal]:
            gone = {r: board.trouble(r) for r in missing if board.pages[r].state != LOST}
            reasons = [text for text in gone.values() if text is not None]
            late = time.monotonic() > deadline
            if reasons or late:
                board.page.words[RESETS] = goal - 1
            if reasons:
                raise PeerError("; ".join(reasons) + "\n  ctx.reset() needs every rank")
            if late:
                raise TimeoutError(
                    f"ctx.reset(): rank {board.rank} waited {config.timeout():g} s for "
                    f"{names(missing)}",
                    help="call it on every rank",
                )
            time.sleep(1e-3)
