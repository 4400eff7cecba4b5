"""Which device a rank works on, and which ranks share one."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from iris import config
from iris.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """A rank's device, and a name for it that means the same in every process."""

    device: torch.device
    uuid: str

    def share(self) -> "Share":
        """What this rank tells others of its device."""
        partitioned = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in os.environ
        return Share(self.uuid, compute_units(self.device), partitioned)

    @classmethod
    def choose(cls, local_rank: int) -> "Placement":
        """Take the device that the program chose, else the one of this local rank, else the CPU."""
        wanted = config.device()
        if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
            return cls(torch.device("cpu"), "cpu")
        if not torch.cuda.is_available():
            raise ConfigError(
                "IRIS_DEVICE=cuda, but this process sees no GPU",
                help="check CUDA_VISIBLE_DEVICES, or set IRIS_DEVICE=auto",
            )
        index = _index(local_rank)
        torch.cuda.set_device(index)
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        return cls(torch.device("cuda", index), uuid)


class Share(NamedTuple):
    """A rank's device, how many compute units of it the driver shows, and whether those are its own
    (an MPS partition).
    """

    uuid: str
    units: int
    partitioned: bool


def _index(local_rank: int) -> int:
    bound = getattr(dist.group.WORLD, "bound_device_id", None) if dist.is_initialized() else None
    if bound is not None:
        return int(bound.index)
    if torch.cuda.is_initialized():
        return torch.cuda.current_device()
    return local_rank % torch.cuda.device_count()


def sharing(shares: Sequence[Share], uuid: str) -> int:
    """Return how many ranks work on a GPU (1 on CPU ranks)."""
    return 1 if uuid == "cpu" else sum(share.uuid == uuid for share in shares)


def usable_units(shares: Sequence[Share]) -> int:
    """Return how many compute units a persistent grid of any rank may fill.

    Ranks that share a GPU get equal parts of it: grids that wait for each other must all fit. The
    smallest part counts, so that all ranks divide work alike.
    """
    return min(
        max(1, share.units // (1 if share.partitioned else sharing(shares, share.uuid)))
        for share in shares
    )


def simulation(ranks: int, gpus: int) -> str:
    """What to tell of ``ranks`` that share ``gpus``, and how they wait less."""
    text = f"simulation: {ranks} ranks run on {gpus} GPU{'s' * (gpus > 1)}"
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if os.path.exists(f"{folder}/control"):
        return text
    return (
        f"{text} in turn, so that a wait for a peer takes milliseconds; they run at once "
        "where `nvidia-cuda-mps-control -d` was run before"
    )


def compute_units(device: torch.device) -> int:
    """Return the number of SMs or CUs of a GPU; for the CPU, of cores this process may use."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return available_cores()


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that this process gave it; CPU ranks work at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
