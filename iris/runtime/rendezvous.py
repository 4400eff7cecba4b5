"""How ranks find each other: through a store of torch.distributed."""

import atexit
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from iris import config
from iris.errors import ConfigError, PeerError, TimeoutError

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

    def init_process_group(self, own_gpu: bool) -> None:
        """Initialise torch.distributed. ``own_gpu``: every rank has a GPU to itself."""
        if self.local_size == self.size and Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        nccl = own_gpu and dist.is_nccl_available()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=PrefixStore("iris/default", self.store),
            rank=self.rank,
            world_size=self.size,
        )
        if nccl:
            atexit.register(_end_process_group)


def _end_process_group() -> None:
    """Let NCCL go in an orderly exit; it warns otherwise."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def _tcp_store(rank: int) -> Store:
    """Connect to the store that torchrun or the launcher serves; without one, rank 0 serves it."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    return _bounded(
        f"iris.iris: connect to the store at {address}:{_required('MASTER_PORT')}",
        lambda: TCPStore(
            address,
            _required("MASTER_PORT"),
            is_master=rank == 0 and not served,
            timeout=timedelta(seconds=config.timeout()),
            wait_for_workers=False,
        ),
    )


def _bounded(what: str, connect: Callable[[], Store]) -> Store:
    try:
        return connect()
    except dist.DistError as error:
        raise TimeoutError(
            f"{what}: {error}",
            help="see whether rank 0 or the launcher died, or raise IRIS_TIMEOUT",
        ) from error


def _integer(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number") from None


def _required(name: str) -> int:
    value = _integer(name)
    if value is None:
        raise ConfigError(
            f"the environment has RANK or WORLD_SIZE, but no {name}",
            help="start ranks with torchrun or iris.launch; for a world of one unset them all",
        )
    return value
