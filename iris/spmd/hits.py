"""The calls a function saw last: the next one like them finds its program in two microseconds."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards

from iris.runtime import context
from iris.spmd.binding import Bound, alias_key
from iris.spmd.guards import MISSING, Access, instance_key, key_of
from iris.spmd.module_state import module_checker
from iris.spmd.statics import SIMPLE

if TYPE_CHECKING:
    from iris.spmd.program import Program

MOST_HITS = 4
_requires_grad = attrgetter("requires_grad")


class Hit:
    """One call, and its program under ``key``.

    ``takes`` and ``fits`` say yes only to calls whose cache key is the same. They may say no to
    some of those: the tensors and torch's modes are compared by the guards of ``torch.compile``,
    which look at more (and take 0.07 us a tensor). ``takes`` is for calls of a plain function with
    tensors alone, all given by place, where ranks do not meet on the host.
    """

    __slots__ = ("_agrees", "_instance_same", "_statics", "key", "program", "takes")

    def __init__(
        self,
        key: object,
        program: "Program",
        bound: Bound,
        accesses: Iterable[Access],
        instance: object,
    ) -> None:
        self.key, self.program, self._statics = key, program, bound.statics
        self._instance_same = _instance_checker(instance)
        self._agrees = _checker(program, bound.tensors, [_remember(access) for access in accesses])
        plain = instance is None and bound.only_tensors and not program.meets_on_host
        self.takes = self._agrees if plain else lambda _: False

    def fits(self, bound: Bound, instance: object) -> bool:
        """Whether a call means the same as this one."""
        return (
            bound.statics == self._statics
            and self._agrees(bound.tensors)
            and self._instance_same(instance)
        )


def _instance_checker(instance: object) -> Callable[[object], bool]:
    """Whether the instance whose method is called, which is the same one, is as it is now."""
    if isinstance(instance, torch.nn.Module):
        unchanged, key = module_checker(instance), instance_key(instance)
        return lambda now: unchanged() or instance_key(now) == key
    key = instance_key(instance)
    return lambda now: now is None or instance_key(now) == key


def _checker(
    program: "Program", tensors: Sequence[Tensor], outside: Sequence["Seen"]
) -> Callable[[Sequence[Tensor]], bool]:
    """Whether other tensors mean the same, and all around them is as it is now."""
    number, here = len(tensors), context.current_or_none()
    same = TensorGuards(*tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check
    modes_same = GlobalStateGuard().check
    # Without grad mode the guards take every tensor for one that requires no grad.
    requires = [*map(_requires_grad, tensors)]
    aliases = alias_key(tensors) if program.graph.writes else None

    def agrees(others: Sequence[Tensor]) -> bool:
        return (
            len(others) == number
            and same(*others)
            and modes_same()
            and [*map(_requires_grad, others)] == requires
            and context._current is here
            and program.runner is not None
            and (not outside or all(starmap(_is_same, outside)))
            and (aliases is None or alias_key(others) == aliases)
        )

    return agrees


Seen = tuple[Access, object, Callable[[], object], object]
_NEVER = object()


def _remember(access: Access) -> Seen:
    """What an access finds now: a plain value itself, a weak reference to a function, its key."""
    value = access.get()
    plain = value if type(value) in SIMPLE or value is MISSING else _NEVER
    function = weakref.ref(value) if isinstance(value, FunctionType) else lambda: _NEVER
    return access, plain, function, key_of(access)


def _is_same(access: Access, plain: object, function: Callable[[], object], key: object) -> bool:
    value = access.get()
    return value is plain or function() is value or key_of(access) == key
