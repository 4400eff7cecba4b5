"""What a rank has of its GPU while all ranks work: measured, kept for the cost model of later
programs, and shown beside what is shipped. Runs on every rank.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import iris
from iris.bench.kernels import nothing_kernel, store_kernel
from iris.bench.peers import library
from iris.bench.stages import is_right, random_tensor
from iris.bench.timing import Call, Row, Time, time_graphs
from iris.lower.cost import Profile, profile_of, wave
from iris.lower.kernels import collectives
from iris.lower.tuned import save_profile
from iris.runtime.context import Iris

SIZE = (2048, 4096, 4096)  # of products for the rates; half of each for fp32
STEP = (512, 4096, 4096)  # of the one after which ranks meet
ELEMENTS = 1 << 25  # of 4 bytes, that are moved at a time: more than an L2 cache holds
_BLOCK = 2048  # elements that a program of the storing kernel moves at a time


@dataclass(frozen=True)
class Figure:
    """One number of a profile: how it is called, in which unit, that of seconds or a second."""

    name: str
    unit: str
    per_unit: float
    get: Callable[[Profile], float]


FIGURES = (
    Figure("multiprocessors", "", 1, lambda p: p.units),
    Figure("bf16 products", "TFLOP/s", 1e12, lambda p: p.rates[2]),
    Figure("fp8 products", "TFLOP/s", 1e12, lambda p: p.rates[1]),
    Figure("fp32 products", "TFLOP/s", 1e12, lambda p: p.rates[4]),
    Figure("memory, read and written", "GB/s", 1e9, lambda p: p.bandwidth),
    Figure("loads and stores by one multiprocessor", "GB/s", 1e9, lambda p: p.moves),
    Figure("stores to the next rank", "GB/s", 1e9, lambda p: p.link),
    Figure("one more kernel in a graph", "us", 1e-6, lambda p: p.launch),
    Figure("a flag to a peer and back", "us", 1e-6, lambda p: p.latency),
    Figure("a kernel that meets peers", "us", 1e-6, lambda p: p.meet),
    Figure("waiting for the slowest after a product", "waves", 1, lambda p: p.straggle),
)


def measure(args: Namespace) -> Iterator[Row]:
    """All figures of the profile, shipped and measured; the measured ones are kept."""
    del args
    ctx = iris.current()
    name = torch.cuda.get_device_name()
    shipped = profile_of(name).shared(ctx.ranks_on_device, ctx.get_usable_units())
    found = profile_from(_measured(ctx), shipped, ctx.num_ranks)
    save_profile(ctx, replace(found, name=f"{name}, measured"))
    for figure in FIGURES:
        point = {"what": figure.name, "in": figure.unit}
        for label, profile in (("shipped", shipped), ("measured", found)):
            value = figure.get(profile) / figure.per_unit
            yield Row("device profile", point, label, Time(*3 * (value,)), unit=figure.unit)


def profile_from(times: Mapping[str, Time], shipped: Profile, ranks: int) -> Profile:
    """The profile that microseconds of ``_measured`` come to.

    What was not measured stays as shipped: products that were wrong, and to meet others where one
    rank meets nobody.
    """
    seconds = {name: time.median * 1e-6 for name, time in times.items()}
    work = 2.0 * SIZE[0] * SIZE[1] * SIZE[2]
    products = {1: ("fp8", work), 2: ("bf16", work), 4: ("fp32", work / 8)}
    rates = {
        size: work / seconds[name] for size, (name, work) in products.items() if name in seconds
    }
    stored = 4 * ELEMENTS
    found = replace(
        shipped,
        rates={**shipped.rates, **rates},
        bandwidth=2 * stored / seconds["copy"],
        moves=2 * stored / seconds["store"] / shipped.units,
        launch=seconds["nothing"],
    )
    if ranks == 1:
        return found
    found = replace(
        found,
        link=stored / seconds["put"],
        latency=max(1e-7, seconds["barrier"] - seconds["nothing"]),
        meet=seconds["one row"],
    )
    if "step" not in seconds:
        return found
    waited = max(0.0, seconds["in step"] - seconds["step"] - seconds["barrier"])
    return replace(found, straggle=waited / wave(*STEP[:2], 2, found))


def _measured(ctx: Iris) -> dict[str, Time]:
    """Microseconds of everything but wrong products: cuBLAS is not right in every share of a GPU.
    Collective.
    """
    calls = _movers(ctx)
    kinds: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("bf16", SIZE, torch.bfloat16),
        ("fp8", SIZE, torch.float8_e4m3fn),
        ("fp32", tuple(n // 2 for n in SIZE), torch.float32),
        ("step", STEP, torch.bfloat16),
    ]
    for name, size, kind in kinds:
        product, want = _product(size, kind)
        if is_right(product, want):
            calls[name] = product

    def in_step(i: int) -> None:
        calls["step"](i)
        ctx.device_barrier()

    if "step" in calls:
        calls["in step"] = in_step
    return time_graphs(calls, ctx.device_barrier)


def _product(size: tuple[int, ...], kind: torch.dtype) -> tuple[Call, Tensor]:
    """A product by the vendor's library, and its right result."""
    x = random_tensor(size[0], size[1], seed=1).to(kind)
    w = random_tensor(size[2], size[1], seed=2).to(kind).T
    out = torch.empty(size[0], size[2], device=x.device, dtype=kind)
    return library([(x, w)], out), x.float() @ w.float()


def _movers(ctx: Iris) -> dict[str, Call]:
    """What moves bytes, launches and meets."""
    rank, peer = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks
    bases, grid = ctx.get_heap_bases(), (4 * ctx.get_usable_units(),)
    x, out = ctx.zeros(2, ELEMENTS, dtype=torch.int32)
    row = torch.ones(1, SIZE[2], device=x.device, dtype=torch.bfloat16)
    total = torch.empty_like(row)
    reduce = collectives.all_reduce(ctx, ctx.world, row.shape, "sum", row.dtype)
    reduce.warm(row, out=total)
    ctx.barrier()  # kernels are loaded on all ranks

    def store(to: int) -> None:
        store_kernel[grid](x, out, bases, ELEMENTS, rank, to, BLOCK=_BLOCK)

    return {
        "copy": lambda _: out.copy_(x),
        "store": lambda _: store(rank),
        "put": lambda _: store(peer),
        "nothing": lambda _: nothing_kernel[(1,)](num_warps=1),
        "barrier": lambda _: ctx.device_barrier(),
        "one row": lambda _: reduce(row, out=total),
    }
