"""What every op is made of, and the registry of them.

One op, one file: contract with a type example, type rule, effects, reference over all ranks. The
lowering of an op lives in `iris.lower` under the same name.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from iris.errors import GraphError
from iris.graph.nodes import Node
from iris.graph.types import Mesh, TensorType

# What a type rule sees of an argument: a type where the node reads a value, else the constant.
# What a reference sees: a list over ranks, or the constant.
Args = Sequence[Any]
Attrs = Mapping[str, Any]
Types = tuple[TensorType, ...]
# A value on all ranks: one array a rank, in rank order (row-major over the mesh axes).
PerRank = list[np.ndarray]


class Effect(enum.Enum):
    """What a node does besides computing its outputs. Nodes with effects keep their order."""

    COMMUNICATES = "communicates"
    RANDOM = "random"
    UNKNOWN = "unknown"  # a custom op: it may do anything, so it is never dropped or passed by


@dataclass(frozen=True, slots=True)
class Local:
    """dtype and this rank's shape of an output, as tracing saw it."""

    dtype: str
    shape: tuple[int, ...]


Locals = Sequence[Local]  # one an output


@dataclass(frozen=True, slots=True)
class InferContext:
    """Where types are inferred.

    ``coord``: the rank whose local shapes are known. ``loc``: the user's line. ``sources``: name
    and line of every value the node reads, in the order of `Node.uses`; only errors read them.
    """

    mesh: Mesh
    coord: Mapping[str, int]
    loc: str = ""
    sources: Sequence[tuple[str, str]] = ()

    def local(self, type: TensorType) -> tuple[int, ...]:
        return type.local_shape(self.mesh, self.coord)


class Op:
    """Base of every op. ``@register`` makes the one instance of a subclass with a name."""

    name: str
    effects: frozenset[Effect] = frozenset()

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.name

    def effects_of(self, node: Node) -> frozenset[Effect]:
        """Effects of one node, where they depend on its arguments."""
        return self.effects

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        """Types of the outputs. ``locals``: what tracing saw, or recorded types say, of each."""
        raise NotImplementedError

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        """Outputs on all ranks in numpy. An argument that is a value comes as a list over ranks."""
        raise GraphError(f"{self.name}: no numpy reference")


_REGISTRY: dict[str, Op] = {}


def register(cls: type[Op]) -> type[Op]:
    """Class decorator: one instance of ``cls`` under ``cls.name``."""
    if cls.name in _REGISTRY:
        raise GraphError(f"op {cls.name!r} is registered twice")
    _REGISTRY[cls.name] = cls()
    return cls


def registry() -> Mapping[str, Op]:
    """Every registered op by name."""
    return _REGISTRY
