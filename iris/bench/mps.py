"""A private MPS daemon: ranks that share a GPU run at the same time, each on its own part."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

# Share of the GPU for each rank, in percent, that leaves whole partitions free of overlap (58, 26,
# 14 SMs of an H200's 132).
PERCENT = {1: 100, 2: 45, 3: 30, 4: 20, 6: 14, 8: 12}


def share_of(ranks: int) -> int:
    """Percent of a GPU that each of ``ranks`` ranks may use."""
    return PERCENT.get(ranks, max(1, 96 // ranks))


@contextmanager
def private_daemon(needed: bool) -> Iterator[dict[str, str]]:
    """Run an MPS daemon of our own during the block; yields the environment its clients need.

    Without need, or without the daemon's program, yields no environment: ranks are then
    time-sliced.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if not needed or control is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="iris-mps-") as folder:
        paths = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        }
        for path in paths.values():
            os.mkdir(path, 0o700)
        env = os.environ | paths
        subprocess.run([control, "-d"], env=env, check=True, timeout=20)
        try:
            yield paths
        finally:
            subprocess.run([control], input="quit\n", text=True, env=env, timeout=20, check=False)
