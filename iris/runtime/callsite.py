"""Which line of the user's program called into iris."""

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
_AS_A_USER = (_PACKAGE + "demo/", _PACKAGE + "hf/")  # written as a user would
_TORCH = str(Path(torch.__file__).parent) + "/"
_LIBRARY = sysconfig.get_path("stdlib") + "/"
_NO_FILES = ("<string>", "<eval_with_key>", "<frozen ", "<iris ")


@cache
def is_users(path: str) -> bool:
    """Whether code of this file is the user's: not iris, torch, triton or Python's library."""
    if path.startswith(_AS_A_USER):
        return True
    if path.startswith((*_NO_FILES, _PACKAGE, _TORCH)) or "/triton/" in path:
        return False
    return not path.startswith(_LIBRARY) or "-packages/" in path


def user_line(frame: FrameType | None = None) -> str:
    """Return ``file.py:line`` of the innermost frame that is the user's, from ``frame`` on."""
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
