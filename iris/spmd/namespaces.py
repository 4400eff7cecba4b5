"""``ctx.ops`` and ``ctx.ccl``: products and collectives that write into a given tensor.

Each is a program of one line, so it is fused, checked and replayed as any other.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

import torch
from torch import Tensor

from iris.errors import SpecError
from iris.graph.types import chunk_sizes
from iris.lower.choices import StageConfig
from iris.runtime.context import as_current
from iris.spmd import collectives
from iris.spmd.collectives import GroupLike
from iris.spmd.decorator import SpmdFunction, spmd

if TYPE_CHECKING:
    from iris.runtime.context import Iris

AXIS = "ranks"


class Done:
    """What ``async_op`` returns: the work is on the stream that it was called on."""

    def __init__(self, result: Tensor, event: "torch.cuda.Event | None") -> None:
        self.result, self._event = result, event

    def wait(self, stream: "torch.cuda.Stream | None" = None) -> Tensor:
        """Make ``stream`` (default: the current one) wait for the result, which is returned.

        The host does not wait.
        """
        if self._event is not None:
            (stream or torch.cuda.current_stream()).wait_event(self._event)
        return self.result


class Workspace:
    """Symmetric memory that calls of ``ctx.ops`` share, for one problem at a time.

    A call with another operation, group, shape, dtype or config gets memory of its own size in the
    place of what was there: nothing is overrun, and nothing is kept for problems that are past.
    Ranks pass their workspaces in the same calls.

    Example::

        workspace = ctx.ops.workspace()
        ctx.ops.matmul_all_reduce(output, A, B, workspace=workspace)
    """

    def __init__(self) -> None:
        self._key: object = None
        self._program: SpmdFunction | None = None

    def program(self, key: object, make: Callable[[], SpmdFunction]) -> SpmdFunction:
        """The program for a problem; that of another one is dropped first."""
        if self._program is None or key != self._key:
            self._program = None
            self._key, self._program = key, make()
        return self._program


class Call(TypedDict, total=False):
    """Keywords of every call: see `Ops`."""

    group: GroupLike | None
    async_op: bool
    config: StageConfig | str | None
    workspace: Workspace | None


class OpsCall(Call, total=False):
    """Keywords of products."""

    bias: Tensor | None


Out = Tensor | None
Result = Tensor | Done | None
Context: TypeAlias = "Iris | None"


class Namespace:
    """Programs of one context, made when first asked for, one a group and config."""

    def __init__(self, ctx: "Iris") -> None:
        self._ctx = ctx

    def _run(
        self, body: Callable[..., Tensor], output: Out, operands: tuple[Any, ...], call: Call
    ) -> Result:
        """A call of the program that ``body`` is, and which is called like it."""
        name = body.__name__
        members = self._ctx.group(call.get("group"))
        config, workspace = StageConfig.of(call.get("config")), call.get("workspace")

        def make() -> SpmdFunction:
            return spmd(mesh=members, name=name, outputs="reuse", config=config)(body)

        key: Any = ("program", name, config)
        if workspace is None:
            if key not in members.kept:
                members.kept[key] = make()
            program: SpmdFunction = members.kept[key]
        else:
            given = [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in operands]
            program = workspace.program((key, members.ranks, given), make)
        with as_current(self._ctx):
            made = program(*operands)
        result = made.clone() if output is None else output.copy_(made)
        if not call.get("async_op"):
            return result if output is None else None
        on_gpu = self._ctx.device.type == "cuda"
        return Done(result, torch.cuda.current_stream().record_event() if on_gpu else None)


class Ops(Namespace):
    """Fused matrix products and collectives. ``output`` gets the result, or is None: then it is
    returned. All ranks of the group call together.

    A fourth positional argument may be the context. Keywords: ``bias`` [N], added once, after any
    sum; ``group``, global ranks or a ProcessGroup; ``async_op``, return a `Done`, whose
    ``wait(stream)`` orders a stream after the result; ``config``, a `StageConfig` or the name of an
    algorithm, in place of what the cost model chooses; ``workspace``, memory to be used again.
    Raises SpecError where shapes or dtypes do not fit; ranks that differ are an error on all.

    Example::

        ctx.ops.matmul_all_reduce(output, A, B, ctx)      # A: [M, K/W]  B: [K/W, N]  output: [M, N]
        total = ctx.ops.matmul_all_reduce(None, A, B, config="two-shot")
    """

    def workspace(self) -> Workspace:
        """Memory for calls that follow each other: see `Workspace`."""
        return Workspace()

    def matmul_all_reduce(
        self, output: Out, A: Tensor, B: Tensor, ctx: Context = None, **call: Unpack[OpsCall]
    ) -> Result:
        """``output = sum over ranks of A @ B``: [M, K/W] @ [K/W, N] -> [M, N], alike everywhere."""
        shape = (A.shape[0], B.shape[-1])
        return self._product(matmul_all_reduce, output, A, B, ctx, shape, call)

    def all_gather_matmul(
        self,
        output: Out,
        A: Tensor,
        B: Tensor,
        ctx: Context = None,
        *,
        gather_dim: int | None = None,
        **call: Unpack[OpsCall],
    ) -> Result:
        """``output = gathered A @ B`` -> [M, N]: A is row-sharded [M/W, K], or column-sharded [M,
        K/W].

        Shapes tell which; ``gather_dim`` (0 rows, 1 columns) where both would fit.
        """
        if gather_dim is None:
            gather_dim = 0 if A.shape[-1] == B.shape[0] else 1
        shape = (A.shape[0] if gather_dim else None, B.shape[-1])
        return self._product(all_gather_matmul, output, A, B, ctx, shape, call, gather_dim)

    def matmul_all_gather(
        self, output: Out, A: Tensor, B: Tensor, ctx: Context = None, **call: Unpack[OpsCall]
    ) -> Result:
        """``output = rows of A @ B of all ranks``: [M/W, K] @ [K, N] -> [M, N]."""
        shape = (None, B.shape[-1])
        return self._product(matmul_all_gather, output, A, B, ctx, shape, call)

    def matmul_reduce_scatter(
        self, output: Out, A: Tensor, B: Tensor, ctx: Context = None, **call: Unpack[OpsCall]
    ) -> Result:
        """``output = this rank's rows of the sum of A @ B``: [M, K/W] @ [K/W, N] -> [M/W, N]."""
        members = self._ctx.group(call.get("group"))
        shape = (chunk_sizes(A.shape[0], members.size)[members.index], B.shape[-1])
        return self._product(matmul_reduce_scatter, output, A, B, ctx, shape, call)

    def _product(
        self,
        body: Callable[..., Tensor],
        output: Out,
        A: Tensor,
        B: Tensor,
        ctx: Context,
        shape: tuple[int | None, int],
        call: OpsCall,
        *gather_dim: int,
    ) -> Result:
        """Check that A @ B, bias and output fit in a result of ``shape`` (None: any), and run."""
        name, bias, faults = body.__name__, call.get("bias"), list[str]()
        if ctx is not None and ctx is not self._ctx:
            raise SpecError(f"{name}: the context given is not the one whose namespace this is")
        if A.dim() != 2 or B.dim() != 2:
            raise SpecError(f"{name}: takes two matrices, got {[*A.shape]} and {[*B.shape]}")
        if not any(gather_dim) and A.shape[1] != B.shape[0]:
            faults.append(f"A {[*A.shape]} and B {[*B.shape]} do not multiply")
        if A.dtype != B.dtype:
            faults.append(f"A is {A.dtype}, B is {B.dtype}")
        if output is not None:
            want = tuple(n if n is not None else output.shape[0] for n in shape)
            if tuple(output.shape) != want:
                faults.append(f"output is {[*output.shape]}, the result is {[*want]}")
        if bias is not None and tuple(bias.shape) != (shape[1],):
            faults.append(f"bias is {[*bias.shape]}, the result has {shape[1]} columns")
        if faults:
            raise SpecError(f"{name}: " + "\n  ".join(faults), help="see help(ctx.ops)")
        return self._run(body, output, (A, B, bias, *gather_dim), call)


class Ccl(Namespace):
    """Collectives that write into ``output``. Keywords and errors as in ``ctx.ops``.

    Example::

        ctx.ccl.all_reduce(output, x)
    """

    def all_gather(self, output: Out, x: Tensor, *, dim: int = 0, **call: Unpack[Call]) -> Result:
        """``output = x of all ranks``, joined along ``dim``."""
        return self._run(all_gather, output, (x, dim), call)

    def reduce_scatter(
        self, output: Out, x: Tensor, *, dim: int = 0, op: str = "sum", **call: Unpack[Call]
    ) -> Result:
        """``output = this rank's part`` of the sum (or avg, max, min) of x, split along ``dim``."""
        return self._run(reduce_scatter, output, (x, dim, op), call)

    def all_reduce(
        self, output: Out, x: Tensor, *, op: str = "sum", **call: Unpack[Call]
    ) -> Result:
        """``output = sum (or avg, max, min) of x`` over ranks; may be ``x`` itself."""
        return self._run(all_reduce, output, (x, op), call)

    def all_to_all(
        self,
        output: Out,
        x: Tensor,
        *,
        split_dim: int = 0,
        concat_dim: int = 0,
        **call: Unpack[Call],
    ) -> Result:
        """``output = piece i of every rank``, on rank i; see :func:`iris.all_to_all`."""
        return self._run(all_to_all, output, (x, split_dim, concat_dim), call)


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


def _matmul(A: Tensor, B: Tensor) -> Tensor:
    """``A @ B``; of int8 in int32."""
    return torch._int_mm(A, B) if A.dtype == torch.int8 else A @ B


def matmul_all_reduce(A: Tensor, B: Tensor, bias: Tensor | None) -> Tensor:
    return _plus(collectives.all_reduce(_matmul(A, B), AXIS), bias)


def all_gather_matmul(A: Tensor, B: Tensor, bias: Tensor | None, dim: int) -> Tensor:
    return _plus(_matmul(collectives.all_gather(A, AXIS, dim), B), bias)


def matmul_all_gather(A: Tensor, B: Tensor, bias: Tensor | None) -> Tensor:
    return collectives.all_gather(_plus(_matmul(A, B), bias), AXIS)


def matmul_reduce_scatter(A: Tensor, B: Tensor, bias: Tensor | None) -> Tensor:
    return _plus(collectives.reduce_scatter(_matmul(A, B), AXIS), bias)


def all_gather(x: Tensor, dim: int) -> Tensor:
    return collectives.all_gather(x, AXIS, dim)


def reduce_scatter(x: Tensor, dim: int, op: str) -> Tensor:
    return collectives.reduce_scatter(x, AXIS, dim, op)


def all_reduce(x: Tensor, op: str) -> Tensor:
    return collectives.all_reduce(x, AXIS, op)


def all_to_all(x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
    return collectives.all_to_all(x, AXIS, split_dim, concat_dim)
