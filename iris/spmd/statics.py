"""Keys of arguments that are not tensors: by value, never by a hash of the user's."""

import dataclasses
import enum
import functools
import math
import types
import weakref
from collections.abc import Mapping, Set
from typing import Any

import torch

from iris.errors import SpecError

SIMPLE = (bool, int, float, complex, str, bytes, type(None))
ATOMIC = (torch.dtype, torch.device, torch.layout, torch.memory_format, type, types.ModuleType)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
MAX_DEPTH = 12


def static_key(value: Any, depth: int = 0) -> object:
    """A hashable key that is equal exactly when ``value`` means the same to a trace.

    Numbers and strings by type and value; containers, dataclasses, enums and plain objects by
    their contents; functions, classes and modules by identity; torch modules by what a forward
    pass can read of them.

    Raises SpecError for a value that cannot be compared (a numpy array, a generator, a cycle).
    """
    kind = type(value)
    if kind in SIMPLE:
        if kind is float and (value != value or value == 0.0):
            return ("float", math.copysign(1.0, value), "nan" if value != value else 0.0)
        return (kind, value)
    if depth > MAX_DEPTH:
        raise _refusal(value, "nests too deeply, or contains itself")
    if isinstance(value, torch.Tensor):
        return tensor_identity(value)
    if isinstance(value, (*ATOMIC, enum.Enum)):
        return value
    if isinstance(value, list | tuple):
        return (kind, tuple(static_key(item, depth + 1) for item in value))
    if isinstance(value, Mapping):
        return (
            kind,
            tuple((static_key(k, depth + 1), static_key(v, depth + 1)) for k, v in value.items()),
        )
    if isinstance(value, Set):
        return (kind, frozenset(static_key(item, depth + 1) for item in value))
    if isinstance(value, torch.nn.Module):
        return module_key(value)
    return _object_key(value, depth)


def _object_key(value: Any, depth: int) -> object:
    kind = type(value)
    if isinstance(value, functools.partial):
        return (kind, static_key((value.func, value.args, value.keywords), depth + 1))
    if isinstance(value, types.MethodType):
        return (kind, value.__func__, static_key(value.__self__, depth + 1))
    if callable(value) and not hasattr(value, "__dict__"):
        return (kind, Same(value))
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return (kind, Same(value))
    if dataclasses.is_dataclass(value):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return (kind, static_key(fields, depth + 1))
    if hasattr(value, "__dict__") and not hasattr(value, "__array__"):
        return (kind, static_key(vars(value), depth + 1))
    raise _refusal(value, "cannot be compared by value")


def module_key(module: torch.nn.Module) -> object:
    """What a forward pass reads: classes, mode, plain attributes, hooks, which tensors there
    are.
    """
    parts: list[object] = []
    for child in submodules(module):
        parts.append(type(child))
        parts += child._modules
        for name, value in vars(child).items():
            kind = type(value)
            if kind in SIMPLE:  # spelled out: this runs at every call
                parts += (name, kind, static_key(value) if kind is float else value)
            elif kind in FUNCTIONS:
                parts += (name, value)
        if child is not module:  # those of the outermost run around the program
            parts += (*child._forward_pre_hooks.values(), None, *child._forward_hooks.values())
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                parts += (name, None if tensor is None else tensor_identity(tensor))
    return (Same(module), tuple(parts))


def submodules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """``module`` and all below it, each once."""
    found = [module]
    seen = {id(module)}
    for parent in found:
        for child in parent._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def tensor_identity(tensor: torch.Tensor) -> object:
    """Which tensor, and the metadata that a trace bakes in."""
    return (
        Same(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.device,
        tensor.requires_grad,
    )


class Same:
    """Equal only to another mark of the very same, still living object."""

    __slots__ = ("_get", "_id")

    def __init__(self, value: object) -> None:
        self._id = id(value)
        try:
            self._get: Any = weakref.ref(value)
        except TypeError:  # not weakly referable: keep it, so that its id is not used again
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or other._id != self._id:
            return False
        value = self._get()
        return value is not None and other._get() is value

    def __hash__(self) -> int:
        return self._id


def _refusal(value: Any, why: str) -> SpecError:
    return SpecError(
        f"an argument of type {type(value).__name__} {why}",
        help="pass tensors, numbers, strings, containers or dataclasses of them, "
        "or close over the value",
    )
