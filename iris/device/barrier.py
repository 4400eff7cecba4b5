"""The device barrier: one small kernel that can be captured in a CUDA graph.

A group has a row of int32 flags on each rank, one for each rank of the world, which only that rank
writes. A barrier reads the member's own flag (its epoch: it lives on the device, so a replayed
graph goes on counting), writes epoch + 1 into its flag on every member, and waits until the
members' flags here are there. A fast member is at most one barrier ahead, so flags need no second
half and are never set back. The rows exist from the start: a group's first barrier allocates
nothing, and may be captured.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from iris.device.watch import GROUPS, SLOTS
from iris.errors import IrisError, UnsupportedError

if TYPE_CHECKING:
    from iris.runtime.context import Iris
    from iris.runtime.groups import Group

_MOST_RANKS = 64  # bits of a mask of ranks


class DeviceBarrier:
    """The barrier of one group.

    Example::

        barrier = DeviceBarrier.create(ctx, ctx.group([0, 2]), taken=[])
        with torch.cuda.graph(graph):
            barrier()
    """

    def __init__(self, ctx: "Iris", group: "Group", row: int) -> None:
        self.row = row
        self._ctx = ctx
        self._group = group
        self._what = f"device_barrier of ranks {', '.join(map(str, group.ranks))}"
        self._stage = ctx.watch.stage(self._what, range(ctx.num_ranks), self)
        # A flag has to have one holder in the warp (see target.py), which on AMD is 64 wide.
        least = 64 if torch.version.hip else 32
        self._lanes = max(least, 1 << (ctx.num_ranks - 1).bit_length())

    @classmethod
    def create(cls, ctx: "Iris", group: "Group", taken: Sequence[int]) -> "DeviceBarrier":
        """Agree on a row of flags outside ``taken``, this rank's rows in use.

        Collective over the group, on the host only.
        """
        if ctx.num_ranks > _MOST_RANKS:
            raise UnsupportedError(f"device_barrier serves up to {_MOST_RANKS} ranks")
        answers = group.exchange_object("device_barrier", list(taken))
        free = set(range(SLOTS, SLOTS + GROUPS)).difference(*answers)
        if not free:
            raise IrisError(
                f"device_barrier: a rank of {group.ranks} uses it in {GROUPS} groups already",
                help="use fewer groups, or barrier(group=...)",
            )
        return cls(ctx, group, min(free))

    def __call__(self) -> None:
        """Make the current stream wait until every member's has come here.

        On CPU ranks the process itself waits. Raises ``TimeoutError`` if an earlier wait on the
        device ran out: a barrier's own runs out after its launch has returned.
        """
        if self._ctx.device.type == "cuda":
            self._ctx.watch.check()
            self.launch(self._group.ranks)
        else:
            self._group.sync(self._what)

    def launch(self, members: Sequence[int]) -> None:
        """Launch the kernel, on CPU ranks too. With no ``members`` it only gets loaded."""
        from iris.device.barrier_kernel import barrier_kernel

        barrier_kernel[(1,)](
            self._ctx.watch.record,
            _bits(members),
            self._stage,
            self.row,
            self._ctx.cur_rank,
            self._ctx.num_ranks,
            LANES=self._lanes,
            num_warps=1,
        )

    def late(self, epoch: int, read: "Callable[[torch.Tensor], list[int]]") -> dict[int, int]:
        """The members that have not come to barrier ``epoch``, and where they are."""
        flags = read(self._ctx.watch.flags[self.row])
        return {r: flags[r] for r in self._group.ranks if 0 < (epoch - flags[r]) % 2**32 < 2**31}


def prepare(ctx: "Iris") -> None:
    """Compile and load the kernel, which serves every group, so that first calls may be captured.

    Collective over the world; not in a capture.
    """
    DeviceBarrier(ctx, ctx.world, SLOTS).launch([])
    if ctx.device.type == "cuda":
        torch.cuda.synchronize(ctx.device)
    ctx.world.sync("prepare device_barrier")


def _bits(ranks: Sequence[int]) -> int:
    """Return the int64 whose bits are ``ranks``."""
    mask = sum(1 << rank for rank in ranks)
    return mask - (1 << 64) if mask >> 63 else mask
