"""Pickle functions so that they run, and are quoted in tracebacks, in another process."""

import copyreg
import io
import linecache
import os
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle
import torch


def dumps(value: object) -> bytes:
    """Pickle ``value``; functions and classes of ``__main__`` go by value, with their file names.

    Source that is in no file (a notebook's cell) goes along.
    """
    if "triton" in sys.modules:
        import iris.device.pickling  # noqa: F401  (kernels travel too)
    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def _torch_ops() -> Any:
    return torch.ops


# cloudpickle takes any function that reads an ``ops`` attribute beside torch to need this module.
copyreg.pickle(type(torch.ops), lambda _: (_torch_ops, ()))


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    build, args = _cloud_reduce(code)
    name = code.co_filename
    lines = () if os.path.exists(name) else tuple(linecache.getlines(name))
    return _build_code, (build, args, _title(name), lines)


def _title(path: str) -> str:
    """``In[5]`` where ``path`` stands for the fifth cell of this notebook, else ``path``."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cells = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return f"In[{cells[path]}]" if path in cells else path


def _build_code(
    build: Callable[..., CodeType], args: tuple[Any, ...], name: str, lines: tuple[str, ...]
) -> CodeType:
    if lines and name not in linecache.cache:
        linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
    return build(*args).replace(co_filename=name)


_cloud_reduce = cloudpickle.CloudPickler.dispatch_table[CodeType]


class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Cloudpickle, except that it keeps file names, which it drops to make its output stable."""

    dispatch_table = cloudpickle.CloudPickler.dispatch_table.new_child({CodeType: _reduce_code})
