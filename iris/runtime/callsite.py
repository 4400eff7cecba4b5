"""Which line of the user's program called into iris."""

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_LIBRARY = sysconfig.get_path("stdlib") + "/"


@cache
def is_users(path: str) -> bool:
    """Whether code of this file is the user's: not iris, torch, triton or Python's library."""
    if path.startswith(("<", _PACKAGE, _TORCH)) or "/triton/" in path:
        return False
    return not path.startswith(_LIBRARY) or "-packages/" in path


def user_line(frame: FrameType | None = None) -> str:
    """Return ``file.py:line`` of the innermost frame that is the user's, from ``frame`` on."""
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
