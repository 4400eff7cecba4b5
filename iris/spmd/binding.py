"""One call's arguments in canonical form, tensors apart and all else in a key, and back."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from iris.errors import SpecError
from iris.spmd.statics import SIMPLE, static_key

_TENSORS = frozenset({Tensor, torch.nn.Parameter})
Bases = tuple[tuple[int, ...], ...]  # for each piece of shared memory, the tensors in it
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Bound:
    """A call: ``values`` by parameter, their tensor leaves, and all else in ``statics``."""

    __slots__ = ("_binder", "statics", "tensors", "values")

    def __init__(
        self,
        binder: "Binder",
        values: tuple[Any, ...],
        tensors: Sequence[Tensor],
        statics: Sequence[object],
    ) -> None:
        self._binder, self.values = binder, values
        self.tensors, self.statics = tensors, statics

    @property
    def only_tensors(self) -> bool:
        """Whether the parameters are tensors, all given by place."""
        return self.tensors is self.values and self._binder._plain

    @property
    def key(self) -> tuple[object, ...]:
        """All that is not a tensor's data, with an entry for each label of ``Binder.labels``."""
        return self._binder.key(self.values)


class Binder:
    """Binds calls of one function: the same call has the same key however it is written."""

    def __init__(
        self, fn: Callable[..., Any], name: str, static_argnames: Sequence[str], skip: int
    ) -> None:
        parameters = list(inspect.signature(fn).parameters.values())[skip:]
        self.name = name
        self.signature = inspect.Signature(parameters)
        self.names = tuple(p.name for p in parameters)
        self.static = frozenset(static_argnames)
        self._kinds = tuple(p.kind for p in parameters)
        self._all_tensors = [None] * len(parameters)
        self._plain = all(kind in POSITIONAL for kind in self._kinds)
        unknown = sorted(self.static - set(self.names))
        if unknown:
            raise SpecError(
                f"{name}: static_argnames has {unknown[0]!r}, which is no parameter",
                help=f"the parameters are {', '.join(self.names)}",
            )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Canonical form of a call; TypeError where arguments do not fit the signature."""
        values = args
        if kwargs or not self._plain or len(args) != len(self.names):
            try:
                bound = self.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self.name}() {error}") from None
            bound.apply_defaults()
            values = tuple(bound.arguments[name] for name in self.names)
        if _TENSORS.issuperset(map(type, values)) and not self.static:
            return Bound(self, values, values, self._all_tensors)
        tensors: list[Tensor] = []
        statics: list[object] = []
        for name, value in zip(self.names, values, strict=True):
            if name in self.static:
                statics.append(self._static(name, value))
            else:
                self._flatten(name, value, tensors, statics)
        return Bound(self, values, tensors, statics)

    def key(self, values: Sequence[Any]) -> tuple[object, ...]:
        """See :attr:`Bound.key`."""
        key: list[object] = []
        for name, value in zip(self.names, values, strict=True):
            leaves: list[Any] = [value]
            if not (isinstance(value, Tensor) or type(value) in SIMPLE or name in self.static):
                leaves, tree = pytree.tree_flatten(value)
                key.append(tree)
            for leaf in leaves:
                is_tensor = isinstance(leaf, Tensor) and name not in self.static
                key.append(tensor_key(leaf) if is_tensor else self._static(name, leaf))
        return tuple(key)

    def labels(self, values: Sequence[Any]) -> list[str]:
        """A name for each entry of the key of a call with these ``values``."""
        labels = []
        for name, value in zip(self.names, values, strict=True):
            labels.append(name)
            if not (isinstance(value, Tensor) or type(value) in SIMPLE or name in self.static):
                labels += [
                    name + pytree.keystr(path)
                    for path, _ in pytree.tree_flatten_with_path(value)[0]
                ]
        return labels

    def _flatten(self, name: str, value: Any, tensors: list[Tensor], statics: list[object]) -> None:
        """Sort the leaves of ``value``, in pytree's order; only its commonest nodes quickly."""
        kind = type(value)
        if isinstance(value, Tensor):
            tensors.append(local_part(value))
            statics.append(_placing(value))
        elif kind in SIMPLE:
            statics.append(self._static(name, value))
        elif kind is list or kind is tuple or kind is dict:
            items = value.values() if kind is dict else value
            only_tensors = _TENSORS.issuperset(map(type, items))
            statics.append((kind, tuple(value) if kind is dict else len(value), only_tensors))
            if only_tensors:
                tensors.extend(items)
                return
            for item in items:
                self._flatten(name, item, tensors, statics)
        else:
            items, tree = pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
            statics.append(tree)
            if tree.is_leaf():
                statics.append(self._static(name, value))
            else:
                self._flatten(name, items, tensors, statics)

    def _static(self, name: str, value: Any) -> object:
        try:
            return static_key(value)
        except SpecError as error:
            raise SpecError(f"{self.name}: {name}: {error.message}", help=error.help) from None

    def rebuild(
        self, values: Sequence[Any], tensors: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call again, with its tensor leaves replaced by ``tensors``."""
        waiting = iter(tensors)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, kind, value in zip(self.names, self._kinds, values, strict=True):
            if name not in self.static:
                value = pytree.tree_map(
                    lambda v: next(waiting) if isinstance(v, Tensor) else v, value
                )
            if kind in POSITIONAL:
                args.append(value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                args.extend(value)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                kwargs.update(value)
            else:
                kwargs[name] = value
        return tuple(args), kwargs


def tensor_key(tensor: Tensor) -> tuple[object, ...]:
    """The metadata of a tensor that a trace bakes in."""
    own, placing = local_part(tensor), _placing(tensor) or ()
    lazy = own.is_conj(), own.is_neg()
    return (own.dtype, own.shape, own.stride(), own.device, own.requires_grad, lazy, *placing)


def is_dtensor(value: object) -> bool:
    """Whether ``value`` is a DTensor, whose module is slow to import."""
    return hasattr(value, "placements") and hasattr(value, "device_mesh")


def local_part(tensor: Any) -> Tensor:
    """A tensor itself, or what this rank holds of a DTensor."""
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local


def _placing(tensor: Any) -> tuple[object, ...] | None:
    """What there is to know of a DTensor beside its local part."""
    if not is_dtensor(tensor):
        return None
    return tensor.placements, tensor.device_mesh, tuple(tensor.shape)


def alias_key(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Which tensors overlap: of each, the first of its group and the distance in bytes."""
    spans = []
    for index, tensor in enumerate(tensors):
        start = tensor.data_ptr()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = (reach + 1) * tensor.itemsize if start else 0  # no memory: empty, or a meta tensor
        spans.append((start, start + size, index))
    table: dict[int, tuple[int, int]] = {}
    end = first = base = -1
    for start, stop, index in sorted(spans):
        if stop > start and start < end:
            end = max(end, stop)
        else:
            end, first, base = stop, index, start
        table[index] = (first, start - base)
    return tuple(table[index] for index in range(len(tensors)))


def overlaps(key: tuple[tuple[int, int], ...]) -> bool:
    """Whether any two tensors of an alias key share memory."""
    return len({first for first, _ in key}) < len(key)


def overlapping(tensors: Sequence[Tensor]) -> Bases:
    """The groups of tensors that share memory."""
    groups: dict[int, list[int]] = {}
    for index, (first, _) in enumerate(alias_key(tensors)):
        groups.setdefault(first, []).append(index)
    return tuple(tuple(members) for members in groups.values() if len(members) > 1)


def with_bases(tensors: Sequence[Tensor], bases: Bases, name: str) -> Sequence[Tensor]:
    """The tensors in none of ``bases``, then one flat tensor over the memory of each group."""
    if not bases:
        return tensors
    shared = {index for members in bases for index in members}
    rest = [tensor for index, tensor in enumerate(tensors) if index not in shared]
    return [*rest, *(_flat_base([tensors[i] for i in members], name) for members in bases)]


def from_bases(
    inputs: Sequence[Tensor], tensors: Sequence[Tensor], bases: Bases
) -> Sequence[Tensor]:
    """The way back from `with_bases`: ``inputs`` seen as ``tensors`` are."""
    if not bases:
        return inputs
    shared = {index for members in bases for index in members}
    rest = [index for index in range(len(tensors)) if index not in shared]
    leaves = dict(zip(rest, inputs, strict=False))
    for members, base in zip(bases, inputs[len(rest) :], strict=True):
        low = min(tensors[index].storage_offset() for index in members)
        for index in members:
            like = tensors[index]
            offset = like.storage_offset() - low
            leaves[index] = base.as_strided(like.shape, like.stride(), offset)
    return [leaves[index] for index in range(len(tensors))]


def _flat_base(members: Sequence[Tensor], name: str) -> Tensor:
    if len({tensor.dtype for tensor in members}) > 1:
        raise SpecError(
            f"{name}: tensors of different dtypes share memory, "
            "and the function writes to one of them",
            help="pass copies, or tensors of one dtype",
        )
    starts = [tensor.storage_offset() for tensor in members]
    ends = [
        start + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        for start, t in zip(starts, members, strict=True)
    ]
    return torch.as_strided(members[0], (max(ends) - min(starts),), (1,), min(starts))
