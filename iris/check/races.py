"""Puts the logs of all ranks together, and says what nothing orders."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from iris.check.host import HostAccesses
from iris.check.log import LOCAL
from iris.check.order import Detector, Race
from iris.check.programs import Hooks
from iris.check.recorder import Recorder, Tickets

if TYPE_CHECKING:
    from iris.runtime.groups import Group


class RaceCheck:
    """The race detector of a CPU rank, from ``start`` to ``stop``.

    ``name(offset)`` says which allocation of this rank's heap holds a byte.
    """

    def __init__(self, world: "Group", recorder: Recorder, name: Callable[[int], str]) -> None:
        self.recorder = recorder
        self.keep: object = None  # what must live as long
        self._world = world
        self._name = name
        self._detector = Detector(world.size, world.index)
        self._hooks = Hooks(recorder)
        self._host = HostAccesses(recorder)

    @classmethod
    def create(
        cls,
        world: "Group",
        slabs: Sequence[tuple[int, int]],
        counter: int,
        hidden: tuple[int, int],
        name: Callable[[int], str],
    ) -> "RaceCheck":
        """See `Recorder`; ``counter`` is the address of two words that all ranks reach."""
        return cls(world, Recorder(slabs, Tickets(counter), hidden), name)

    def start(self) -> None:
        """Begin to write down."""
        self._hooks.install()
        self._host.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Write down no more."""
        self._host.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._hooks.remove()

    def clear(self) -> None:
        """Forget all that was written down."""
        self.recorder.take()
        self._detector.clear()

    def follow(self, ordered: bool) -> dict[tuple[str, ...], str]:
        """Collective over the world: say which accesses to what this rank owns nothing orders,
        one of each cause.

        ``ordered``: all that happened so far is before all that comes.
        """
        own = self.recorder.take()
        logs = self._world.exchange_object("check the order of accesses", own)
        races = self._detector.follow(logs)
        if ordered:
            self._detector.clear()
        return {race.key: _text(race, self._world.index, self._name) for race in races}


def _text(race: Race, rank: int, name: Callable[[int], str]) -> str:
    count = race.stop - race.start
    nbytes = f"{count} byte{'s' * (count > 1)}"
    place = (
        f"of local memory of rank {rank}"
        if race.owner == LOCAL
        else f"on the heap of rank {rank}, from {name(race.start)}"
    )
    return (
        f"race: nothing orders two accesses to {nbytes} {place}\n  {race.first}\n  {race.second}\n"
        f"  way out: {race.way_out}"
    )
