"""Who can give symmetric tensors to kernels: an ``Iris`` context, or torch's symmetric memory."""

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from iris.errors import IrisError, UnsupportedError
from iris.runtime.slabs import symmetric_tensor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _SymmetricMemory


@runtime_checkable
class Provider(Protocol):
    """What a kernel that uses ``iris.load``, ``store``, ``get``, ``put`` and ``copy`` needs.

    The pair that ``allocate_symmetric`` returns is passed to it as two arguments, so the same
    kernel serves tensors of every provider. ``iris.Iris`` is one.
    """

    def allocate_symmetric(
        self, *size: Any, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return an uninitialised tensor and its peer table, int64[ranks]. Collective.

        Entry r is the tensor's address on rank r, as mapped here.
        """

    def get_rank(self) -> int:
        """This rank, from 0."""

    def get_num_ranks(self) -> int:
        """How many ranks there are."""

    def barrier(self) -> None:
        """Wait for this rank's device and for all ranks."""


class TorchSymmetricMemory:
    """Torch's symmetric memory as a ``Provider``, over a process group; the world's by default.

    No Iris context is needed. Raises ``IrisError`` where torch.distributed is not initialised, and
    ``UnsupportedError`` without a GPU: torch has symmetric memory on GPUs only.

    Example::

        provider = iris.TorchSymmetricMemory()
        x, peers = provider.allocate_symmetric(1024, dtype=torch.float32)
        kernel[(1,)](x, peers, provider.get_rank())      # iris.load(x + i, rank, peer, peers)
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise IrisError(
                "TorchSymmetricMemory: torch.distributed is not initialised",
                help="call torch.distributed.init_process_group, or iris.iris(), first",
            )
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "TorchSymmetricMemory needs a GPU", help="take tensors of iris.iris() on CPU ranks"
            )
        self._group = group or dist.group.WORLD
        self._handles: list[_SymmetricMemory] = []  # they keep peers' memory mapped

    def allocate_symmetric(
        self, *size: Any, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``Provider``."""
        assert self._group is not None
        device = torch.device("cuda", torch.cuda.current_device())
        shape = torch.empty(*size, device="meta").shape
        dtype = dtype or torch.get_default_dtype()
        tensor, handle = symmetric_tensor(shape, dtype, device, self._group)
        self._handles.append(handle)
        peers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
        return tensor, peers

    def get_rank(self) -> int:
        """See ``Provider``."""
        return dist.get_rank(self._group)

    def get_num_ranks(self) -> int:
        """See ``Provider``."""
        return dist.get_world_size(self._group)

    def barrier(self) -> None:
        """See ``Provider``."""
        torch.cuda.synchronize()
        dist.barrier(self._group)
