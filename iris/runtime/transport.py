"""Pickle functions, so that they run and are quoted in tracebacks elsewhere, and tensors."""

import copyreg
import io
import linecache
import os
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, cast

import cloudpickle
import torch
from torch import Tensor


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


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Take along as integers what torch pickles but does not read again: fp8, uint16 and such."""
    if tensor.dtype not in torch.storage._new_dtypes():
        return cast(tuple[Any, ...], tensor.__reduce_ex__(2))
    bits = tensor.detach().view(BITS[tensor.itemsize])
    return _build_tensor, (bits, tensor.dtype, tensor.requires_grad)


def _build_tensor(bits: Tensor, dtype: torch.dtype, requires_grad: bool) -> Tensor:
    return bits.view(dtype).requires_grad_(requires_grad)


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Cloudpickle, except that it keeps file names, which it drops to make its output stable, and
    takes tensors of every dtype.
    """

    dispatch_table = cloudpickle.CloudPickler.dispatch_table.new_child(
        {CodeType: _reduce_code, Tensor: _reduce_tensor}
    )
