"""Fixtures shared by all tests."""

from collections.abc import Callable, Iterator

import pytest

from iris.runtime.context import current_or_none
from iris.testing import SharedRanks

Pools = dict[tuple[int, str], SharedRanks]


@pytest.fixture(scope="session")
def _pools() -> Iterator[Pools]:
    pools: Pools = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Return where this test's ranks are: "cuda" in tests marked ``gpu``, else "cpu"."""
    return "cuda" if request.node.get_closest_marker("gpu") else "cpu"


@pytest.fixture
def ranks(_pools: Pools, device: str) -> Callable[[int], SharedRanks]:
    """Return a function from a world size to a shared pool: ``ranks(4).run(fn, *args)``."""

    def pool(nprocs: int) -> SharedRanks:
        key = (nprocs, device)
        if key not in _pools:
            _pools[key] = SharedRanks(nprocs, device)
        return _pools[key]

    return pool


@pytest.fixture(autouse=True)
def _own_context(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put contexts of the test process on the test's device, and close one that is left."""
    monkeypatch.setenv("IRIS_DEVICE", device)
    yield
    context = current_or_none()
    if context is not None:
        context.close()
