"""Tensors that a process and its ranks see at once: the controller allocates, the ranks open."""

import ctypes
import io
import math
import mmap
import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from iris.errors import HeapExhaustedError, UnsupportedError
from iris.runtime.arena import Shelf
from iris.runtime.segments import Address, Segment
from iris.runtime.transport import Pickler

_SMALL_ALIGN, _PAGE = 64, mmap.PAGESIZE
_GIVEN_BACK = 1 << 24  # bytes from which a freed block's pages go back to the system


class SharedMemory:
    """One segment as the ranks of a controller see it: tensors by their place in it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._base = segment.base

    @classmethod
    def open(cls, address: Address) -> "SharedMemory":
        """Map the controller's memory. Raises ``PeerError`` when it is gone."""
        return cls(Segment.open(address, "the controller"))

    def tensor(
        self,
        offset: int,
        dtype: torch.dtype,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the tensor at ``offset`` bytes, contiguous by default; nothing is copied."""
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        memory = self.segment.memory
        if stride is None:
            count = math.prod(shape)
            return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(
                tuple(shape)
            )
        span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        flat = torch.frombuffer(memory, dtype=dtype, count=span, offset=offset)
        return flat.as_strided(shape, stride)

    def loads(self, data: bytes, place: Callable[[Tensor, bool], Tensor]) -> Any:
        """Undo ``SharedArena.dumps``. ``place`` gets each tensor in shared memory, and whether it
        came from a GPU, and returns what stands for it.
        """
        return _Unpickler(data, self, place).load()


class SharedArena(SharedMemory):
    """The controller's side: allocates. A block is free again when its last tensor is gone.

    The segment is as large as the machine's memory, but pages exist only once they are touched.

    Example::

        arena = SharedArena.create()
        x = arena.empty((1024, 1024), torch.float32)
        arena.find(x)                               # 0, its offset
    """

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        self._shelf = Shelf()
        self._dropped: deque[tuple[int, int]] = deque()  # filled by finalizers, at any time

    @classmethod
    def create(cls, nbytes: int | None = None) -> "SharedArena":
        """Make the segment, by default of the size of the machine's memory."""
        return cls(Segment.create(nbytes or os.sysconf("SC_PHYS_PAGES") * _PAGE, "mesh"))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor on the segment. Raises ``HeapExhaustedError``."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        self.free_dropped()
        align = _PAGE if nbytes >= _PAGE else _SMALL_ALIGN
        limit = self.segment.address.nbytes
        offset = self._shelf.fit(nbytes, align, limit)
        if offset is None:
            raise HeapExhaustedError(
                f"a tensor of {nbytes} bytes does not fit into the {limit} bytes shared with ranks",
                help="drop tensors that the mesh returned, or split the call",
            )
        self._shelf.take(offset, nbytes)
        owner = (ctypes.c_ubyte * nbytes).from_buffer(self.segment.memory, offset)
        weakref.finalize(owner, self._dropped.append, (offset, nbytes)).atexit = False
        return torch.frombuffer(owner, dtype=dtype).view(tuple(shape))

    def find(self, tensor: Tensor) -> int | None:
        """Return the offset of ``tensor`` in the segment, or None if it lies elsewhere."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self.segment.address.nbytes else None

    def share(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` if it is on the segment as it is, else a contiguous copy there."""
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = tensor.device if tensor.is_meta else tensor.layout
            raise UnsupportedError(
                f"a {kind} tensor of shape {tuple(tensor.shape)} cannot go to ranks",
                help="pass a dense tensor with values",
            )
        plain = tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())
        if plain and self.find(tensor) is not None:
            return tensor
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def dumps(self, value: object) -> tuple[bytes, list[Tensor]]:
        """Pickle ``value``; its tensors go through the segment, and must be kept meanwhile."""
        with io.BytesIO() as file:
            pickler = _Pickler(file, self)
            pickler.dump(value)
            return file.getvalue(), [shared for _, shared in pickler.seen.values()]

    def free_dropped(self) -> None:
        """Take back the blocks of tensors that are gone, and give the memory of large ones back."""
        while self._dropped:
            offset, nbytes = self._dropped.popleft()
            self._shelf.release(offset)
            if nbytes >= _GIVEN_BACK:
                whole = nbytes // _PAGE * _PAGE
                self.segment.memory.madvise(mmap.MADV_REMOVE, offset, whole)


class _Pickler(Pickler):
    """Leaves tensors in shared memory, and writes down where."""

    def __init__(self, file: io.BytesIO, arena: SharedArena) -> None:
        super().__init__(file)
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a tensor, and its shared form
        self._arena = arena

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        plain = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
        if not plain or value.is_meta:
            return None
        if id(value) not in self.seen:
            self.seen[id(value)] = value, self._arena.share(value)
        shared = self.seen[id(value)][1]
        where = self._arena.find(shared) or 0
        return (where, shared.dtype, tuple(shared.shape), shared.stride()), value.is_cuda


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, memory: SharedMemory, place: Callable[[Tensor, bool], Tensor]
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._memory, self._place = memory, place
        self._seen: dict[object, Tensor] = {}

    def persistent_load(self, found: tuple[Any, bool]) -> Tensor:
        where, on_gpu = found
        if found not in self._seen:
            self._seen[found] = self._place(self._memory.tensor(*where), on_gpu)
        return self._seen[found]
