"""Time a function on the host's clock, or on the GPU's where there is one."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from iris import config
from iris.errors import ConfigError
from iris.runtime.context import current_or_none

_FLUSH_BYTES = 256 << 20  # more than any L2 cache
_MODES: dict[str, Callable[[list[float]], float | list[float]]] = {
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "median": statistics.median,
    "all": list,
}


def _nothing() -> None:
    """Do nothing."""


def do_bench(
    fn: Callable[[], Any],
    barrier_fn: Callable[[], Any] = _nothing,
    preamble_fn: Callable[[], Any] = _nothing,
    n_warmup: int = 25,
    n_repeat: int = 100,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> float | list[float]:
    """Return the time of one call of ``fn`` in milliseconds.

    Before each call ``barrier_fn`` and ``preamble_fn`` run, outside the measured time, and on a
    GPU the L2 cache is emptied. ``return_mode`` is "mean", "min", "max", "median" or "all" (a
    list of ``n_repeat`` times). ``quantiles`` (from 0 to 1) return these instead: a list, or one
    number where one is asked for.

    Example::

        ms = iris.do_bench(lambda: ctx.zeros(1000, 1000), barrier_fn=ctx.barrier)
    """
    if return_mode not in _MODES:
        raise ConfigError(
            f"return_mode={return_mode!r} is not allowed", help="use one of: " + ", ".join(_MODES)
        )
    n_warmup = config.whole("n_warmup", n_warmup, 0)
    n_repeat = config.whole("n_repeat", n_repeat, 1)
    if quantiles is not None and not all(0 <= q <= 1 for q in quantiles):
        raise ConfigError(f"quantiles={quantiles!r} must be numbers from 0 to 1")
    for _ in range(n_warmup):
        barrier_fn()
        preamble_fn()
        fn()
    measure = _on_gpu if _gpu_is_used() else _on_host
    times = measure(fn, barrier_fn, preamble_fn, n_repeat)
    if quantiles is None:
        return _MODES[return_mode](times)
    points = torch.tensor(list(quantiles), dtype=torch.float64)
    found: list[float] = torch.quantile(torch.tensor(times, dtype=torch.float64), points).tolist()
    return found[0] if len(found) == 1 else found


def _gpu_is_used() -> bool:
    context = current_or_none()
    return torch.cuda.is_available() if context is None else context.device.type == "cuda"


def _on_host(
    fn: Callable[[], Any], barrier: Callable[[], Any], preamble: Callable[[], Any], repeat: int
) -> list[float]:
    times = []
    for _ in range(repeat):
        barrier()
        preamble()
        started = time.perf_counter()
        fn()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def _on_gpu(
    fn: Callable[[], Any], barrier: Callable[[], Any], preamble: Callable[[], Any], repeat: int
) -> list[float]:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in "se"] for _ in range(repeat)]
    for start, end in pairs:
        barrier()
        preamble()
        flush.zero_()
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]
