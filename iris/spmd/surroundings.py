"""What a call depends on beside its arguments: the process, and what a function reads outside."""

import os
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from iris import config
from iris.spmd.decorator import SpmdFunction
from iris.spmd.guards import instance_key, key_of


@dataclass(frozen=True)
class Settings:
    """State of the caller's process that a program depends on."""

    dtype: torch.dtype
    precision: str
    deterministic: tuple[bool, bool]  # and whether only a warning
    casts: tuple[tuple[str, bool, torch.dtype], ...]
    knobs: tuple[tuple[str, str | None], ...]

    @classmethod
    def now(cls) -> "Settings":
        """Those of this process."""
        return cls(
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in ("cpu", "cuda")
            ),
            tuple((knob.name, os.environ.get(knob.name)) for knob in config.knobs()),
        )

    def apply(self, pinned: Container[str]) -> None:
        """Make them those of this process, but knobs in ``pinned``."""
        torch.set_default_dtype(self.dtype)
        if torch.get_float32_matmul_precision() != self.precision:
            torch.set_float32_matmul_precision(self.precision)
        torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        torch.set_autocast_cache_enabled(False)  # nothing would empty it
        for kind, on, dtype in self.casts:
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, dtype)
        for name, value in self.knobs:
            if name not in pinned:
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})


def version_of(function: SpmdFunction, instance: Any) -> object:
    """Equal while a function, and what it reads from outside, is what it was."""
    _, state = function._bindings(instance)
    outside = [(key_of(access), _stamps(access.get())) for access in state.accesses.values()]
    return tuple(outside), instance_key(instance), _stamps(instance)


def _stamps(value: Any) -> tuple[int, ...]:
    """Counts of in-place writes to the tensors of ``value``."""
    if isinstance(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
    elif isinstance(value, Tensor | list | tuple | dict):
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    else:
        return ()
    return tuple(0 if t.is_inference() else t._version for t in tensors)
