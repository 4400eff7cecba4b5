"""Running a user's function on fake tensors, functionalised: every ATen call becomes a node of an
FX graph, with the user's line.
"""

import gc
import linecache
import logging
import os
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode

from iris.errors import IrisError, TraceError
from iris.runtime.callsite import is_users
from iris.spmd.context import TraceContext, trace_scope
from iris.spmd.guards import Access
from iris.spmd.recording import DTensorFromOutside, Recorder, WriteOutside, fake


@dataclass(frozen=True)
class Output:
    """A leaf of the result: a traced value, an input, a tensor from outside, or a constant."""

    kind: str  # "value" | "input" | "tensor" | "constant"
    item: Any  # index among traced values | index of the input | the tensor | the constant

    def of(self, values: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """The leaf itself."""
        if self.kind == "value":
            return values[self.item]
        return inputs[self.item] if self.kind == "input" else self.item


@dataclass(frozen=True)
class Traced:
    """What tracing found: an FX graph whose placeholders are the tensor leaves, and how the result
    is put together. ``module`` has the ``graph``, and the tensors that its ``get_attr`` name.
    """

    module: Any
    outputs: tuple[Output, ...]
    out_tree: pytree.TreeSpec


class _Escapes(TorchFunctionMode):
    """Refuses calls that would turn a traced tensor into numbers or memory."""

    REFUSED: ClassVar = {
        torch.Tensor.numpy: "numpy()",
        torch.Tensor.tolist: "tolist()",
        torch.Tensor.__array__: "numpy conversion",
        torch.Tensor.data_ptr: "data_ptr()",
        torch.Tensor.item: "item()",
        torch.Tensor.__dlpack__: "DLPack export",
    }

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        what = self.REFUSED.get(func)
        if what is not None and is_traced(args[0]):
            raise _Value(what)
        return func(*args, **(kwargs or {}))


class OutsideWriteError(TraceError):
    """A tensor that is no argument is changed in place."""


class _Value(Exception):
    """A traced tensor's values were asked for, by the call named."""


def is_traced(value: object) -> bool:
    """Whether ``value`` is a tensor that only exists while tracing."""
    return isinstance(value, Tensor) and (
        torch._C._functorch.is_functorch_wrapped_tensor(value) or isinstance(value, FakeTensor)
    )


@contextmanager
def _recordable() -> Iterator[None]:
    """Inference tensors have no versions, and what is recorded has."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


@_recordable()
def trace(
    fn: Callable[..., Any],
    rebuild: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]],
    tensors: Sequence[Tensor],
    context: TraceContext,
    watched: Sequence[Access],
) -> Traced:
    """Run ``fn`` once on fake copies of ``tensors``, which may be traced ones of an outer trace.

    ``rebuild`` puts tensors back into the arguments. ``watched`` are the places outside that the
    function may touch; a traced tensor left in one is an error, and the old value is put back.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [fake(mode, tensor) for tensor in tensors]
    recorder = Recorder(mode, fakes[0].device.type if fakes else "cpu")
    for tensor in fakes:
        recorder.add_input(tensor)
    found: list[tuple[tuple[Output, ...], pytree.TreeSpec]] = []

    def program(*inputs: Tensor) -> list[Tensor]:
        args, kwargs = rebuild(inputs)
        with _Escapes():
            result = fn(*args, **kwargs)
        leaves, tree = pytree.tree_flatten(result)
        values: list[Tensor] = []
        outputs = tuple(_classify(leaf, inputs, values) for leaf in leaves)
        found.append((outputs, tree))
        return values

    context.recorder = recorder
    functional = torch.func.functionalize(program, remove="mutations")
    devices_in_use = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with (
        trace_scope(context),
        torch.random.fork_rng(devices_in_use),  # tracing draws no numbers that the user would miss
        _watch(watched, context.name),
        _explain(context.name),
        _quiet(),
        mode,
        recorder,
    ):
        recorder.finish(functional(*fakes))
    outputs, tree = found[-1]
    return Traced(recorder.module, outputs, tree)


def _classify(leaf: Any, inputs: Sequence[Tensor], values: list[Tensor]) -> Output:
    if not isinstance(leaf, Tensor):
        return Output("constant", leaf)
    for index, tensor in enumerate(inputs):
        if leaf is tensor:
            return Output("input", index)
    if not is_traced(leaf):
        return Output("tensor", leaf)
    values.append(leaf)
    return Output("value", len(values) - 1)


def _error_line(error: BaseException) -> str:
    """`` at model.py:41: <source>`` of the innermost user frame of a traceback."""
    line = ""
    step = error.__traceback__
    while step is not None:
        path = step.tb_frame.f_code.co_filename
        if is_users(path):
            source = linecache.getline(path, step.tb_lineno).strip()
            line = f"\n  at {os.path.basename(path)}:{step.tb_lineno}: {source}"
        step = step.tb_next
    return line


@contextmanager
def collector_paused() -> Iterator[None]:
    """A trace makes many objects and little garbage: collecting amid it only takes time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging its own frames, on every rank, for shapes that do not fit."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


# What each failure of a trace means, and the way out.
_FAILURES: dict[type[Exception], tuple[str, str]] = {
    _Value: (
        "{0} of a traced tensor: its values are not known while tracing",
        "keep the computation in torch ops, or do this outside the decorated function",
    ),
    DTensorFromOutside: (
        "reads a DTensor that is not an argument",
        "pass it as an argument: the program then sees its local part",
    ),
    DataDependentOutputException: (
        "Python asks for the value of a traced tensor (if, while, item(), int() or float())",
        "use torch.where, or branch on shapes or on a plain Python argument",
    ),
    DynamicOutputShapeException: (
        "{0.func} makes a shape that depends on values",
        "use a form with a fixed shape (masks, torch.where), or do this outside",
    ),
}


@contextmanager
def _explain(name: str) -> Iterator[None]:
    """Make TraceErrors, with the user's line, of the ways in which a trace can fail."""
    try:
        yield
    except IrisError:
        raise
    except tuple(_FAILURES) as error:
        what, help = next(found for kind, found in _FAILURES.items() if isinstance(error, kind))
        text = f"{name}: {what.format(error)}{_error_line(error)}"
        raise TraceError(text, help=help) from None
    except Exception as error:
        if isinstance(error, WriteOutside) or "mutating a non-functional tensor" in str(error):
            raise OutsideWriteError(
                f"{name}: changes in place a tensor that is not an argument{_error_line(error)}",
                help="pass the tensor as an argument, or make it a buffer of the decorated module, "
                "so that the write is part of the program",
            ) from None
        error.add_note(f"while tracing {name}{_error_line(error)}")
        raise


@contextmanager
def _watch(places: Sequence[Access], name: str) -> Iterator[None]:
    """Put back what a trace changed outside; refuse a traced tensor that it left there."""
    before = [(place, place.get()) for place in places]
    contents = [
        (place, value, copy) for place, value in before if (copy := _copy(value)) is not None
    ]
    leaked = []
    try:
        yield
    finally:
        for place, value in before:
            if is_traced(place.get()):
                place.put(value)
                leaked.append(place.text)
        for place, value, copy in contents:
            if any(is_traced(leaf) for leaf in pytree.tree_leaves(_copy(value))):
                _restore(value, copy)
                leaked.append(place.text)
    if leaked:
        raise TraceError(
            f"{name}: leaves a traced tensor in {', '.join(dict.fromkeys(leaked))}: "
            "it has no value after the trace",
            help="return the tensor from the function and store it outside",
        )


def _copy(value: Any) -> list[Any] | dict[Any, Any] | None:
    """A shallow copy of what can hold tensors: a list, a dict, an object's attributes."""
    if isinstance(value, list):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, type | types.ModuleType | types.FunctionType) or not hasattr(
        value, "__dict__"
    ):
        return None
    return dict(vars(value))


def _restore(value: Any, copy: list[Any] | dict[Any, Any]) -> None:
    if isinstance(value, list):
        value[:] = copy
        return
    target = value if isinstance(value, dict) else vars(value)
    target.clear()
    target.update(copy)
