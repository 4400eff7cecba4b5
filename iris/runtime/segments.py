"""Memory that several processes of one user share, with nothing to clean up.

NOTE [Segments have no name]
A segment is a ``memfd``: a file that lives only as long as some process holds it open or mapped.
Peers open it through ``/proc/<pid>/fd/<fd>``, which the kernel allows to the same user only. So
there is no name to guess, to collide or to unlink, and ``kill -9`` of any process leaves nothing
behind.
"""

import ctypes
import mmap
import os
import tempfile
from dataclasses import dataclass

from iris.errors import IrisError, PeerError


@dataclass(frozen=True)
class Address:
    """Where a peer finds a segment, and a secret that proves it is the right file."""

    pid: int
    fd: int
    nbytes: int
    secret: bytes


_SECRET_BYTES = 16


class Segment:
    """``nbytes`` of zeroed shared memory, owned by this process or opened from a peer.

    ``memory`` is the mapping; it stays valid while anything refers to it, whatever happens to its
    owner. Pages are committed when first touched, so a large segment costs nothing by itself.

    Example::

        segment = Segment.create(1 << 20, "heap")
        peer_view = Segment.open(segment.address, "rank 0")     # usually in another process
    """

    def __init__(self, memory: mmap.mmap, address: Address, fd: int | None) -> None:
        self.memory = memory
        self.address = address
        self._fd = fd

    @classmethod
    def create(cls, nbytes: int, label: str) -> "Segment":
        """Return a new segment of this process. ``label`` shows in ``/proc/<pid>/maps``."""
        fd = _anonymous_file(label)
        secret = os.urandom(_SECRET_BYTES)
        try:
            os.ftruncate(fd, nbytes + _SECRET_BYTES)
            os.pwrite(fd, secret, nbytes)
            memory = mmap.mmap(fd, nbytes + _SECRET_BYTES)
        except OSError as error:
            os.close(fd)
            raise IrisError(
                f"cannot map {nbytes} bytes of shared memory: {error}",
                help="ask for a smaller heap_size, or raise the limit of this process (ulimit -v)",
            ) from error
        return cls(memory, Address(os.getpid(), fd, nbytes, secret), fd)

    @classmethod
    def open(cls, address: Address, owner: str) -> "Segment":
        """Return a peer's segment, mapped here; messages call the peer ``owner``.

        Raises ``PeerError`` when it is gone or not what ``address`` says.
        """
        name = f"{owner} (pid {address.pid})"
        path = f"/proc/{address.pid}/fd/{address.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise PeerError(f"{name} has ended, and its shared memory with it") from error
        except OSError as error:
            raise PeerError(
                f"cannot open shared memory of {name}: {error.strerror}",
                help="ranks must run on one host, as one user, in one process namespace",
            ) from error
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise PeerError(f"shared memory of {name} belongs to another user")
            if os.pread(fd, _SECRET_BYTES, address.nbytes) != address.secret:
                raise PeerError(f"{name} is not the process that was announced")
            return cls(mmap.mmap(fd, address.nbytes + _SECRET_BYTES), address, None)
        finally:
            os.close(fd)

    @property
    def base(self) -> int:
        """Address of the first byte in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def seal(self) -> None:
        """Close the descriptor that peers opened it by, once all have."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None and os.getpid() == self.address.pid:
            self.seal()


def _anonymous_file(label: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"iris-{label}")
    # Elsewhere peers cannot open it, so the world has one rank; the file is unlinked before it is
    # used.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
