"""The calls a function saw last: the next one like them finds its program in two microseconds."""

import weakref
from collections.abc import Callable, Iterable
from itertools import starmap
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING

from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards

from iris.runtime.context import current_or_none
from iris.spmd.binding import Bound, alias_key
from iris.spmd.guards import MISSING, Access, instance_key, key_of
from iris.spmd.statics import SIMPLE

if TYPE_CHECKING:
    from iris.spmd.program import Program

MOST_HITS = 4
_requires_grad = attrgetter("requires_grad")


class Hit:
    """One call, and its program under ``key``.

    ``fits`` says yes only to calls whose cache key is the same. It may say no to some of those:
    the tensors and torch's modes are compared by the guards of ``torch.compile``, which look at
    more (and take 0.07 us a tensor).
    """

    __slots__ = (
        "_aliases", "_ambient", "_context", "_instance_key", "_outside", "_requires", "_same",
        "_size", "_statics", "key", "program",
    )  # fmt: skip

    def __init__(
        self,
        key: object,
        program: "Program",
        bound: Bound,
        accesses: Iterable[Access],
        instance: object,
    ) -> None:
        self.key, self.program = key, program
        self._statics, self._size = bound.statics, len(bound.tensors)
        guards = TensorGuards(*bound.tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[])
        self._same, self._ambient = guards.check, GlobalStateGuard().check
        # Without grad mode the guards take every tensor for one that requires no grad.
        self._requires = [*map(_requires_grad, bound.tensors)]
        self._aliases = alias_key(bound.tensors) if program.graph.writes else None
        self._context = current_or_none()
        self._outside = [_remember(access) for access in accesses]
        self._instance_key = instance_key(instance)

    def fits(self, bound: Bound, instance: object) -> bool:
        """Whether a call means the same as this one."""
        tensors = bound.tensors
        return (
            bound.statics == self._statics
            and len(tensors) == self._size
            and self._same(*tensors)
            and self.program.runner is not None
            and self._ambient()
            and [*map(_requires_grad, tensors)] == self._requires
            and current_or_none() is self._context
            and (not self._outside or all(starmap(_is_same, self._outside)))
            and (self._aliases is None or alias_key(tensors) == self._aliases)
            and (instance is None or instance_key(instance) == self._instance_key)
        )


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
