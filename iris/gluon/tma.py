"""Whole tiles to and from peers by TMA (NVIDIA GPUs from Hopper on).

    here = iris.gluon.tma.descriptor(ctx, x, rank, (64, 64))
    there = iris.gluon.tma.descriptor(ctx, y, peer, (64, 64))

    @gluon.jit
    def push(here, there):
        tile = iris.gluon.tma.buffer(here)
        arrived = iris.gluon.tma.arrival()
        iris.gluon.tma.load(here, [0, 0], tile, arrived, 0)
        iris.gluon.tma.store(there, [0, 0], tile)

A tile is in shared memory between; elements outside of a tensor are read as 0 and not written.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris.device.target import bulk_done, together

if TYPE_CHECKING:
    from iris.runtime.context import Iris

# Triton 3.9 renamed them.
_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)


def descriptor(ctx: "Iris", tensor: Tensor, rank: int, block_shape: Sequence[int]) -> Any:
    """Return the descriptor of what ``rank`` has at ``tensor``, by tiles of ``block_shape``.

    ``tensor`` is on the symmetric heap, its last dim contiguous, its other strides multiples of 16
    bytes. Raises ``IrisError`` for one that is not on the heap.
    """
    block = list(block_shape)
    kinds = {1: gl.int8, 2: gl.int16, 4: gl.int32, 8: gl.int64}
    layout = gl.NVMMASharedLayout.get_default_for(block, kinds[tensor.element_size()])
    return TensorDescriptor.from_tensor(ctx.heap.peer_tensor(tensor, rank), block, layout)


@gluon.jit
def buffer(desc):
    """Return shared memory for one tile of ``desc``."""
    return gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def arrival():
    """Return a barrier in shared memory for ``load``; its phases are 0, 1, 0, 1 ..."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def load(desc, coord, tile, barrier, phase):
    """Bring the tile of ``desc`` at ``coord`` into shared memory, and wait for it.

    ``phase`` is 0 for the first load with ``barrier``, then 1, then 0 again.
    """
    mbarrier.expect(barrier, desc.block_type.nbytes)
    _load(desc, coord, barrier, tile)
    mbarrier.wait(barrier, phase)


@gluon.jit
def store(desc, coord, tile):
    """Write ``tile`` to ``desc`` at ``coord``, and wait until it has arrived there.

    So a signal may follow.
    """
    hopper.fence_async_shared()
    _store(desc, coord, tile)
    bulk_done()
    together()
