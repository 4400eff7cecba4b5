"""What a call of a tiny program costs on CPU ranks, beside the same by gloo.

``python benchmarks/small_call.py --ranks 4``: all_gather, two small products, reduce_scatter; in
microseconds a call on the slowest rank, the least and the median of many rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console

import iris
from iris import P

ROUNDS, CALLS = 40, 50


@iris.spmd(in_specs=(P("tp"), P(None, "tp"), P("tp")), out_specs=P("tp"))
def program(x, up, down):
    return iris.reduce_scatter(iris.all_gather(x, "tp") @ up @ down, "tp")


def by_gloo(x, up, down):
    """The same by process-group calls; gloo's reduce_scatter is an all_reduce too."""
    whole = x.new_empty(x.shape[0] * dist.get_world_size(), x.shape[1])
    dist.all_gather_into_tensor(whole, x)
    result = whole @ up @ down
    dist.all_reduce(result)
    return result.chunk(dist.get_world_size())[dist.get_rank()]


def measure(call: Callable[[], object], calls: int) -> list[float]:
    """Microseconds of a call, by round."""
    ctx, times = iris.current(), []
    for _ in range(5):
        call()
    for _ in range(ROUNDS):
        ctx.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls * 1e6)
    return times


def worker() -> dict[str, list[float]]:
    iris.iris(1 << 22)
    torch.manual_seed(dist.get_rank())
    operands = torch.rand(2, 8), torch.rand(8, 4), torch.rand(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(program(*operands), by_gloo(*operands))
        return {
            "iris": measure(lambda: program(*operands), CALLS),
            "gloo": measure(lambda: by_gloo(*operands), 5),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    results = iris.launch(worker, ranks, timeout=300, env={"OMP_NUM_THREADS": "1"})
    for name in results[0]:
        slowest = max((result[name] for result in results), key=statistics.median)
        Console().print(
            f"{name}: median {statistics.median(slowest):.0f}, least {min(slowest):.0f}"
        )


if __name__ == "__main__":
    main()
