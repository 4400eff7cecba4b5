"""One clean process that forks rank processes, so that a rank starts in milliseconds.

NOTE [Zygote]
Importing torch takes seconds; forking a process that has used CUDA, OpenMP or threads is not
safe. So a helper process imports torch and iris, does nothing else, and forks a rank when the
launcher asks. It hears the launcher through a socket pair: when the launcher ends in any way,
even by ``kill -9``, the socket closes and the zygote exits (a fork of the launcher may keep the
socket open: so it also looks now and then whose child it is); ranks ask the kernel to be killed
with the zygote (``PR_SET_PDEATHSIG``). Descriptors of the rank travel with the request, so ranks
write to the launcher's present stdout.
"""

import ctypes
import functools
import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection

from iris.errors import LaunchError

_PR_SET_PDEATHSIG = 1
_FORK, _REAP = b"fork", b"reap"
_REQUEST = struct.Struct("<4sqq")  # verb, number of the request, process id
_REPLY = struct.Struct("<qqq")  # number of the request, value, errno
_RUNNING = -1
_LOOK_SECONDS = 1.0
# What programs need and `import iris` leaves out: slow to import, so done once, before the forks.
_PRELOADED = (
    "iris.spmd.compiling",
    "iris.spmd.stages",
    "torch.distributed.tensor",
    "torch._dynamo.config",  # a trace loads it, and so all of Dynamo
)

# Variables that libraries read when they are imported. All others reach a rank after the fork.
_READ_AT_IMPORT = ("KMP_", "LD_", "MKL_", "OMP_", "PYTHON", "PYTORCH_", "TORCH", "TRITON_")


class Zygote:
    """Launcher's handle on a zygote process. Safe to use from several threads."""

    def __init__(self, control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
        self._control = control
        self._lock = threading.Lock()
        self._asked = 0
        weakref.finalize(self, _hang_up, control, process)

    @classmethod
    def start(cls) -> "Zygote":
        """Start a zygote with the launcher's environment and import path."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = (
            f"import sys; sys.path[:] = {[str(folder) for folder in sys.path]!r}\n"
            f"from iris.runtime.zygote import serve; serve({theirs.fileno()}, {os.getpid()})"
        )
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the launcher's to handle
            )
        return cls(ours, process)

    def fork(self, descriptors: list[int]) -> int:
        """Fork a rank that gets these descriptors (see ``worker.main``). Return its process id."""
        return self._ask(_FORK, 0, descriptors)

    def reap(self, pid: int) -> int | None:
        """Return the exit code of a rank, negative for a signal; None while it runs."""
        try:
            status = self._ask(_REAP, pid, [])
        except LaunchError:
            return -signal.SIGKILL  # its ranks are killed with the zygote
        return None if status == _RUNNING else os.waitstatus_to_exitcode(status)

    def _ask(self, verb: bytes, pid: int, descriptors: list[int]) -> int:
        with self._lock:
            self._asked += 1
            try:
                request = _REQUEST.pack(verb, self._asked, pid)
                socket.send_fds(self._control, [request], descriptors)
                reply = self._control.recv(_REPLY.size)
                while reply and _REPLY.unpack(reply)[0] != self._asked:
                    reply = self._control.recv(_REPLY.size)  # that was for a call that Ctrl-C ended
            except OSError:
                reply = b""
        if not reply:
            _started.cache_clear()  # the next rank comes from another one
            raise LaunchError(
                "the process that forks ranks has ended",
                help="its messages are on stderr; does `python -c 'import torch, iris'` work?",
            )
        _, value, error = _REPLY.unpack(reply)
        if error:
            raise LaunchError(f"cannot {verb.decode()} a rank process: {os.strerror(error)}")
        return int(value)


def zygote() -> Zygote:
    """Return the running zygote; a new one only where what it imported torch under has changed.

    It is kept for the life of the launcher because starting one takes seconds.
    """
    names = sorted(name for name in os.environ if name.startswith(_READ_AT_IMPORT))
    env = tuple((name, os.environ[name]) for name in names)
    return _started(os.getpid(), env, tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _started(pid: int, env: tuple[tuple[str, str], ...], path: tuple[str, ...]) -> Zygote:
    return Zygote.start()


def _hang_up(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _hear(control: socket.socket, launcher: int) -> tuple[bytes, list[int]]:
    """Return the launcher's next request; end the process when there is no launcher any more."""
    while not select.select([control], [], [], _LOOK_SECONDS)[0]:
        if os.getppid() != launcher:
            os._exit(0)
    message, descriptors, _, _ = socket.recv_fds(control, 64, 8)
    if not message:
        os._exit(0)
    return message, descriptors


def serve(fd: int, launcher: int) -> None:
    """Main of the zygote: import once, then fork ranks until the launcher hangs up or ends."""
    from iris.runtime import worker

    for name in _PRELOADED:
        importlib.import_module(name)

    gc.collect()
    gc.freeze()
    me = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)
    control = socket.socket(fileno=fd)
    while True:
        message, descriptors = _hear(control, launcher)
        verb, number, child = _REQUEST.unpack(message)
        if verb == _REAP:
            found, status = os.waitpid(child, os.WNOHANG)
            control.send(_REPLY.pack(number, status if found else _RUNNING, 0))
            continue
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            control.close()
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(1)
            channel, stacks = worker.adopt(descriptors)
            worker.main(Connection(channel), stacks)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(_REPLY.pack(number, max(pid, 0), max(-pid, 0)))
