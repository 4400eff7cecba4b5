"""The copy engine's puts to the next rank, all ranks at once: by the host, by a kernel that asks
for them, and beside them a kernel that stores. Runs on every rank.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

import iris
from iris.bench.kernels import ask_kernel, store_kernel
from iris.bench.timing import Row, Time, time_graphs

SIZES = tuple(4096 << shift for shift in range(0, 17, 2))  # 4 KiB to 256 MiB
_BLOCK = 2048  # elements a program of the storing kernel moves at a time


def measure(args: Namespace) -> Iterator[Row]:
    """Microseconds a put, in a CUDA graph, and the bandwidth that it comes to."""
    ctx = iris.current()
    rank, peer = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks
    left = (ctx.cur_rank - 1) % ctx.num_ranks
    engine, bases = ctx.get_copy_engine_ctx(), ctx.get_heap_bases()
    programs = 4 * ctx.get_usable_units()
    x, out = ctx.zeros(2, SIZES[-1] // 4, dtype=torch.int32)
    x.copy_(torch.arange(len(x), device=x.device) * 3 + rank)

    def contestants(nbytes: int) -> dict[str, Callable[[int], object]]:
        n = nbytes // 4
        grid = (min(programs, -(-n // _BLOCK)),)
        return {
            "host put": lambda _: ctx.put(x[:n], peer, out[:n]),
            "device put": lambda _: ask_kernel[(1,)](engine, x, out, bases, nbytes, rank, peer),
            "store kernel": lambda _: store_kernel[grid](
                x, out, bases, n, rank, peer, BLOCK=_BLOCK
            ),
        }

    bandwidths = []
    for nbytes in SIZES:
        point = {"ranks": ctx.num_ranks, "bytes": nbytes}
        calls = contestants(nbytes)
        right = {}
        for name, call in calls.items():
            out.zero_()
            ctx.barrier()
            call(0)
            ctx.barrier()
            wanted = torch.arange(nbytes // 4, device=x.device) * 3 + left
            right[name] = torch.equal(out[: nbytes // 4], wanted.to(torch.int32))
            ctx.barrier()
        for name, time in time_graphs(calls, ctx.device_barrier).items():
            row = Row("put to the next rank", point, name, time, right[name])
            yield row
            rate = Time(*(nbytes / us / 1e3 for us in (time.median, time.high, time.low)))
            bandwidths.append(replace(row, table="bandwidth of a put", time=rate, unit="GB/s"))
    yield from bandwidths
