"""What a call through a local mesh costs: ``python benchmarks/local_mesh.py [ranks]``.

Prints the median and the 10th and 90th percentile over many calls, in milliseconds, for programs so
small that only the way there and back counts.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

import iris
from iris import P

CALLS = 500


def measure(call: Callable[[], object]) -> tuple[float, float, float]:
    """10th percentile, median and 90th percentile of a call, in milliseconds."""
    for _ in range(20):
        call()
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    tenths = statistics.quantiles(times, n=10)
    return tenths[0], statistics.median(times), tenths[-1]


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    with iris.local_mesh(ranks) as mesh, torch.no_grad():
        split = iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(lambda x: 2 * x)
        summed = iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P())(
            lambda x: iris.all_reduce(x.sum(0), "tp")
        )
        product = iris.spmd(mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))(
            lambda x, w: iris.all_gather(x, "tp", dim=0) @ w
        )
        x, w = torch.ones(8, 16), torch.ones(16, 8)
        calls = {
            "plain function: mesh.run(int)": lambda: mesh.run(int),
            "no communication: 2 * x": lambda: split(x),
            "replicated result: all_reduce": lambda: summed(x),
            "all_gather @ w": lambda: product(x, w),
        }
        load = os.getloadavg()[0]
        sys.stdout.write(f"{ranks} CPU ranks, {os.cpu_count()} cores, load {load:.1f}; ms a call\n")
        for name, call in calls.items():
            low, median, high = measure(call)
            sys.stdout.write(f"{name:32} {median:6.2f}   ({low:.2f} to {high:.2f})\n")


if __name__ == "__main__":
    main()
