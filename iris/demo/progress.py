"""Lines that say what goes on, for people who wait."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


def duration(seconds: float) -> str:
    """Return ``seconds`` as people write it: ``1.5 s``, ``20.0 ms``."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


@contextmanager
def step(console: Console, name: str) -> Iterator[None]:
    """Show ``name`` while the body runs, and then how long it took."""
    console.print(f"{name} …", end=" ")
    start, outcome = time.perf_counter(), "failed"
    try:
        yield
        outcome = duration(time.perf_counter() - start)
    finally:
        console.print(outcome)
