"""``ctx.ops`` and ``ctx.ccl``: products and collectives that write into a given tensor.

Each is a program of one line, so it is fused, checked and replayed as any other.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from iris.errors import SpecError
from iris.graph.types import chunk_sizes
from iris.spmd import collectives
from iris.spmd.collectives import GroupLike
from iris.spmd.decorator import SpmdFunction, spmd

if TYPE_CHECKING:
    from iris.runtime.context import Iris

AXIS = "ranks"


class Done:
    """What ``async_op`` returns: the work is on the stream that it was called on."""

    def __init__(self, event: "torch.cuda.Event | None") -> None:
        self._event = event

    def wait(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Make ``stream`` (default: the current one) wait for the result; the host does not."""
        if self._event is not None:
            (stream or torch.cuda.current_stream()).wait_event(self._event)


class Namespace:
    """Programs of one context, made when first asked for, one a group."""

    def __init__(self, ctx: "Iris") -> None:
        self._ctx = ctx

    def _run(
        self,
        name: str,
        body: Callable[..., Tensor],
        output: Tensor,
        operands: tuple[Any, ...],
        group: GroupLike | None,
        async_op: bool,
    ) -> Done | None:
        members = self._ctx.group(group)
        key = ("program", name)
        if key not in members.kept:
            members.kept[key] = spmd(mesh=members, name=name, outputs="reuse")(body)
        program: SpmdFunction = members.kept[key]
        output.copy_(program(*operands))
        if not async_op:
            return None
        on_gpu = self._ctx.device.type == "cuda"
        return Done(torch.cuda.current_stream().record_event() if on_gpu else None)

    def _check(self, name: str, ctx: "Iris | None", *operands: Tensor) -> None:
        if ctx is not None and ctx is not self._ctx:
            raise SpecError(f"{name}: the context given is not the one whose namespace this is")
        if any(x.dim() != 2 for x in operands):
            shapes = " and ".join(str(list(x.shape)) for x in operands)
            raise SpecError(f"{name}: takes two matrices, got {shapes}")


class Ops(Namespace):
    """Fused matrix products and collectives. ``output`` gets the result; all ranks of the group
    call together.

    A fourth positional argument may be the context. Keywords: ``bias`` [N], added once, after any
    sum; ``group``, global ranks or a ProcessGroup; ``async_op``, return a handle whose
    ``wait(stream)`` orders a stream after the result.
    Raises SpecError where shapes or dtypes do not fit.

    Example::

        ctx.ops.matmul_all_reduce(output, A, B, ctx)      # A: [M, K/W]  B: [K/W, N]  output: [M, N]
    """

    def matmul_all_reduce(
        self,
        output: Tensor,
        A: Tensor,
        B: Tensor,
        ctx: "Iris | None" = None,
        *,
        bias: Tensor | None = None,
        group: GroupLike | None = None,
        async_op: bool = False,
    ) -> Done | None:
        """``output = sum of all ranks' A @ B``, on all: [M, K/W] @ [K/W, N] -> [M, N]."""
        name = "matmul_all_reduce"
        self._check(name, ctx, A, B)
        _fits(name, A, B, A.shape[1], output, (A.shape[0], B.shape[1]), bias)
        return self._run(name, _matmul_all_reduce, output, (A, B, bias), group, async_op)

    def all_gather_matmul(
        self,
        output: Tensor,
        A: Tensor,
        B: Tensor,
        ctx: "Iris | None" = None,
        *,
        bias: Tensor | None = None,
        gather_dim: int | None = None,
        group: GroupLike | None = None,
        async_op: bool = False,
    ) -> Done | None:
        """``output = gathered A @ B`` -> [M, N]: A is row-sharded [M/W, K], or column-sharded [M,
        K/W].

        Shapes tell which; ``gather_dim`` (0 rows, 1 columns) where both would fit.
        """
        name = "all_gather_matmul"
        self._check(name, ctx, A, B)
        if gather_dim is None:
            gather_dim = 0 if A.shape[1] == B.shape[0] else 1
        if gather_dim == 0:
            shape = (output.shape[0], B.shape[1])
            _fits(name, A, B, A.shape[1], output, shape, bias)
        else:
            _fits(name, A, B, B.shape[0], output, (A.shape[0], B.shape[1]), bias)
        return self._run(
            name, _all_gather_matmul, output, (A, B, bias, gather_dim), group, async_op
        )

    def matmul_all_gather(
        self,
        output: Tensor,
        A: Tensor,
        B: Tensor,
        ctx: "Iris | None" = None,
        *,
        bias: Tensor | None = None,
        group: GroupLike | None = None,
        async_op: bool = False,
    ) -> Done | None:
        """``output = rows of A @ B of all ranks``: [M/W, K] @ [K, N] -> [M, N]."""
        name = "matmul_all_gather"
        self._check(name, ctx, A, B)
        _fits(name, A, B, A.shape[1], output, (output.shape[0], B.shape[1]), bias)
        return self._run(name, _matmul_all_gather, output, (A, B, bias), group, async_op)

    def matmul_reduce_scatter(
        self,
        output: Tensor,
        A: Tensor,
        B: Tensor,
        ctx: "Iris | None" = None,
        *,
        bias: Tensor | None = None,
        group: GroupLike | None = None,
        async_op: bool = False,
    ) -> Done | None:
        """``output = this rank's rows of the sum of A @ B``: [M, K/W] @ [K/W, N] -> [M/W, N]."""
        name = "matmul_reduce_scatter"
        self._check(name, ctx, A, B)
        members = self._ctx.group(group)
        rows = chunk_sizes(A.shape[0], members.size)[members.index]
        _fits(name, A, B, A.shape[1], output, (rows, B.shape[1]), bias)
        return self._run(name, _matmul_reduce_scatter, output, (A, B, bias), group, async_op)


class Ccl(Namespace):
    """Collectives that write into ``output``. Keywords and errors as in ``ctx.ops``.

    Example::

        ctx.ccl.all_reduce(output, x)
    """

    def all_gather(
        self,
        output: Tensor,
        x: Tensor,
        *,
        dim: int = 0,
        group: GroupLike | None = None,
        async_op: bool = False,
    ) -> Done | None:
        """``output = x of all ranks``, joined along ``dim``."""
        return self._run("all_gather", _all_gather, output, (x, dim), group, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        x: Tensor,
        *,
        dim: int = 0,
        op: str = "sum",
        group: GroupLike | None = None,
        async_op: bool = False,
    ) -> Done | None:
        """``output = this rank's part`` of the sum (or avg, max, min) of x, split along ``dim``."""
        return self._run("reduce_scatter", _reduce_scatter, output, (x, dim, op), group, async_op)

    def all_reduce(
        self,
        output: Tensor,
        x: Tensor,
        *,
        op: str = "sum",
        group: GroupLike | None = None,
        async_op: bool = False,
    ) -> Done | None:
        """``output = sum (or avg, max, min) of x`` over ranks; may be ``x`` itself."""
        return self._run("all_reduce", _all_reduce, output, (x, op), group, async_op)

    def all_to_all(
        self,
        output: Tensor,
        x: Tensor,
        *,
        split_dim: int = 0,
        concat_dim: int = 0,
        group: GroupLike | None = None,
        async_op: bool = False,
    ) -> Done | None:
        """``output = piece i of every rank``, on rank i; see :func:`iris.all_to_all`."""
        operands = (x, split_dim, concat_dim)
        return self._run("all_to_all", _all_to_all, output, operands, group, async_op)


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


def _matmul(A: Tensor, B: Tensor) -> Tensor:
    return torch._int_mm(A, B) if A.dtype == torch.int8 else A @ B


def _matmul_all_reduce(A: Tensor, B: Tensor, bias: Tensor | None) -> Tensor:
    return _plus(collectives.all_reduce(_matmul(A, B), AXIS), bias)


def _all_gather_matmul(A: Tensor, B: Tensor, bias: Tensor | None, dim: int) -> Tensor:
    return _plus(_matmul(collectives.all_gather(A, AXIS, dim), B), bias)


def _matmul_all_gather(A: Tensor, B: Tensor, bias: Tensor | None) -> Tensor:
    return collectives.all_gather(_plus(_matmul(A, B), bias), AXIS)


def _matmul_reduce_scatter(A: Tensor, B: Tensor, bias: Tensor | None) -> Tensor:
    return _plus(collectives.reduce_scatter(_matmul(A, B), AXIS), bias)


def _all_gather(x: Tensor, dim: int) -> Tensor:
    return collectives.all_gather(x, AXIS, dim)


def _reduce_scatter(x: Tensor, dim: int, op: str) -> Tensor:
    return collectives.reduce_scatter(x, AXIS, dim, op)


def _all_reduce(x: Tensor, op: str) -> Tensor:
    return collectives.all_reduce(x, AXIS, op)


def _all_to_all(x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
    return collectives.all_to_all(x, AXIS, split_dim, concat_dim)


def _fits(
    name: str,
    A: Tensor,
    B: Tensor,
    inner: int,
    output: Tensor,
    shape: tuple[int, int],
    bias: Tensor | None,
) -> None:
    """SpecError that says what A, B, bias and output should be."""
    faults = []
    if B.shape[0] != inner:
        faults.append(f"A {list(A.shape)} and B {list(B.shape)} do not multiply")
    if A.dtype != B.dtype:
        faults.append(f"A is {A.dtype}, B is {B.dtype}")
    if tuple(output.shape) != shape:
        faults.append(f"output is {list(output.shape)}, the result is {list(shape)}")
    if bias is not None and tuple(bias.shape) != (shape[1],):
        faults.append(f"bias is {list(bias.shape)}, the result has {shape[1]} columns")
    if faults:
        raise SpecError(f"{name}: " + "\n  ".join(faults), help="see help(ctx.ops)")
