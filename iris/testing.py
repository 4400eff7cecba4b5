"""Helpers for tests on ranks: telling data, one tolerance table, isolated runs, delays."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from iris.runtime.context import current_or_none
from iris.runtime.pool import RankPool

# Largest relative and absolute difference that counts as equal, for sums of floats.
TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
    torch.float8_e4m3fn: (0.13, 0.13),
    torch.float8_e5m2: (0.26, 0.26),
}


def small_integers(
    shape: Sequence[int], rank: int = 0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return integers from -4 to 4 that differ by rank, row and column.

    Sums and products of some thousands of them are exact in float32.

    Equal arguments give equal values in every process.
    """
    generator = torch.Generator().manual_seed(1000 * seed + rank + 1)
    return torch.randint(-4, 5, tuple(shape), generator=generator).to(dtype)


def shard(x: Tensor, dim: int, index: int, parts: int) -> Tensor:
    """Return part ``index`` of ``x`` along ``dim``: a view, by the rule of torch.chunk."""
    chunk = -(-x.shape[dim] // parts)
    start = min(index * chunk, x.shape[dim])
    return x.narrow(dim, start, max(0, min(chunk, x.shape[dim] - start)))


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert equality within ``TOLERANCE`` of ``dtype`` (that of ``actual``); integers exactly."""
    rtol, atol = TOLERANCE.get(dtype or actual.dtype, (0.0, 0.0))
    torch.testing.assert_close(
        actual.cpu().double(), expected.cpu().double(), rtol=rtol, atol=atol, equal_nan=True
    )


def delay(rank: int, seconds: float = 0.05) -> None:
    """Make one rank late: sleep on ``rank`` and go on at once on the others."""
    context = current_or_none()
    if context is not None and context.cur_rank == rank:
        time.sleep(seconds)


def isolated(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``fn`` and close the context that it leaves open."""
    try:
        return fn(*args, **kwargs)
    finally:
        context = current_or_none()
        if context is not None:
            context.close()


class SharedRanks:
    """A pool that tests share: every run starts without a context and leaves none."""

    def __init__(self, nprocs: int, device: str = "cpu") -> None:
        self.nprocs = nprocs
        self._pool = RankPool(nprocs, env={"IRIS_TIMEOUT": "20", "IRIS_DEVICE": device})

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank; see ``RankPool.run``.

        The test module that ``fn`` is from travels by value.
        """
        module = sys.modules.get(getattr(fn, "__module__", ""))
        if module is not None and Path(module.__file__ or "").name.startswith("test_"):
            cloudpickle.register_pickle_by_value(module)
        return self._pool.run(isolated, fn, *args, timeout=timeout, **kwargs)

    def close(self) -> None:
        """End the ranks."""
        self._pool.close()
