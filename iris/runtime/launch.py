"""Run a function on local rank processes."""

from collections.abc import Callable
from typing import Any

from iris.runtime.pool import Environment, RankPool


def launch(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    timeout: float | None = None,
    env: Environment = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ``nprocs`` new processes; return results in rank order.

    In each, ``iris.iris()`` finds the others. ``timeout`` limits the whole, in seconds (none by
    default); ``env`` adds to the ranks' environment (a mapping, or a function from rank to
    mapping). Functions and classes of ``__main__`` travel by value, others by name. When a rank
    raises, dies, hangs past the timeout or crashes at exit, the others are ended and
    ``LaunchError`` is raised with every failing rank's traceback. Nothing is left behind on any
    way out, ``kill -9`` of this process included.

    Example::

        def hello():
            ctx = iris.iris(1 << 20)
            return ctx.get_rank()

        iris.launch(hello, 4)               # [0, 1, 2, 3]
    """
    with RankPool(nprocs, env, once=True) as pool:
        return pool.run(fn, *args, timeout=timeout, **kwargs)
