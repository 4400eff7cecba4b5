"""Every error that iris raises on purpose. Each says what, where and how out; see
docs/errors.md.
"""

import builtins
from collections.abc import Sequence


class IrisError(Exception):
    """Base of all iris errors. ``help`` is the way out, shown as the last line."""

    def __init__(self, message: str, help: str | None = None) -> None:
        self.message = message
        self.help = help
        super().__init__(message if help is None else f"{message}\nhelp: {help}")


class ConfigError(IrisError, ValueError):
    """A knob or an option has a value that is not allowed."""


class SpecError(IrisError, ValueError):
    """Specs and arguments do not fit: structure, rank, axis or size."""


class TypeRuleError(IrisError, TypeError):
    """A value of the graph is used against its distribution (partial, replicated, split)."""


class TraceError(IrisError, RuntimeError):
    """A function cannot be traced: it escapes, branches on values, or changes outer state."""


class GraphError(IrisError, ValueError):
    """A graph is malformed, or its text does not parse."""


class UnsupportedError(IrisError, NotImplementedError):
    """Asked for something that this build, device or version does not do."""


class CollectiveMismatchError(IrisError, RuntimeError):
    """Ranks of one group met in different calls, shapes or dtypes. Raised on all of them.

    ``calls`` says what each member was in, in group order; empty where operands differed.
    """

    def __init__(self, message: str, help: str | None = None, calls: Sequence[str] = ()) -> None:
        self.calls = tuple(calls)
        super().__init__(message, help)


class HeapExhaustedError(IrisError, MemoryError):
    """The symmetric heap has no hole of the size asked for."""


class TimeoutError(IrisError, builtins.TimeoutError):
    """A bounded wait ran out: says who waited for whom, in what, for how long."""


class CheckError(IrisError, RuntimeError):
    """``IRIS_CHECK=1`` found a race, or a write beside a block. Raised on all ranks."""


class PeerError(IrisError, RuntimeError):
    """A peer rank died, closed its context, or raised while this rank waited for it."""


class LaunchError(IrisError, RuntimeError):
    """One or more ranks of a launch failed: every failing rank's traceback is in the text."""


# The way out where ranks are in different calls.
SAME_CALLS = "every rank of a group must make the same calls, with the same shapes and dtypes"
RESET = "call ctx.reset() on every rank, which makes the context usable again"
TRACE_FIRST = (
    f"{SAME_CALLS}; call f.trace(...) first with sizes that one rank's shard does not tell"
)
