"""What ``IRIS_CHECK=1`` looks at, and when: guards of the heap, and the order of accesses."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

from iris.errors import CheckError
from iris.runtime.devices import synchronize
from iris.runtime.groups import Group
from iris.runtime.heap import STRAY_STORE, Heap, slab_bytes

if TYPE_CHECKING:
    from iris.check.races import RaceCheck
    from iris.device.watch import Watch
    from iris.runtime.copy_proxy import Engine

_SHOWN = 4


class Checks:
    """The checks of one rank. On CPU ranks accesses are noted from ``start`` to ``stop``."""

    def __init__(self, world: Group, heap: Heap, races: "RaceCheck | None") -> None:
        self.races = races
        self._world = world
        self._heap = heap

    @classmethod
    def create(cls, world: Group, heap: Heap, watch: "Watch", engine: "Engine | None") -> "Checks":
        """Collective over the world."""
        if heap.device.type != "cpu":
            return cls(world, heap, None)
        from iris.check.races import RaceCheck  # brings in triton

        counter = heap.allocate(16, internal=True)
        counter.tensor.zero_()
        world.sync("prepare IRIS_CHECK")
        slabs = [(base, base + slab_bytes(heap.capacity)) for base in heap.bases]
        races = RaceCheck.create(world, slabs, counter.peers[0], watch.hidden, heap.holder)
        races.keep = counter
        if engine is not None:
            races.recorder.elsewhere = engine.memory
        return cls(world, heap, races)

    def start(self) -> None:
        """Begin to note accesses."""
        if self.races is not None:
            self.races.start()
            self._world.board.observer = self.races.recorder

    def stop(self) -> None:
        """Note no more."""
        if self.races is not None:
            self._world.board.observer = None
            self.races.stop()

    def renew(self) -> None:
        """Forget what was noted: waits ran out, and what they order is not known."""
        if self.races is not None:
            self.races.clear()

    def look(self, group: Group, ordered: bool = False) -> None:
        """Raise ``CheckError`` on every member where any finds a fault. Collective over ``group``.

        The order of accesses is looked at where ``group`` is the world. ``ordered``: all that
        happened so far is before all that comes.
        """
        synchronize(self._heap.device)
        with nullcontext() if self.races is None else self.races.recorder.silence():
            faults: dict[tuple[str, ...], str] = {(text,): text for text in self._heap.faults()}
            help = STRAY_STORE if faults else None
            if self.races is not None and group is self._world:
                faults |= self.races.follow(ordered)
            told = group.exchange_object("tell what was found", (faults, help))
        found: dict[tuple[str, ...], str] = {}
        helps: list[str] = []
        for faults, help in told:
            found = {**faults, **found}
            helps += [help] if help else []
        if found:
            more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
            text = "\n".join([*list(found.values())[:_SHOWN], *more])
            raise CheckError(text, help=helps[0] if helps else None)
