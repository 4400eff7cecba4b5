"""GPU tests run under a private MPS daemon, so that ranks sharing a GPU wait for each other in
microseconds.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from iris.bench.mps import private_daemon


@pytest.fixture(scope="session", autouse=True)
def _mps(_pools: object) -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    with private_daemon(True) as variables:
        os.environ.update(variables)
        yield
        for pool in _pools.values():
            pool.close()
        for name in variables:
            os.environ.pop(name, None)


@pytest.fixture
def run(ranks: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """Return ``run(fn, world, *args)``: what each of ``world`` ranks of a shared pool returns."""

    def on_ranks(fn: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        return ranks(world).run(fn, *args, timeout=100)  # type: ignore[no-any-return]

    return on_ranks
