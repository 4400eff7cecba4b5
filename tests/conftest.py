"""Fixtures shared by all tests."""

from collections.abc import Callable, Iterator

import pytest

from iris.runtime.context import current_or_none
from iris.testing import SharedRanks


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, SharedRanks]]:
    pools: dict[int, SharedRanks] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(_pools: dict[int, SharedRanks]) -> Callable[[int], SharedRanks]:
    """Return a function from a world size to a shared pool of that many ranks: ``ranks(4).run(fn,
    *args)``.
    """

    def pool(nprocs: int) -> SharedRanks:
        if nprocs not in _pools:
            _pools[nprocs] = SharedRanks(nprocs)
        return _pools[nprocs]

    return pool


@pytest.fixture(autouse=True)
def _no_context_left() -> Iterator[None]:
    """Close a context that a test made in this process."""
    yield
    context = current_or_none()
    if context is not None:
        context.close()
