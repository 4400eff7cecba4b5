"""Writes what runs on fake tensors into an FX graph of ATen calls."""

import functools
import operator
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from iris.runtime.callsite import user_line
from iris.spmd.binding import is_dtensor

_ATEN = ("aten", "prim", "prims")

Metadata = tuple[Any, ...]  # dtype, shape, strides, offset, device


class DTensorFromOutside(Exception):
    """A DTensor among the operands that is no argument of the program."""


class TracedOutside(Exception):
    """A tensor of an outer trace among the operands that is no argument of this one."""


class WriteOutside(Exception):
    """A tensor that is no argument of the program is written to."""


class _Known(NamedTuple):
    """A tensor seen so far; kept, so that its id is not used again."""

    tensor: Tensor
    node: torch.fx.Node
    metadata: Metadata | None  # None: a call of it may depend on more than that


class Recorder(TorchDispatchMode):
    """Adds a node to ``graph`` for each ATen call below it, with the user's line in ``meta["loc"]``
    and the fake result in ``meta["val"]``. It goes right above a FakeTensorMode.

    The result of a call like an earlier one (same op, metadata and constants) is made without
    working it out again: programs repeat their layers.
    """

    def __init__(self, mode: FakeTensorMode, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode, self.device = mode, device
        self.graph = torch.fx.Graph()
        self.module = types.SimpleNamespace(graph=self.graph)  # holds tensors from outside
        self._known: dict[int, _Known] = {}
        self._results: dict[tuple[Any, ...], Any] = {}
        self.loc: str | None = None  # the user's line, where a graph is replayed that knows it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch would wrap each dispatch, and nothing needs it
        return False

    def add_input(self, tensor: Tensor) -> None:
        """One more placeholder."""
        self._note(tensor, self.graph.placeholder(f"input{len(self._known)}"))

    def finish(self, values: list[Tensor]) -> None:
        """End the graph: it returns ``values``, and calls that nothing needs go."""
        self.graph.output([self.node_of(value) for value in values])
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and not node.users and not _has_effects(node):
                self.graph.erase_node(node)

    def node_of(self, tensor: Tensor) -> torch.fx.Node:
        """The node that makes ``tensor``; a tensor from outside becomes one more."""
        return self._find(tensor).node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device
        kwargs = kwargs or {}
        if _is_composite(func, self.device):  # autograd would have, but not in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:  # what it lifts must not be written to
            func = torch.ops.aten.lift_fresh_copy.default
        operands, key = self._described((args, kwargs))
        if func._schema.is_mutable and any(n.op == "get_attr" for n in _written(func, *operands)):
            raise WriteOutside
        if torch.Tag.inplace_view in func.tags:  # its operand is to have another shape
            operands[0][0].meta["val"] = self._alike(args[0])
        result = self._repeated((func, key))
        if result is None:
            result = func(*args, **kwargs)
            if key is not None and not func._schema.is_mutable:
                self._results[func, key] = _metadata(result)
        node = self.graph.call_function(func, *operands)
        loc = user_line(sys._getframe(1)) if self.loc is None else self.loc
        node.meta = {"val": result, "loc": loc, "grad": torch.is_grad_enabled()}
        self._note(result, node)
        return result

    def _described(self, arg: Any) -> tuple[Any, Any]:
        """An argument with nodes for tensors; and all that a result depends on of it, or None."""
        if isinstance(arg, Tensor):
            found = self._find(arg)
            return found.node, found.metadata
        if isinstance(arg, list | tuple):
            pairs = [self._described(item) for item in arg]
            keys = tuple(key for _, key in pairs)
            return type(arg)(item for item, _ in pairs), None if None in keys else keys
        if isinstance(arg, dict):
            items, key = self._described(tuple(arg.values()))
            return dict(zip(arg, items, strict=True)), None if key is None else (*arg, *key)
        return arg, (arg.__class__, arg)

    def _repeated(self, call: tuple[Any, Any]) -> Any:
        """The result of a call like an earlier one, or None."""
        try:
            found = self._results.get(call)
        except TypeError:  # an argument that has no hash
            return None
        if found is None:
            return None
        with torch._C._DisableTorchDispatch():
            made = [self._fake(*one) for one in found[1]]
        return made[0] if found[0] is None else found[0](made)

    def _alike(self, tensor: Tensor) -> Tensor:
        with torch._C._DisableTorchDispatch():
            shape, offset = tensor.shape, int(tensor.storage_offset())
            return self._fake(tensor.dtype, shape, tensor.stride(), offset, tensor.device)

    def _fake(self, dtype: Any, shape: Any, stride: Any, offset: int, device: Any) -> Tensor:
        if offset:
            reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            whole = torch.empty(offset + max(reach, 0) + 1, dtype=dtype, device="meta")
            return FakeTensor(self.mode, whole.as_strided(shape, stride, offset), device)
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(self.mode, empty, device)

    def _find(self, tensor: Tensor) -> _Known:
        found = self._known.get(id(tensor))
        if found is None:
            if is_dtensor(tensor):
                raise DTensorFromOutside
            if isinstance(tensor, FakeTensor) and tensor.fake_mode is not self.mode:
                raise TracedOutside
            name = f"outside{len(self._known)}"
            setattr(self.module, name, tensor)
            self._note(tensor, self.graph.create_node("get_attr", name))
            found = self._known[id(tensor)]
        return found

    def _note(self, result: Any, node: torch.fx.Node) -> None:
        """``node`` makes the tensors of ``result``."""
        if isinstance(result, Tensor):
            one = _metadata(result)
            self._known[id(result)] = _Known(result, node, one and one[1][0])
        elif isinstance(result, list | tuple):
            for index, item in enumerate(result):
                if isinstance(item, Tensor):
                    part = self.graph.call_function(operator.getitem, (node, index))
                    part.meta = {"val": item, "loc": node.meta["loc"]}
                    self._note(item, part)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.fx.Node]:
    """The operands that ``func`` writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            many = given if isinstance(given, list | tuple) else [given]
            yield from (node for node in many if isinstance(node, torch.fx.Node))


def returned(graph: torch.fx.Graph) -> Any:
    """What ``graph`` returns."""
    return next(node for node in reversed(graph.nodes) if node.op == "output").args[0]


def _metadata(result: Any) -> tuple[Any, list[Metadata]] | None:
    """The type of a container of tensors, or None of one tensor, and the metadata of each; None
    where that is not all there is to know of them.
    """
    many = isinstance(result, list | tuple)
    tensors = result if many else [result]
    if not all(isinstance(t, Tensor) and _is_plain(t) for t in tensors):
        return None
    return type(result) if many else None, [
        (t.dtype, t.shape, t.stride(), t.storage_offset(), t.device) for t in tensors
    ]


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
        and getattr(tensor, "constant", None) is None
    )


@functools.cache
def _is_composite(func: Any, device: str) -> bool:
    """Whether ``func`` is other ops in a row, with no kernel of its own."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = has_kernel(func.name(), "CompositeImplicitAutograd")
    return composite and not has_kernel(func.name(), torch._C._dispatch_key_for_device(device))


def _has_effects(node: torch.fx.Node) -> bool:
    target: Any = node.target
    return node.is_impure() or getattr(target, "namespace", "aten") not in _ATEN


def fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A tensor of ``mode`` that is like ``tensor``, real or traced, and shares nothing with it."""
    if tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg()):
        shape, stride = tensor.shape, tensor.stride()
        meta = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, meta, tensor.device)
    return mode.from_tensor(tensor.detach(), static_shapes=True)
