"""Which line of the user's program called into iris."""

import sys
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"


def user_line() -> str:
    """Return ``file.py:line`` of the innermost frame outside iris and torch's dispatch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
