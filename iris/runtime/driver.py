"""The few driver calls that torch does not offer: memory shared by a handle.

Torch's own sharing of tensors hands out pieces of its caching allocator, fails under expandable
segments, and leaves counters in /dev/shm behind when a rank is killed; one plain allocation and
its handle have none of this.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from pathlib import Path
from typing import Any

import torch

from iris.errors import IrisError, UnsupportedError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * _HANDLE_BYTES),)


_CUDA = {
    "allocate": "cuMemAlloc_v2",
    "free": "cuMemFree_v2",
    "export": "cuIpcGetMemHandle",
    "open": "cuIpcOpenMemHandle_v2",
    "close": "cuIpcCloseMemHandle",
}
_HIP = {
    "allocate": "hipMalloc",
    "free": "hipFree",
    "export": "hipIpcGetMemHandle",
    "open": "hipIpcOpenMemHandle",
    "close": "hipIpcCloseMemHandle",
}
_ARGUMENTS = {
    "allocate": (POINTER(c_void_p), c_size_t),
    "free": (c_void_p,),
    "export": (POINTER(_Handle), c_void_p),
    "open": (POINTER(c_void_p), _Handle, c_uint),
    "close": (c_void_p,),
}


class Driver:
    """Allocate memory on the current device, and share it between processes."""

    def __init__(self, library: ctypes.CDLL, names: dict[str, str]) -> None:
        self._calls: dict[str, Any] = {}
        for call, name in names.items():
            function = getattr(library, name)
            function.argtypes, function.restype = _ARGUMENTS[call], c_int
            self._calls[call] = function
        self._library = library

    @classmethod
    def load(cls) -> "Driver":
        """Bind the driver that torch uses."""
        hip = torch.version.hip is not None
        try:
            path = _loaded("libamdhip64") if hip else "libcuda.so.1"
            return cls(ctypes.CDLL(path), _HIP if hip else _CUDA)
        except (OSError, AttributeError) as error:
            raise UnsupportedError(f"cannot use the GPU driver: {error}") from error

    def allocate(self, nbytes: int) -> int:
        """Return the address of ``nbytes`` of device memory."""
        pointer = c_void_p()
        self._do("allocate", byref(pointer), nbytes, why=f"allocate {nbytes} bytes for the heap")
        return pointer.value or 0

    def free(self, address: int) -> None:
        """Free what ``allocate`` returned."""
        self._calls["free"](address)

    def export(self, address: int) -> bytes:
        """Return the handle by which another process opens an allocation."""
        handle = _Handle()
        self._do("export", byref(handle), address, why="share the heap between processes")
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        """Return the address, in this process, of another process's allocation."""
        pointer = c_void_p()
        argument = _Handle.from_buffer_copy(handle)
        self._do("open", byref(pointer), argument, _LAZY_PEER_ACCESS, why="map a peer's heap")
        return pointer.value or 0

    def close(self, address: int) -> None:
        """Unmap what ``open`` returned."""
        self._calls["close"](address)

    def _do(self, call: str, *args: Any, why: str) -> None:
        status = self._calls[call](*args)
        if status:
            name = self._calls[call].__name__
            raise IrisError(
                f"cannot {why}: {name} returned {status} ({self._name(status)})",
                help="see whether the GPU has room for heap_size, and whether ranks may share "
                "memory (containers need one IPC namespace)",
            )

    def _name(self, status: int) -> str:
        if hasattr(self._library, "hipGetErrorName"):
            name = self._library.hipGetErrorName
            name.restype = c_char_p
            return (name(status) or b"").decode()
        text = c_char_p()
        self._library.cuGetErrorName(status, byref(text))
        return (text.value or b"unknown").decode()


def _loaded(stem: str) -> str:
    """Return the path of a library that this process has loaded already."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(stem):
            return path
    raise OSError(f"{stem} is not loaded")
