"""Slab out of the CUDA driver's virtual memory: memory only where blocks are.

So ``heap_size`` is a limit and not a cost: memory is committed in chunks as allocations reach
them, and stays until the heap closes.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

from iris.errors import HeapExhaustedError, IrisError, UnsupportedError
from iris.runtime.descriptors import exchange_descriptors
from iris.runtime.groups import Group
from iris.runtime.slabs import DeviceSlab, Mapping

try:
    from cuda.bindings import driver as cuda
except ImportError:
    cuda = None

_CHUNK_BYTES = 32 << 20
_AT_ONCE = 32  # chunks shared at a time: open files are limited, often to 1024 a user in flight


class VirtualSlab(DeviceSlab):
    """Reserves address space for all ranks' heaps and maps chunks as they are used."""

    def __init__(self, spaces: Sequence["_Space"], nbytes: int, device: torch.device, rank: int):
        super().__init__([space.mapping for space in spaces], nbytes, device, rank)
        self._spaces = tuple(spaces)

    @classmethod
    def create(cls, world: Group, nbytes: int, device: torch.device) -> "VirtualSlab":
        """Reserve address space for every rank's heap."""
        if cuda is None or torch.version.hip is not None:
            raise UnsupportedError(
                "allocator_type='vmem' needs an NVIDIA GPU and the package cuda-bindings",
                help="pip install 'iris-spmd[cuda]', or use allocator_type='torch'",
            )
        torch.cuda.synchronize(device)  # makes its context current
        chunk = _chunk_bytes(device)
        spaces = [_Space.reserve(nbytes, chunk, device) for _ in range(world.size)]
        return cls(spaces, nbytes, device, world.index)

    def commit(self, group: Group, offsets: Sequence[int], nbytes: int) -> None:
        """Create this rank's missing chunks, and map those of the other members."""
        spaces = [self._spaces[rank] for rank in group.ranks]
        wanted = [s.chunks(offset, nbytes) for s, offset in zip(spaces, offsets, strict=True)]
        lacking = any(s.lacks(chunks) for s, chunks in zip(spaces, wanted, strict=True))
        if not any(group.exchange_object("grow the heap", lacking)):
            return
        own, mine = spaces[group.index], wanted[group.index]
        problems = group.exchange_object("grow the heap: commit", own.commit(mine))
        if any(problems):
            lines = [f"  rank {r}: {p}" for r, p in zip(group.ranks, problems, strict=True)]
            raise HeapExhaustedError(
                f"the GPU has no memory for {nbytes} more bytes of heap\n" + "\n".join(lines),
                help="drop tensors, or free memory that torch caches with torch.cuda.empty_cache()",
            )
        for at in range(0, max(map(len, wanted)), _AT_ONCE):
            _share(group, spaces, [chunks[at : at + _AT_ONCE] for chunks in wanted])
        group.sync("grow the heap: mapped")

    def close(self) -> None:
        super().close()
        self._spaces = ()


def _share(group: Group, spaces: Sequence["_Space"], wanted: Sequence[range]) -> None:
    """Map these chunks of each member's space into those of the others."""
    own = spaces[group.index]
    exported = own.export(wanted[group.index])
    received = exchange_descriptors(group, "grow the heap: share", exported)
    for space, chunks, descriptors in zip(spaces, wanted, received, strict=True):
        if space is not own:
            space.map(chunks, descriptors)
    for descriptor in (*exported, *(fd for fds in received for fd in fds)):
        os.close(descriptor)


class _Space:
    """Address space for one rank's heap, and the chunks mapped into it."""

    def __init__(self, base: int, chunk: int, device: torch.device, nbytes: int) -> None:
        self._base = base
        self._chunk = chunk
        self._device = device
        self._handles: dict[int, Any] = {}
        handles = self._handles
        self.mapping = Mapping(base, lambda: _unmap(base, chunk, handles, nbytes))

    @classmethod
    def reserve(cls, nbytes: int, chunk: int, device: torch.device) -> "_Space":
        size = -(-nbytes // chunk) * chunk
        base = _do(cuda.cuMemAddressReserve(size, 0, 0, 0), "reserve address space")
        return cls(int(base), chunk, device, size)

    def chunks(self, offset: int, nbytes: int) -> range:
        return range(offset // self._chunk, -(-(offset + nbytes) // self._chunk))

    def lacks(self, chunks: range) -> bool:
        return any(number not in self._handles for number in chunks)

    def commit(self, chunks: range) -> str:
        """Create what is missing. Return "" or why it cannot be."""
        try:
            for number in chunks:
                if number not in self._handles:
                    made = cuda.cuMemCreate(self._chunk, _properties(self._device), 0)
                    self._map(number, _do(made, "commit memory"))
        except IrisError as error:
            return error.message
        return ""

    def export(self, chunks: range) -> list[int]:
        kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return [
            int(_do(cuda.cuMemExportToShareableHandle(self._handles[n], kind, 0), "share memory"))
            for n in chunks
        ]

    def map(self, chunks: range, descriptors: Sequence[int]) -> None:
        """Map a peer's chunks that are not mapped yet."""
        kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        for number, descriptor in zip(chunks, descriptors, strict=True):
            if number not in self._handles:
                opened = cuda.cuMemImportFromShareableHandle(descriptor, kind)
                self._map(number, _do(opened, "open a peer's memory"))

    def _map(self, number: int, handle: Any) -> None:
        self._handles[number] = handle
        at = self._base + number * self._chunk
        access = cuda.CUmemAccessDesc()
        access.location = _properties(self._device).location
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _do(cuda.cuMemMap(at, self._chunk, 0, handle, 0), "map memory")
        _do(cuda.cuMemSetAccess(at, self._chunk, [access], 1), "use mapped memory")


def _unmap(base: int, chunk: int, handles: dict[int, Any], nbytes: int) -> None:
    for number, handle in handles.items():
        cuda.cuMemUnmap(base + number * chunk, chunk)
        cuda.cuMemRelease(handle)
    cuda.cuMemAddressFree(base, nbytes)


def _properties(device: torch.device) -> Any:
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.index
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.requestedHandleTypes = kind
    return properties


def _chunk_bytes(device: torch.device) -> int:
    least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    unit = int(
        _do(cuda.cuMemGetAllocationGranularity(_properties(device), least), "ask the driver")
    )
    return -(-_CHUNK_BYTES // unit) * unit


def _do(answer: tuple[Any, ...], why: str) -> Any:
    """Return the value of a driver call. Raises ``IrisError`` where it failed."""
    status, *values = answer
    if int(status) != 0:
        raise IrisError(f"cannot {why}: {status.name}")
    return values[0] if values else None
