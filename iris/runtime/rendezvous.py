"""How ranks find each other: through a store of torch.distributed."""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from iris import config
from iris.errors import ConfigError, LaunchError, PeerError, TimeoutError
from iris.runtime.board import Board

T = TypeVar("T")

ABORT_KEY = "iris/abort"
GENERATION_KEY = "iris/generation"


@dataclass(frozen=True)
class Rendezvous:
    """This rank's place in the world, and the store that all ranks share."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    store: Store

    @classmethod
    def join(cls) -> "Rendezvous":
        """Find the world: the default process group, torchrun's variables, or this process."""
        local_rank, local_size = _integer("LOCAL_RANK"), _integer("LOCAL_WORLD_SIZE")
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
            store = dist.distributed_c10d._get_default_store()
        elif "RANK" in os.environ or "WORLD_SIZE" in os.environ:
            rank, size = _required("RANK"), _required("WORLD_SIZE")
            if not 0 <= rank < size:
                raise ConfigError(f"RANK={rank} is not a rank of WORLD_SIZE={size}", help=_START)
            store = _tcp_store(rank)
        else:
            rank, size, store = 0, 1, HashStore()
        return cls(
            rank,
            size,
            rank if local_rank is None else local_rank,
            size if local_size is None else local_size,
            store,
        )

    def gather(self, what: str, key: str, mine: str) -> list[str]:
        """Return every rank's text under ``key``; ``TimeoutError`` names ranks that never came."""
        return _bounded(what, lambda: self._gather(what, key, mine))

    def _gather(self, what: str, key: str, mine: str) -> list[str]:
        store = PrefixStore(f"iris/{key}", self.store)
        store.set(str(self.rank), mine)
        missing = set(range(self.size)) - {self.rank}
        started = time.monotonic()
        while missing:
            missing = {rank for rank in missing if not store.check([str(rank)])}
            waited = time.monotonic() - started
            if missing and self.store.check([ABORT_KEY]):
                raise PeerError(f"{self.store.get(ABORT_KEY).decode()}\n  while waiting in: {what}")
            if missing and waited > config.timeout():
                names = ", ".join(map(str, sorted(missing)))
                raise TimeoutError(
                    f"{what}: rank {self.rank} waited {waited:.1f} s for rank {names} "
                    f"of {self.size}",
                    help="every rank must call it: see whether those died, or raise IRIS_TIMEOUT",
                )
            time.sleep(min(0.05, 1e-3 + waited / 20))
        return [store.get(str(rank)).decode() for rank in range(self.size)]

    def attempt(self) -> str:
        """Return a key for one meeting of all ranks: the number of this rank's meetings so far.

        A launcher raises the generation after a failure, which may have left ranks out of step.
        """
        generation = self.store.add(GENERATION_KEY, 0)
        return f"{generation}/{self.store.add(f'iris/meetings/{generation}/{self.rank}', 1)}"

    def init_process_group(self, own_gpu: bool, board: Board) -> None:
        """Initialise torch.distributed. ``own_gpu``: every rank has a GPU to itself."""
        if self.local_size == self.size and Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        nccl = own_gpu and dist.is_nccl_available()
        what = board.page.status = "initialise torch.distributed"
        _bounded(
            what,
            lambda: dist.init_process_group(
                "cpu:gloo,cuda:nccl" if nccl else "gloo",
                store=PrefixStore("iris/default", self.store),
                rank=self.rank,
                world_size=self.size,
            ),
            lambda late: _check_start(board, what, late),
        )
        if nccl:
            atexit.register(_end_process_group)


def _check_start(board: Board, what: str, late: bool) -> None:
    """Raise for ranks that are lost, and if ``late`` for those that have not begun ``what``."""
    board.check_peers(what, board.pages)
    missing = [str(rank) for rank, page in board.pages.items() if page.status != what]
    if late and missing:
        raise TimeoutError(
            f"{what}: rank {board.rank} waited in vain for rank {', '.join(missing)}",
            help="see where it is, or raise IRIS_TIMEOUT if it is only slow",
        )


def _end_process_group() -> None:
    """Let NCCL go in an orderly exit; it warns otherwise."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def _tcp_store(rank: int) -> Store:
    """Connect to the store that torchrun or the launcher serves; without one, rank 0 serves it."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _required("MASTER_PORT")
    if not 0 < port < 1 << 16:
        raise ConfigError(f"MASTER_PORT={port} is not a port", help="use a free one below 65536")
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    what = f"iris.iris: connect to the store at {address}:{port}"
    serves = rank == 0 and not served
    store = _bounded(
        what,
        lambda: TCPStore(
            address,
            port,
            is_master=serves,
            timeout=timedelta(seconds=config.timeout()),
            wait_for_workers=False,
        ),
    )
    # torchrun's store keeps what ranks said before it started them again.
    return PrefixStore(f"iris/restart {restarts}", store) if restarts != "0" else store


def _bounded(what: str, call: Callable[[], T], check: Callable[[bool], object] = bool) -> T:
    """Return ``call()``, which talks to a store or to peers and may block for ever.

    It does so in a thread, which is left behind when time is up. ``check(late)`` is called
    meanwhile, and with ``late`` at the end; it raises what it finds wrong.
    """
    answer: Future[T] = Future()
    threading.Thread(
        target=_answer, args=(answer, call), name="iris-rendezvous", daemon=True
    ).start()
    deadline = time.monotonic() + config.timeout() + _MARGIN_SECONDS
    while not wait([answer], timeout=_LOOK_SECONDS).done:
        late = time.monotonic() > deadline
        check(late)
        if late:
            raise TimeoutError(f"{what}: no answer in {config.timeout():g} s", help=_GONE)
    try:
        return answer.result()
    except dist.DistError as error:
        check(True)
        if "EADDRINUSE" in str(error):
            raise LaunchError(f"{what}: the port is in use", help=_PORT) from error
        raise TimeoutError(f"{what}: {error}", help=_GONE) from error


def _answer(answer: "Future[T]", call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)


_MARGIN_SECONDS = 2.0  # what has a limit of its own, and says more, comes first
_LOOK_SECONDS = 0.05
_GONE = "see whether rank 0 or the launcher died, or raise IRIS_TIMEOUT"
_PORT = "set MASTER_PORT to a free one, or start ranks with torchrun or iris.launch"
_START = "start ranks with torchrun or iris.launch; for a world of one unset them all"


def _integer(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number", help=_START) from None


def _required(name: str) -> int:
    value = _integer(name)
    if value is None:
        raise ConfigError(f"the environment has RANK or WORLD_SIZE, but no {name}", help=_START)
    return value
