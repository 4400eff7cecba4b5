"""Torch modules as programs: parameters and buffers are inputs, by reference."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from iris.errors import SpecError
from iris.spmd.specs import Leaf, P

M = TypeVar("M", bound=nn.Module)


def partition(module: M, claims: P | dict[str, P]) -> M:
    """Say how the tensors that ``module`` itself holds are spread over mesh axes; return
    ``module``.

    Args:
        claims: a `P` for all of them, or by name. What is not named is taken as it is, and nothing
            is known about it.

    Raises SpecError for a name that the module does not hold.

    >>> partition(nn.Linear(4, 2, bias=False), {"weight": P("tp", None)})
    Linear(in_features=4, out_features=2, bias=False)
    """
    held = {*module._parameters, *module._buffers}
    unknown = sorted(set(claims) - held) if isinstance(claims, dict) else []
    if unknown:
        raise SpecError(
            f"{type(module).__name__} holds no tensor {unknown[0]!r}",
            help=f"it holds {', '.join(sorted(held)) or 'none'}",
        )
    module.__dict__["_partition"] = claims
    return module


def claimed(module: nn.Module, name: str) -> P | None:
    """The spec of one tensor that ``module`` itself holds, or None."""
    claims = module.__dict__.get("_partition")
    return claims.get(name) if isinstance(claims, dict) else claims


def held_leaves(module: Any) -> list[Leaf]:
    """Every parameter and buffer of a module once, with its spec; nothing for any other object."""
    if not isinstance(module, nn.Module):
        return []
    leaves: dict[int, Leaf] = {}
    for path, child in module.named_modules():
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if isinstance(tensor, torch.Tensor):
                where = f"{path}.{name}" if path else name
                leaves.setdefault(id(tensor), Leaf(where, tensor, claimed(child, name)))
    return list(leaves.values())


@dataclass(frozen=True)
class Buffer:
    """A buffer of modules, under all its names there, which a forward pass may write to."""

    path: str
    value: torch.Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def swap(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Let the modules hold ``new`` where they hold ``old``."""
        for owner, name in self.places:
            if owner._buffers.get(name) is old:
                owner._buffers[name] = new


def buffers_of(module: Any) -> list[Buffer]:
    """Every buffer of a module once; nothing for any other object."""
    if not isinstance(module, nn.Module):
        return []
    found: dict[int, Buffer] = {}
    for path, child in module.named_modules():
        for name, tensor in child._buffers.items():
            if tensor is not None:
                where = f"{path}.{name}" if path else name
                buffer = found.setdefault(id(tensor), Buffer(where, tensor))
                buffer.places.append((child, name))
    return list(found.values())


def decorate_module(target: Any, wrap: Callable[[Any, str], Any]) -> Any:
    """Make ``forward`` of a module class, or of one module, a program; return the class or module
    itself.

    State dicts, hooks and subclasses stay as they were: only ``forward`` is another function. A
    module of DTensors is compiled through Dynamo, which takes them apart.
    """
    if isinstance(target, type):
        target.forward = wrap(target.forward, target.__name__)  # type: ignore[attr-defined]
    elif has_dtensors(target):
        from iris.spmd.backend import compile_module  # loads Dynamo

        target.forward = compile_module(target, wrap(type(target).forward, "")._options)
    else:
        program = wrap(type(target).forward, type(target).__name__)
        target.forward = program.__get__(target)
    return target


def has_dtensors(module: Any) -> bool:
    """Whether a module holds DTensors, as after ``parallelize_module``."""
    return any(hasattr(leaf.value, "device_mesh") for leaf in held_leaves(module))


def is_module(target: object) -> bool:
    """Whether ``target`` is a torch module or a class of them."""
    return isinstance(target, nn.Module) or (
        isinstance(target, type) and issubclass(target, nn.Module)
    )
