"""How ranks find each other: torch.distributed's store, from a launcher, from torchrun, or from
nobody (a world of one).
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from iris import config
from iris.errors import ConfigError, PeerError, TimeoutError

ABORT_KEY = "iris/abort"


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
        """Find the world: the default process group, else torchrun's variables, else this process
        alone.
        """
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
        """Return every rank's text under ``key``. Raises ``TimeoutError`` naming the ranks that
        never came.
        """
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
                    f"{what}: rank {self.rank} waited {waited:.1f} s for rank {names} of {self.size}",
                    help="every rank must call it; see whether those ranks died, or raise IRIS_TIMEOUT",
                )
            time.sleep(min(0.05, 1e-3 + waited / 20))
        return [store.get(str(rank)).decode() for rank in range(self.size)]

    def count(self, key: str) -> int:
        """Return how often this rank has asked for ``key``, this time included."""
        return int(self.store.add(f"iris/{key}/{self.rank}", 1))

    def init_process_group(self, own_gpu: bool) -> None:
        """Initialise torch.distributed where nobody did. ``own_gpu``: every rank has a GPU to
        itself.
        """
        if self.local_size == self.size:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "cpu:gloo,cuda:nccl" if own_gpu and dist.is_nccl_available() else "gloo"
        store = PrefixStore("iris/default", self.store)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)


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
