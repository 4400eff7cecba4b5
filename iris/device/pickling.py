"""Lets Triton kernels travel to rank processes, as the functions of a script or a notebook do.

Importing this module is enough. A kernel of a module that ranks can import travels by name; one of
``__main__``, or of a module that cloudpickle sends by value, as its function and its source, which
Triton compiles from.
"""

import copyreg
import importlib
import inspect
import linecache
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cloudpickle
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_OPTIONS = ("do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")


def reduce_kernel(kernel: Any) -> Any:
    """How to pickle a kernel, for ``copyreg``."""
    fn = kernel.fn
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    module = sys.modules.get(fn.__module__)
    if fn.__module__ not in by_value and getattr(module, fn.__name__, None) is kernel:
        return getattr, (module, fn.__name__)
    gluon = isinstance(kernel, JITFunction) and kernel.is_gluon()
    options = {name: getattr(kernel, name) for name in _OPTIONS if getattr(kernel, name, None)}
    path = fn.__code__.co_filename
    return _restore, (fn, path, linecache.getlines(path), options, _modules(fn), gluon)


def _modules(fn: Callable[..., Any]) -> dict[str, Any]:
    """Modules that the text of ``fn`` names. Triton reads annotations too, which code does not."""
    words = set(re.findall(r"\w+", inspect.getsource(fn)))
    return {
        name: value
        for name, value in fn.__globals__.items()
        if name in words and isinstance(value, ModuleType)
    }


def _restore(
    fn: Callable[..., Any],
    path: str,
    lines: list[str],
    options: dict[str, Any],
    modules: dict[str, Any],
    gluon: bool,
) -> Any:
    if fn.__code__.co_filename.startswith("In["):  # a notebook's cell, by its number
        path = fn.__code__.co_filename
    fn.__globals__.update(modules)
    linecache.cache[path] = (sum(map(len, lines)), None, lines, path)
    fn.__code__ = fn.__code__.replace(co_filename=path)
    jit = importlib.import_module("triton.experimental.gluon").jit if gluon else triton.jit
    return jit(fn, **options)


copyreg.pickle(JITFunction, reduce_kernel)
copyreg.pickle(InterpretedFunction, reduce_kernel)
