"""Decorated functions called inside a trace: traced once a signature, then one op a call, and
inlined on import.

A hundred calls of one decorated layer cost one trace of the layer. A function whose trace cannot
be repeated like that (it writes to its arguments, returns tensors from outside, or reads traced
ones that are no arguments) is simply run inside the outer trace.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from iris.graph.types import TensorType
from iris.spmd.binding import Binder, Bound
from iris.spmd.context import TraceContext
from iris.spmd.recording import TracedOutside, returned
from iris.spmd.tracing import is_traced, trace

_LIBRARY = torch.library.Library("iris", "FRAGMENT")
_LIBRARY.define("call(Tensor[] inputs, int number) -> Tensor[]")


class _NeedsTypesError(Exception):
    """The size of a gather depends on the types of the call's operands."""


@contextmanager
def _no_types(context: TraceContext) -> Iterator[None]:
    """Types of traced tensors are not to be had: those of arguments differ by call."""

    def refuse(_: Tensor) -> TensorType:
        raise _NeedsTypesError

    before, context.type_of = context.type_of, refuse
    try:
        yield
    finally:
        context.type_of = before


def _results(inputs: Sequence[Tensor], number: int) -> list[Tensor]:
    from iris.spmd.context import tracing

    context = tracing()
    assert context is not None
    module = context.calls[number].module
    fakes = [value.meta["val"] for value in returned(module.graph)]
    return [
        torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        for fake in fakes
    ]


_LIBRARY.impl("call", _results, "Meta")
CALL = torch.ops.iris.call.default
torch.fx.node.has_side_effect(CALL)


def call_inline(
    fn: Callable[..., Any], binder: Binder, bound: Bound, key: object, context: TraceContext
) -> Any:
    """Call ``fn`` inside the trace of ``context``."""
    args, kwargs = binder.rebuild(bound.values, bound.tensors)
    apart = [is_traced(t) or isinstance(t, torch.nn.Parameter) for t in bound.tensors]
    if not apart or not all(apart):
        return fn(*args, **kwargs)
    if key not in context.signatures:
        context.signatures[key] = _trace(fn, binder, bound, context)
    number = context.signatures[key]
    if number is None:
        return fn(*args, **kwargs)
    results, traced = CALL(bound.tensors, number), context.calls[number]
    leaves = [out.of(results, bound.tensors) for out in traced.outputs]
    return pytree.tree_unflatten(leaves, traced.out_tree)


def _trace(
    fn: Callable[..., Any], binder: Binder, bound: Bound, context: TraceContext
) -> int | None:
    """Trace ``fn`` apart from the outer trace, and return the number of that trace there; None
    where a call cannot stand for it.
    """

    def rebuild(inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return binder.rebuild(bound.values, inputs)

    with temporarily_clear_interpreter_stack(), _disable_current_modes(), _no_types(context):
        outer = context.recorder
        try:
            traced = trace(fn, rebuild, bound.tensors, context, ())
        except (_NeedsTypesError, TracedOutside):
            return None
        finally:
            context.recorder = outer
    writes = any(
        node.op == "call_function" and node.target is torch.ops.aten.copy_.default
        for node in traced.module.graph.nodes
    )
    if writes or any(out.kind == "tensor" for out in traced.outputs):
        return None
    context.calls.append(traced)
    return len(context.calls) - 1
