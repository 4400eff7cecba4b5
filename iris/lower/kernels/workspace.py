"""Symmetric memory of stages: staging, in which the stages of a program take turns, and flags.

NOTE [Turns]
What a stage receives is read before its launch ends, so the stages of a program need one staging,
as large as the largest of theirs. Its two halves are used in turn, launch by launch, whichever
stage it is: a word on the device counts the launches. NOTE [Epochs] holds as for one stage: a rank
at turn t + 2 has passed the waits of t + 1, for which every member has left turn t. For that, the
stages of an arena are launched one after another, in the same order on every rank; and the halves
of all stages meet at one place, so that no first half reaches into a second one. Flags and epochs
are each stage's own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from iris.lower.kernels.protocol import STATE_WORDS
from iris.runtime.devices import synchronize


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Workspace:
    """What a stage has of an arena: flags and counters of its own, staging and scratch in turn.

    ``staging`` and ``flags`` are int64[size]: where every member's are, as addressed from this
    process; ``sums`` a second staging. Each has two halves, of ``half`` and ``half_sums`` bytes;
    ``local`` is this rank's staging. ``runs`` is how many flags each member writes in a run, for
    every run of them; ``scratch`` are bytes on this rank alone. ``together`` is for launches that
    fill what a rank has of its GPU: NOTE [Crowds]. A stage made by itself has an arena of its own.
    """

    local: Tensor
    staging: Tensor
    sums: Tensor
    flags: Tensor
    scratch: Tensor
    state: tuple[Tensor, Tensor, Tensor | None]

    def __init__(
        self,
        ctx: Any,
        group: Any,
        half: int,
        runs: Sequence[int],
        what: str,
        half_sums: int = 0,
        scratch: int = 0,
        together: bool = False,
    ) -> None:
        self._ctx, self._ranks, self._runs = ctx, group.ranks, runs
        self._together = together and ctx.crowded
        self._ends = group.size * sum(runs)  # the first flag of the ends of launches
        self.flag_bytes = round_up(4 * (self._ends + group.size), 256)
        self.half, self.half_sums = half, half_sums
        self.scratch_bytes = scratch
        self.counters: list[Tensor] = []  # that begin at 0
        self.named(what, what)
        arenas = _SHARED.get()
        if arenas is None:
            arena = Arena(ctx, group)
            arena.members.append(self)
            arena.allocate()
        else:
            arenas.setdefault(group, Arena(ctx, group)).members.append(self)

    @property
    def nbytes(self) -> int:
        """Bytes that it needs of the heap, by itself."""
        return self.flag_bytes + 2 * round_up(max(1, self.half), 256) + 2 * self.half_sums

    def place(self, arena: "Arena", first_flag: int) -> None:
        """Lie in an arena, with flags at byte ``first_flag``."""
        self._arena = arena  # kept as long as a stage of it is
        flags = arena.block.tensor[first_flag : first_flag + self.flag_bytes]
        self.flags = arena.peers + first_flag
        middle = arena.middle - self.half
        self.local = arena.block.tensor[middle : middle + 2 * self.half]
        self.staging = arena.peers + middle
        self.sums = arena.peers + (arena.middle_sums - self.half_sums)
        self.scratch = arena.scratch
        state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=flags.device)
        self.state = state, arena.turn, self.flags + 4 * self._ends if self._together else None
        self.counters[:0] = [flags, state, arena.turn]
        self._ctx.counting.add(self)

    def restart(self) -> None:
        """Count launches from 0 again, when no rank is in any."""
        for counter in self.counters:
            counter.zero_()

    def late(self, epoch: int, read: Callable[[Tensor], list[int]]) -> dict[int, int]:
        """The ranks of whose flags one is an epoch behind, and where that is."""
        words = read(self.counters[0].view(torch.int32))
        writers = [rank for run in self._runs for rank in self._ranks for _ in range(run)]
        ends = zip(self._ranks, words[self._ends :], strict=False)
        for flags in (zip(writers, words, strict=False), ends if self._together else ()):
            if found := {rank: word for rank, word in flags if (epoch - word) % 2**32 == 1}:
                return found
        return {}

    @property
    def watch(self) -> tuple[Tensor, int, Tensor | None]:
        """What waits and events take: the rank's record, this stage's number, the trace fields.

        The fields are None, and nothing of events is compiled, while tracing is not enabled.
        """
        tracing = self._ctx.tracing
        return self._ctx.watch.record, self._number, tracing.fields if tracing.enabled else None

    def named(self, what: str, title: str) -> None:
        """Call this ``what`` in errors, alike on all ranks, and ``title`` in timelines."""
        self.what = what
        self._number: int = self._ctx.watch.stage(what, self._ranks, self)
        self._ctx.tracing.titles[self._number] = title


class Arena:
    """One block of the heap for stages that run one after another: NOTE [Turns]."""

    block: Any
    peers: Tensor
    turn: Tensor
    scratch: Tensor
    middle: int  # byte at which the halves of staging meet
    middle_sums: int

    def __init__(self, ctx: Any, group: Any) -> None:
        self.ctx, self.group = ctx, group
        self.members: list[Workspace] = []
        self.flag_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the heap."""
        return int(self.block.nbytes)

    def allocate(self) -> None:
        """Allocate what the members need. Collective over the group."""
        members, self.members = self.members, []
        firsts = []
        for work in members:
            firsts.append(self.flag_bytes)
            self.flag_bytes += work.flag_bytes
        half = round_up(max(1, *(work.half for work in members)), 256)
        half_sums = round_up(max(work.half_sums for work in members), 256)
        self.middle = self.flag_bytes + half
        self.middle_sums = self.middle + half + half_sums
        self.block = self.ctx.heap.allocate(self.middle_sums + half_sums, self.group)
        device = self.block.tensor.device
        self.block.tensor[: self.flag_bytes].zero_()
        self.peers = torch.tensor(self.block.peers, dtype=torch.int64, device=device)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        most = max(work.scratch_bytes for work in members)
        self.scratch = torch.empty(max(1, most // 4), dtype=torch.float32, device=device)
        for work, first in zip(members, firsts, strict=True):
            work.place(self, first)
        synchronize(device)
        # No rank may set a flag before its owner has zeroed it.
        self.group.sync(f"workspace of {', '.join(dict.fromkeys(work.what for work in members))}")


_SHARED: ContextVar[dict[Any, Arena] | None] = ContextVar("iris_arenas", default=None)


@contextmanager
def shared() -> Iterator[dict[Any, Arena]]:
    """Let the stages made in this block share an arena for each group. Collective at its end."""
    arenas: dict[Any, Arena] = {}
    token = _SHARED.set(arenas)
    try:
        yield arenas
    finally:
        _SHARED.reset(token)
    for arena in arenas.values():
        arena.allocate()
