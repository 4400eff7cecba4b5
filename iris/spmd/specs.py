"""Specs: how arguments and results are spread over mesh axes, and the checks that they fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree

from iris.errors import SpecError
from iris.graph.types import Mesh

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

Dim = None | str | tuple[str, ...]


class P:
    """Which mesh axes split each dim of a tensor: ``P("tp", None)``, ``P(("dp", "tp"))``, ``P()``.

    Dims that are not named are not split, so ``P()`` is replicated. ``partial`` names axes over
    which a sum is still
    due: such a value is only meaningful once it is summed.

    >>> P("tp", None)
    P('tp', None)
    """

    __slots__ = ("dims", "partial")

    def __init__(self, *dims: Dim, partial: str | Sequence[str] = ()) -> None:
        self.dims: tuple[tuple[str, ...], ...] = tuple(_dim(d) for d in dims)
        self.partial = _dim(partial if isinstance(partial, str) else tuple(partial))
        axes = self.axes
        twice = sorted({a for a in axes if axes.count(a) > 1})
        if twice:
            raise SpecError(f"{self!r} uses axis {twice[0]!r} twice", help="an axis splits one dim")

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis named, in order."""
        return (*(a for axes in self.dims for a in axes), *self.partial)

    def padded(self, ndim: int) -> tuple[tuple[str, ...], ...]:
        """The axes of each of ``ndim`` dims."""
        return self.dims + ((),) * (ndim - len(self.dims))

    def means(self, other: "P", ndim: int) -> bool:
        """Whether this says of ``ndim`` dims what ``other`` says."""
        return (self.padded(ndim), self.partial) == (other.padded(ndim), other.partial)

    def __repr__(self) -> str:
        shown = [repr(a[0] if len(a) == 1 else (a or None)) for a in self.dims]
        if self.partial:
            shown.append(f"partial={self.partial!r}")
        return f"P({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and (self.dims, self.partial) == (other.dims, other.partial)

    def __hash__(self) -> int:
        return hash((self.dims, self.partial))


def _dim(dim: Dim) -> tuple[str, ...]:
    if dim is None:
        return ()
    names = (dim,) if isinstance(dim, str) else tuple(dim)
    if not all(isinstance(name, str) for name in names):
        raise SpecError(
            f"a dim of P is None, an axis name or a tuple of names, not {dim!r}",
            help='write P("tp", None) or P(("dp", "tp"))',
        )
    return names


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of arguments or results: where it stands, its value, its spec (None: no claim)."""

    path: str
    value: Any
    spec: P | None


def axes_in(specs: Any) -> tuple[str, ...]:
    """Axis names used anywhere in a tree of specs, in order of first use."""
    names: dict[str, None] = {}
    for leaf in pytree.tree_leaves(specs, is_leaf=lambda s: isinstance(s, P)):
        if isinstance(leaf, P):
            names.update(dict.fromkeys(leaf.axes))
    return tuple(names)


def from_placements(placements: "Sequence[Placement]", mesh: Mesh, path: str = "") -> P:
    """The spec that DTensor placements (one a mesh axis) mean."""
    from torch.distributed.tensor import Partial, Replicate, Shard  # slow to import

    if len(placements) != len(mesh.axes):
        raise SpecError(
            f"{path}: {len(placements)} placements for a mesh of {len(mesh.axes)} axes ({mesh})"
        )
    dims: dict[int, list[str]] = {}
    partial = []
    for axis, placement in zip(mesh.names, placements, strict=True):
        if type(placement) is Shard:
            dims.setdefault(placement.dim, []).append(axis)
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            partial.append(axis)
        elif not isinstance(placement, Replicate):
            raise SpecError(
                f"{path}: {placement} has no spec", help="use Shard, Replicate or Partial('sum')"
            )
    rank = max(dims, default=-1) + 1
    return P(*(tuple(dims.get(d, ())) for d in range(rank)), partial=tuple(partial))


def is_placements(spec: Any) -> bool:
    """Whether ``spec`` is a sequence of DTensor placements."""
    if not isinstance(spec, list | tuple) or not spec:
        return False
    types = {base for item in spec for base in type(item).__mro__}
    return any(base.__module__.startswith("torch.distributed.tensor") for base in types)


def match(specs: Any, value: Any, mesh: Mesh, path: str = "") -> list[Leaf]:
    """Lay a tree of specs, which may be a prefix, over ``value``; one Leaf for each leaf of
    ``value``.

    Raises SpecError where the structures differ.
    """
    if isinstance(specs, P) or specs is None or is_placements(specs):
        spec = from_placements(specs, mesh, path) if is_placements(specs) else specs
        leaves = pytree.tree_flatten_with_path(value)[0]
        return [Leaf(path + pytree.keystr(key), leaf, spec) for key, leaf in leaves]
    if type(specs) is type(value) is dict and specs.keys() == value.keys():
        specs = {key: specs[key] for key in value}  # in any order
    wanted, _ = pytree.tree_flatten_with_path(specs, is_leaf=lambda s: s is not specs)
    found, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda v: v is not value)
    keys = [key for key, _ in wanted]
    if type(specs) is not type(value) or keys != [key for key, _ in found] or keys == [()]:
        raise SpecError(
            f"{path or 'specs'}: spec is {_shape(specs)}, value is {_shape(value)}",
            help="give one spec for the whole value, or the same structure as the value",
        )
    return [
        leaf
        for (key, spec), (_, child) in zip(wanted, found, strict=True)
        for leaf in match(spec, child, mesh, path + pytree.keystr(key))
    ]


def _shape(tree: Any) -> str:
    if isinstance(tree, dict):
        return f"a dict with keys {sorted(map(str, tree))}"
    if isinstance(tree, list | tuple):
        return f"a {type(tree).__name__} of {len(tree)}"
    return f"a {type(tree).__name__}"


def offences(leaves: Sequence[Leaf], mesh: Mesh) -> list[str]:
    """What is wrong with each leaf's spec, a line an offender; empty when all fit."""
    lines = []
    for leaf in leaves:
        if leaf.spec is None:
            continue
        unknown = [axis for axis in leaf.spec.axes if axis not in mesh.names]
        if unknown:
            lines.append(f"{leaf.path}: {leaf.spec} names axis {unknown[0]!r}, the mesh has {mesh}")
        elif not isinstance(leaf.value, torch.Tensor):
            if leaf.spec.axes:
                kind = type(leaf.value).__name__
                lines.append(f"{leaf.path}: {leaf.spec} for a value of type {kind}, not a tensor")
        elif len(leaf.spec.dims) > leaf.value.dim():
            lines.append(
                f"{leaf.path}: {leaf.spec} has {len(leaf.spec.dims)} dims, "
                f"the tensor has {leaf.value.dim()} (shape {tuple(leaf.value.shape)})"
            )
    return lines
