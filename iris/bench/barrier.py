"""The device barrier beside torch's, and beside a kernel that does nothing: the floor, since ranks
that share a GPU share what launches kernels. Runs on every rank.
"""

from argparse import Namespace
from collections.abc import Iterator

import torch

import iris
from iris.bench.kernels import nothing_kernel
from iris.bench.peers import symmetric
from iris.bench.timing import Row, time_graphs


def measure(args: Namespace) -> Iterator[Row]:
    """Barriers back to back in a CUDA graph."""
    ctx = iris.current()
    _, handle = symmetric(64)
    calls = {
        "empty kernel": lambda _: nothing_kernel[(1,)](num_warps=1),
        "iris": lambda _: ctx.device_barrier(),
        "torch": lambda _: handle.barrier(),
    }
    times = time_graphs(calls, handle.barrier)
    for name, time in times.items():
        yield Row("barrier", {"ranks": ctx.num_ranks}, name, time)
    torch.cuda.synchronize()
