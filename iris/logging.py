"""Logging through the standard ``iris`` logger; records carry rank and world size.

Records go to stderr as ``[Iris] [rank/world] message`` until the program configures the root
logger or gives the ``iris`` logger a handler of its own; then they go there.
"""

import logging
import sys
from typing import Any

from iris import config
from iris.errors import ConfigError

DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        rank = getattr(record, "iris_rank", None)
        where = "" if rank is None else f" [{rank}/{getattr(record, 'iris_num_ranks', '?')}]"
        return f"[Iris]{where} {super().format(record)}"


class _StderrHandler(logging.Handler):
    """Writes to the present ``sys.stderr``, and only where nobody else shows the record."""

    def emit(self, record: logging.LogRecord) -> None:
        handlers = {*logging.getLogger().handlers, *logging.getLogger("iris").handlers}
        if handlers == {self} and sys.stderr is not None:
            sys.stderr.write(self.format(record) + "\n")


def logger() -> logging.Logger:
    """Return the ``iris`` logger, with a handler, and a level where the program set none.

    That is INFO, and DEBUG where ``IRIS_LOG`` names topics.
    """
    found = logging.getLogger("iris")
    if not found.handlers:
        handler = _StderrHandler()
        handler.setFormatter(_Formatter())
        found.addHandler(handler)
    if found.level == logging.NOTSET:
        found.setLevel(logging.DEBUG if config.log() else logging.INFO)
    return found


def set_logger_level(level: int | str) -> None:
    """Set the level of the iris logger.

    One of ``iris.DEBUG``, ``iris.INFO``, ``iris.WARNING`` and ``iris.ERROR``.

    Example::

        iris.set_logger_level(iris.DEBUG)
        ctx.debug("now visible")              # [Iris] [0/1] now visible
    """
    try:
        logger().setLevel(level)
    except (TypeError, ValueError):
        raise ConfigError(
            f"level={level!r} is not allowed",
            help="use iris.DEBUG, iris.INFO, iris.WARNING or iris.ERROR",
        ) from None


class RankLogging:
    """Logging methods of the Iris class: each record says which rank wrote it."""

    cur_rank: int
    num_ranks: int

    def _log(self, level: int, message: str) -> None:
        extra: dict[str, Any] = {"iris_rank": self.cur_rank, "iris_num_ranks": self.num_ranks}
        logger().log(level, message, extra=extra, stacklevel=3)

    def debug(self, message: str) -> None:
        """Log ``message`` at debug level."""
        self._log(DEBUG, message)

    def info(self, message: str) -> None:
        """Log ``message`` at info level."""
        self._log(INFO, message)

    def warning(self, message: str) -> None:
        """Log ``message`` at warning level."""
        self._log(WARNING, message)

    def error(self, message: str) -> None:
        """Log ``message`` at error level."""
        self._log(ERROR, message)
