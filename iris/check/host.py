"""Notes what torch operations of the host do to the heap."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from iris.check.log import READ, WRITE
from iris.check.recorder import Recorder

_MOST_ELEMENTS = 1 << 22  # of a tensor with holes; larger ones count as their whole extent


class HostAccesses(TorchDispatchMode):
    """While active, operands of torch operations that lie on a heap are noted."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._recorder.muted and not _only_looks(func):
            for argument, value in _bound(func, args, kwargs):
                kind = WRITE if argument.is_write else READ
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.numel():
                        self._touch(kind, tensor)
        return result

    def _touch(self, kind: str, x: Tensor) -> None:
        if x.device.type != "cpu" or x.layout != torch.strided:
            return
        sizes = [(n, step) for n, step in zip(x.shape, x.stride(), strict=True) if n > 1]
        extent = 1 + sum((n - 1) * step for n, step in sizes)
        start = x.data_ptr()
        if x.numel() >= extent or x.numel() > _MOST_ELEMENTS:
            stop = start + extent * x.itemsize
            self._recorder.touch_ranges(kind, np.array([start]), np.array([stop]))
            return
        at = np.array([start])
        for n, step in sizes:
            at = (at[:, None] + np.arange(n) * step * x.itemsize).ravel()
        self._recorder.touch(kind, at, x.itemsize)


def _bound(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Every argument of a call: what the schema says of it, and its value."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if value is not None:
            yield argument, value


def _only_looks(func: Any) -> bool:
    """Whether an operation reads no element: it makes a view, or a tensor of the same shape."""
    name = func._schema.name.partition("::")[2]
    return bool(func.is_view) or name.endswith("_like") or name.startswith(("new_", "set_", "sym_"))
