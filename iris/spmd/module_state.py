"""Whether a torch module is still what `statics.module_key` saw: quickly, at every call."""

import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, call, itemgetter
from typing import Any

from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards

from iris.spmd.modules import is_module
from iris.spmd.statics import FUNCTIONS, SIMPLE, submodules

_TABLES = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")
# What every module has, and no forward pass reads.
_INNER = frozenset(vars(nn.Module()))
_requires_grad = attrgetter("requires_grad")


def module_checker(module: nn.Module) -> Callable[[], bool]:
    """A function that tells whether all that enters the key of ``module`` is as it is now.

    It keeps tensors, plain values, functions and hooks alive, so their ids are not used again, but
    no module.
    """
    found = submodules(module)
    references = [weakref.ref(child) for child in found]
    # Two names at least, for of one a getter makes no tuple.
    pickers = [
        itemgetter("_modules", "training", *(vars(child).keys() - _INNER)) for child in found
    ]
    values, contents = _read(found, pickers)
    held = [*chain.from_iterable(map(dict.values, contents))]
    tensors = {id(x): x for x in held if isinstance(x, Tensor)}
    kinds = (*SIMPLE, *FUNCTIONS)
    kept = [x for x in values if type(x) in kinds] + [x for x in held if not is_module(x)]
    guards = TensorGuards(*tensors.values(), dynamic_dims_sizes=[], dynamic_dims_strides=[]).check
    before = _summary(found, values, contents)
    requires = [*map(_requires_grad, tensors.values())]

    def unchanged(alive: Any = kept) -> bool:
        children = [reference() for reference in references]
        if None in children:
            return False
        try:
            now = _summary(children, *_read(children, pickers))
        except KeyError:  # an attribute is gone
            return False
        return (
            now == before
            and guards(*tensors.values())
            and [*map(_requires_grad, tensors.values())] == requires
        )

    return unchanged


Read = tuple[list[Any], list[dict[str, Any]]]


def _read(modules: Iterable[Any], pickers: Iterable[Callable[[Any], Any]]) -> Read:
    """Every attribute that is not a module's own, and every table of tensors and modules."""
    tables = [*map(vars, modules)]
    values = [*chain.from_iterable(map(call, pickers, tables))]
    return values, [table[name] for table in tables for name in _TABLES]


def _summary(modules: Iterable[Any], values: list[Any], contents: list[dict[str, Any]]) -> object:
    """Equal where, of objects that still live, all are the same or of one type that is no key."""
    return (
        [*map(type, modules)],
        [*map(len, map(vars, modules))],
        [*map(id, values)],
        [*map(type, values)],
        [*chain.from_iterable(contents)],
        [*map(id, chain.from_iterable(map(dict.values, contents)))],
    )
