"""The copy engine's part of the Iris class. This version has no copy engine, and says so."""

from typing import Any

from torch import Tensor

from iris.errors import UnsupportedError


class CopyEngine:
    """Host methods that need ``engines=("sdma",)``. Without it each raises a RuntimeError."""

    def get_copy_engine_ctx(self) -> Tensor | None:
        """Return the copy engine's device context: None, as this context has no copy engine."""
        return None

    def put(self, *args: Any, **kwargs: Any) -> None:
        """Copy through the copy engine. Raises ``UnsupportedError`` (a RuntimeError)."""
        raise _disabled("put")

    def put_tile(self, *args: Any, **kwargs: Any) -> None:
        """Copy a tile through the copy engine. Raises like ``put``."""
        raise _disabled("put_tile")

    def put_tiles(self, *args: Any, **kwargs: Any) -> None:
        """Copy tiles through the copy engine. Raises like ``put``."""
        raise _disabled("put_tiles")

    def quiet(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the copy engine. Raises like ``put``."""
        raise _disabled("quiet")


def _disabled(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} needs the copy engine, which is disabled in this context",
        help="use torch's copy_ on ctx.heap.peer_tensor(...), or iris.put inside a kernel",
    )
