"""The few driver calls that torch does not offer: memory shared by a handle, copies on a stream.

Torch's own sharing of tensors hands out pieces of its caching allocator, fails under expandable
segments, and leaves counters in /dev/shm behind when a rank is killed; one plain allocation and
its handle have none of this.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

import torch

from iris.errors import IrisError, UnsupportedError

_HELP = (
    "see whether the GPU has room for heap_size, and whether ranks may share memory (containers "
    "need one IPC namespace)"
)
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Plane(ctypes.Structure):
    """CUDA_MEMCPY2D, one side of it."""

    _fields_ = (
        ("x", c_size_t), ("y", c_size_t), ("kind", c_uint), ("host", c_void_p),
        ("device", c_void_p), ("array", c_void_p), ("pitch", c_size_t),
    )  # fmt: skip


class _Rectangle(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (("src", _Plane), ("dst", _Plane), ("width", c_size_t), ("height", c_size_t))


_ANY_MEMORY = 4  # CU_MEMORYTYPE_UNIFIED, hipMemcpyDefault: the driver looks at the addresses
_INDEPENDENT = 1  # of the default stream
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

# Of each call: its names in CUDA and in HIP, and what it takes.
_CALLS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "allocate": ("cuMemAlloc_v2", "hipMalloc", (POINTER(c_void_p), c_size_t)),
    "free": ("cuMemFree_v2", "hipFree", (c_void_p,)),
    "export": ("cuIpcGetMemHandle", "hipIpcGetMemHandle", (POINTER(_Handle), c_void_p)),
    "open": ("cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle", (POINTER(c_void_p), _Handle, c_uint)),
    "close": ("cuIpcCloseMemHandle", "hipIpcCloseMemHandle", (c_void_p,)),
    "stream": (
        "cuStreamCreateWithPriority", "hipStreamCreateWithPriority",
        (POINTER(c_void_p), c_uint, c_int),
    ),
    "close_stream": ("cuStreamDestroy_v2", "hipStreamDestroy", (c_void_p,)),
    "copy": ("cuMemcpyAsync", "hipMemcpyAsync", (c_void_p, c_void_p, c_size_t, c_void_p)),
    "copy_rows": ("cuMemcpy2DAsync_v2", "hipMemcpy2DAsync", (POINTER(_Rectangle), c_void_p)),
    "write32": (
        "cuStreamWriteValue32_v2", "hipStreamWriteValue32", (c_void_p, c_void_p, c_uint, c_uint),
    ),
    "write64": (
        "cuStreamWriteValue64_v2", "hipStreamWriteValue64",
        (c_void_p, c_void_p, c_ulonglong, c_uint),
    ),
    "capture_mode": (
        "cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode",
        (POINTER(c_uint),),
    ),
}  # fmt: skip
# HIP takes the kind of a copy.
_HIP_COPIES: dict[str, tuple[Any, ...]] = {
    "copy": (c_void_p, c_void_p, c_size_t, c_uint, c_void_p),
    "copy_rows": (c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_uint, c_void_p),
}


class Driver:
    """Allocate memory on the current device, share it between processes, copy it on streams."""

    def __init__(self, library: ctypes.CDLL, hip: bool) -> None:
        self._calls: dict[str, Any] = {}
        for call, (cuda_name, hip_name, takes) in _CALLS.items():
            function = getattr(library, hip_name if hip else cuda_name)
            function.argtypes = _HIP_COPIES.get(call, takes) if hip else takes
            function.restype = c_int
            self._calls[call] = function
        self._hip = hip
        self._library = library

    @classmethod
    def load(cls) -> "Driver":
        """Bind the driver that torch uses."""
        hip = torch.version.hip is not None
        try:
            path = _loaded("libamdhip64") if hip else "libcuda.so.1"
            return cls(ctypes.CDLL(path), hip)
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

    def stream(self, priority: int) -> int:
        """Return a new stream of the current device, independent of the default stream.

        The lower its ``priority`` the sooner it is served; 0 is the default.
        """
        pointer = c_void_p()
        self._do("stream", byref(pointer), _INDEPENDENT, priority, why="make a stream", help=None)
        return pointer.value or 0

    def close_stream(self, stream: int) -> None:
        """Let go of what ``stream`` returned, once its work is done."""
        self._calls["close_stream"](stream)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy between any two places of memory, in the order of ``stream``."""
        kind = (_ANY_MEMORY,) if self._hip else ()
        self._do("copy", dst, src, nbytes, *kind, stream, why="copy", help=None)

    def copy_rows(
        self,
        dst: int,
        dst_pitch: int,
        src: int,
        src_pitch: int,
        width: int,
        height: int,
        stream: int,
    ) -> None:
        """Copy ``height`` rows of ``width`` bytes that start every so many bytes."""
        args: tuple[Any, ...] = (dst, dst_pitch, src, src_pitch, width, height, _ANY_MEMORY)
        if not self._hip:
            planes = [
                _Plane(0, 0, _ANY_MEMORY, None, at, None, pitch)
                for at, pitch in ((src, src_pitch), (dst, dst_pitch))
            ]
            args = (byref(_Rectangle(*planes, width, height)),)
        self._do("copy_rows", *args, stream, why="copy rows", help=None)

    def write(self, address: int, value: int, wide: bool, stream: int) -> None:
        """Write a word once all before it on ``stream`` is done and visible."""
        bits = 64 if wide else 32
        args = (stream, address, value % (1 << bits), 0)
        self._do(f"write{bits}", *args, why="write from a stream", help=None)

    def capture_mode(self, mode: int = _RELAXED) -> int:
        """Set how this thread may work while graphs are captured; return how it might before.

        By default it may do anything, and spoils no capture.
        """
        exchanged = c_uint(mode)
        self._do("capture_mode", byref(exchanged), why="set the capture mode", help=None)
        return exchanged.value

    def _do(self, call: str, *args: Any, why: str, help: str | None = _HELP) -> None:
        status = self._calls[call](*args)
        if status:
            name = self._calls[call].__name__
            raise IrisError(
                f"cannot {why}: {name} returned {status} ({self._name(status)})", help=help
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
