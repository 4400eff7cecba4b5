"""What a function reads from outside its arguments, found in its bytecode, so that a change of it
is noticed.

``scale * F.silu(self.gain * x)`` reads the global ``scale`` and, in a method, ``self.gain``. Each
such access is looked up again at every call: plain values, containers and functions enter the
cache key by value or identity, and functions of the user's own are searched in turn.
"""

import dis
import importlib.util
import sysconfig
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from iris.errors import SpecError
from iris.spmd.statics import Same, static_key, tensor_identity

MISSING = object()
MAX_FUNCTIONS = 200
GLOBAL_OPS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"}
CLOSURE_OPS = {"LOAD_DEREF", "LOAD_CLASSDEREF", "STORE_DEREF"}
ATTRIBUTE_OPS = {"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"}
SKIPPED_OPS = {"PRECALL", "CACHE", "PUSH_NULL", "RESUME", "NOP", "COPY_FREE_VARS"}


@dataclass(frozen=True)
class Access:
    """A place outside the arguments: a namespace, a name in it, and the attributes after it."""

    space: Any  # dict of globals, a cell, or a weak reference to the object itself
    name: str
    attributes: tuple[str, ...]

    @property
    def text(self) -> str:
        return ".".join((self.name, *self.attributes))

    def get(self) -> Any:
        """The value there now, or MISSING."""
        value = _root(self.space, self.name)
        for attribute in self.attributes:
            if value is MISSING:
                break
            value = getattr(value, attribute, MISSING)
        return value

    def put(self, value: Any) -> None:
        """Put ``value`` back there (MISSING removes it)."""
        if self.attributes:
            parent = Access(self.space, self.name, self.attributes[:-1]).get()
            if value is MISSING:
                delattr(parent, self.attributes[-1])
            else:
                setattr(parent, self.attributes[-1], value)
        elif isinstance(self.space, types.CellType):
            if value is MISSING:
                del self.space.cell_contents
            else:
                self.space.cell_contents = value
        elif isinstance(self.space, dict):
            self.space.update({self.name: value})
            if value is MISSING:
                del self.space[self.name]


def _root(space: Any, name: str) -> Any:
    if isinstance(space, dict):
        return space.get(name, MISSING)
    if isinstance(space, types.CellType):
        try:
            return space.cell_contents
        except ValueError:
            return MISSING
    return space() if isinstance(space, weakref.ref) else space


def _weak(owner: object) -> object:
    """A reference that does not keep a method's instance, with all its programs, alive."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return owner


def key_of(access: Access) -> object:
    """Cache-key entry for what ``access`` finds now."""
    value = access.get()
    if value is MISSING:
        return MISSING
    if isinstance(value, torch.Tensor):
        return tensor_identity(value)
    try:
        return static_key(value)
    except SpecError:
        return Same(value)


def instance_key(instance: object) -> object:
    """Cache-key entry for the instance whose method is called; None for a plain function."""
    if instance is None:
        return None
    try:
        return static_key(instance)
    except SpecError:
        return Same(instance)


def modes() -> tuple[object, ...]:
    """Cache-key entry for torch's modes, which a trace or a capture bakes in (``no_grad`` and
    inference mode count as one).
    """
    casts = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in _CASTS]
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        *casts,
    )


_CASTS = ("cpu", "cuda")


def find_accesses(fn: types.FunctionType, owner: object = None) -> tuple[Access, ...]:
    """Accesses of ``fn`` and the user's functions it reaches; ``owner`` is a method's self."""
    found: dict[tuple[int, str], Access] = {}
    seen: set[tuple[int, int]] = set()
    todo: list[tuple[types.FunctionType, object]] = [(fn, owner)]
    while todo and len(seen) < MAX_FUNCTIONS:
        function, self_ = todo.pop()
        if (id(function.__code__), id(self_)) in seen:
            continue
        seen.add((id(function.__code__), id(self_)))
        for access in _accesses(function, self_):
            callee = _user_function(access.get())
            if callee is not None and not _is_library(callee[0]):
                todo.append(callee)
            access = _holder(access)
            value = access.get()
            if not _is_library(value) and (self_ is None or value is not self_):
                found.setdefault((id(access.space), access.text), access)
    return tuple(found.values())


def _holder(access: Access) -> Access:
    """What can change of a method that an access finds: ``items.append`` reads ``items``."""
    value = access.get()
    bound = getattr(value, "__self__", None)
    if (
        access.attributes
        and callable(value)
        and bound is not None
        and not isinstance(bound, types.ModuleType)
    ):
        return Access(access.space, access.name, access.attributes[:-1])
    return access


def _user_function(value: Any) -> tuple[types.FunctionType, object] | None:
    """The Python function that calling ``value`` runs, and its self; None for a library's."""
    value = getattr(value, "__wrapped_spmd__", value)
    function, owner = value, None
    if isinstance(value, types.MethodType):
        function, owner = value.__func__, value.__self__
    elif isinstance(value, torch.nn.Module) and not _is_library(type(value)):
        function, owner = type(value).forward, value
    return (function, owner) if isinstance(function, types.FunctionType) else None


def _accesses(function: types.FunctionType, owner: object) -> Iterator[Access]:
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    first = code.co_varnames[0] if owner is not None and code.co_argcount else None
    for inner in _codes(code):
        yield from _chains(
            inner, function.__globals__, cells, first if inner is code else None, owner
        )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _chains(
    code: types.CodeType,
    globals_: dict[str, Any],
    cells: dict[str, Any],
    first: str | None,
    owner: object,
) -> Iterator[Access]:
    """Accesses in one code object: a load from outside and the attribute loads that follow it."""
    start: tuple[Any, str] | None = None
    attributes: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname in SKIPPED_OPS:
            continue
        if start is not None and step.opname in ATTRIBUTE_OPS:
            attributes.append(step.argval)
            continue
        if start is not None:
            yield Access(*start, tuple(attributes))
        start, attributes = None, []
        if step.opname in GLOBAL_OPS and (step.argval in globals_ or step.opname == "STORE_GLOBAL"):
            start = (globals_, step.argval)
        elif step.opname in CLOSURE_OPS and step.argval in cells:
            start = (cells[step.argval], step.argval)
        elif first is not None and step.opname.startswith("LOAD_FAST") and step.argval == first:
            start = (_weak(owner), first)


_STDLIB = Path(sysconfig.get_paths()["stdlib"])


def _is_library(value: Any) -> bool:
    """What does not change between calls: modules, functions and classes of installed packages."""
    if isinstance(value, types.ModuleType):
        return True
    module = getattr(value, "__module__", None)
    if not (isinstance(module, str) and callable(value) and hasattr(value, "__name__")):
        return False  # an instance, such as a torch module, changes
    top = module.partition(".")[0]
    return top in ("torch", "iris", "triton", "numpy", "builtins", "math") or _installed(top)


def _installed(top: str) -> bool:
    if top == "__main__":
        return False
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    origin = Path(spec.origin) if spec and spec.origin else None
    return origin is not None and ("site-packages" in origin.parts or _STDLIB in origin.parents)
