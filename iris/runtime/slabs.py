"""Slabs: one range of memory a rank, mapped into every rank. The heap cuts blocks out of it."""

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from iris.runtime.driver import Driver
from iris.runtime.groups import Group
from iris.runtime.segments import Segment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, _SymmetricMemory


class Slab(Protocol):
    """What a provider of symmetric memory implements. Making one is collective over the world.

    ``bases[rank]`` is the address, in this process, of that rank's memory.
    """

    nbytes: int
    bases: tuple[int, ...]

    def commit(self, group: Group, offsets: Sequence[int], nbytes: int) -> None:
        """Put memory under ``nbytes`` at ``offsets[i]`` of member i, for all members.

        Collective over ``group``. By default it is there from the start, or when it is touched.
        """
        return

    def owner(self, rank: int, offset: int, nbytes: int) -> object:
        """Return a weakly referable object that stands for a range of a rank's memory."""

    def tensor(self, owner: object) -> Tensor:
        """Return uint8[nbytes] over a range; over this rank's own memory it holds ``owner``."""

    def close(self) -> None:
        """Let go of the memory. This rank's own stays mapped while tensors use it."""


class SharedSlab(Slab):
    """Slab of CPU ranks: a shared-memory segment for each."""

    def __init__(self, segments: list[Segment], nbytes: int) -> None:
        self.nbytes = nbytes
        self.bases = tuple(segment.base for segment in segments)
        self._segments = segments

    @classmethod
    def create(cls, world: Group, nbytes: int) -> "SharedSlab":
        """Make this rank's segment and map all others."""
        own = Segment.create(nbytes, "heap")
        segments = []
        for index, address in enumerate(world.exchange_object("share the heap", own.address)):
            peer = f"rank {world.ranks[index]}"
            segments.append(own if index == world.index else Segment.open(address, peer))
        world.sync("map the heaps")
        own.seal()
        return cls(segments, nbytes)

    def owner(self, rank: int, offset: int, nbytes: int) -> object:
        return (ctypes.c_ubyte * nbytes).from_buffer(self._segments[rank].memory, offset)

    @torch.inference_mode(False)  # it is written to in any mode
    def tensor(self, owner: object) -> Tensor:
        return torch.frombuffer(owner, dtype=torch.uint8)

    def close(self) -> None:
        self._segments = []


class Mapping:
    """A rank's device memory as mapped here; ``release`` runs when nothing refers to it."""

    def __init__(self, address: int, release: Callable[[], object]) -> None:
        self.address = address
        weakref.finalize(self, release).atexit = False  # the driver does it at the end of a process


class _Range:
    """A range of a mapping, in the form that torch takes foreign device memory."""

    def __init__(self, mapping: Mapping, offset: int, nbytes: int, local: bool) -> None:
        self.address = mapping.address + offset
        self.nbytes = nbytes
        self.local = local
        self._mapping = mapping

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


class DeviceSlab(Slab):
    """Slab of GPU ranks; by default one allocation a rank, shared by an IPC handle."""

    def __init__(self, mappings: Sequence[Mapping], nbytes: int, device: torch.device, rank: int):
        self.nbytes = nbytes
        self.bases = tuple(mapping.address for mapping in mappings)
        self._mappings = tuple(mappings)
        self._device = device
        self._rank = rank

    @classmethod
    def create(cls, world: Group, nbytes: int, device: torch.device) -> "DeviceSlab":
        """Allocate this rank's memory and open all others'."""
        torch.cuda.synchronize(device)  # makes its context current
        driver = Driver.load()
        base = driver.allocate(nbytes)
        mappings = []
        for index, handle in enumerate(world.exchange("share the heap", driver.export(base))):
            own = index == world.index
            address, release = (base, driver.free) if own else (driver.open(handle), driver.close)
            mappings.append(Mapping(address, partial(release, address)))
        world.sync("map the heaps")
        return cls(mappings, nbytes, device, world.index)

    def owner(self, rank: int, offset: int, nbytes: int) -> object:
        return _Range(self._mappings[rank], offset, nbytes, rank == self._rank)

    @torch.inference_mode(False)
    def tensor(self, owner: object) -> Tensor:
        assert isinstance(owner, _Range)
        if owner.local:
            return torch.as_tensor(owner, device=self._device)
        # torch would place a peer's memory on the peer's device; here it is memory that this
        # device reads.
        storage = torch._C._construct_storage_from_data_pointer(
            owner.address, self._device, owner.nbytes
        )
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def close(self) -> None:
        self._mappings = ()


def create_slab(kind: str, device: torch.device, world: Group, nbytes: int) -> Slab:
    """Make the slab that ``allocator_type`` names, on ``device``. Collective over the world.

    CPU ranks have one kind of memory, whatever is asked for.
    """
    if device.type == "cpu":
        return SharedSlab.create(world, nbytes)
    if kind == "vmem":
        from iris.runtime.vmem import VirtualSlab  # needs cuda-bindings

        return VirtualSlab.create(world, nbytes, device)
    if kind == "symm_mem":
        return _torch_symmetric(world, nbytes, device)
    return DeviceSlab.create(world, nbytes, device)


def symmetric_tensor(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, group: "ProcessGroup"
) -> "tuple[Tensor, _SymmetricMemory]":
    """Return a tensor of torch's symmetric memory and what knows its peers. Collective."""
    # Ranks may share a GPU, which torch refuses by default.
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    from torch.distributed import _symmetric_memory as symm_mem

    tensor = symm_mem.empty(shape, dtype=dtype, device=device)
    return tensor, symm_mem.rendezvous(tensor, group)


def _torch_symmetric(world: Group, nbytes: int, device: torch.device) -> Slab:
    """Let torch's symmetric memory provide the slab."""
    import torch.distributed as dist

    assert dist.group.WORLD is not None  # iris.iris() saw to it
    tensor, handle = symmetric_tensor(torch.Size([nbytes]), torch.uint8, device, dist.group.WORLD)
    held = [tensor, handle]  # by every mapping, through its release
    mappings = [Mapping(address, held.copy) for address in handle.buffer_ptrs]
    return DeviceSlab(mappings, nbytes, device, world.index)
