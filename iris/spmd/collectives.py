"""The public collectives: ops of the graph inside a traced program, else run at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from iris.errors import SpecError
from iris.graph.ops.rules import axes_of
from iris.ops import functional as eager
from iris.runtime.context import current
from iris.runtime.groups import Group
from iris.spmd.context import Axis, TraceContext, tracing
from iris.spmd.mesh import ProgramMesh

GroupLike = ProcessGroup | Sequence[int]

_LIBRARY = torch.library.Library("iris", "DEF")


def _define(name: str, schema: str, meta: Any) -> Callable[..., Tensor]:
    """Declare ``iris::name`` with its shape rule, as an op that is never dead code."""
    tag = torch.Tag.nondeterministic_seeded  # else traces run it where its operand is a literal
    _LIBRARY.define(f"{name}{schema}", tags=(tag,))
    _LIBRARY.impl(name, meta, "Meta")
    op: Callable[..., Tensor] = getattr(torch.ops.iris, name).default
    torch.fx.node.has_side_effect(op)
    return op


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _exchanged(x: Tensor, axis: str, split: int, concat: int, kept: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[split] = kept
    shape[concat] = size
    return x.new_empty(shape)


_all_gather = _define(
    "all_gather",
    "(Tensor x, str axis, int dim, int size) -> Tensor",
    lambda x, axis, dim, size: _resized(x, dim, size),
)
_reduce_scatter = _define(
    "reduce_scatter",
    "(Tensor x, str axis, int dim, str op, int size) -> Tensor",
    lambda x, axis, dim, op, size: _resized(x, dim, size),
)
_all_reduce = _define(
    "all_reduce", "(Tensor x, str axis, str op) -> Tensor", lambda x, axis, op: x.new_empty(x.shape)
)
_all_to_all = _define(
    "all_to_all",
    "(Tensor x, str axis, int split_dim, int concat_dim, int kept, int size) -> Tensor",
    _exchanged,
)
_broadcast = _define(
    "broadcast",
    "(Tensor x, str axis, int src) -> Tensor",
    lambda x, axis, src: x.new_empty(x.shape),
)
_ppermute = _define(
    "ppermute",
    "(Tensor x, str axis, int[] perm) -> Tensor",
    lambda x, axis, perm: x.new_empty(x.shape),
)
_axis_index = _define(
    "axis_index",
    "(str axis, Device device) -> Tensor",
    lambda axis, device: torch.empty((), dtype=torch.int64, device="meta"),
)
_LIBRARY.impl(
    "axis_index",
    lambda axis, device: torch.empty((), dtype=torch.int64, device=device),
    "BackendSelect",
)


def all_gather(
    x: Tensor,
    axis: Axis | None = None,
    dim: int = 0,
    *,
    size: int | None = None,
    group: GroupLike | None = None,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """Concatenate every rank's ``x`` along ``dim``: ``[n, ...]`` on each -> ``[sum of n, ...]`` on
    all.

    Args:
        x: any dtype, any strides; ranks may differ in dim ``dim`` only (shards of the torch.chunk
            rule).
        axis: mesh axis, or a tuple of axes (outermost first). Outside a program None means all
            ranks.
        dim: dim to join, negative counts from the end.
        size: rows after the gather, where uneven shards leave it open inside a program.
        group: a ProcessGroup or global ranks, in place of an axis.
        mesh: where ``axis`` is looked up outside a program.

    Raises SpecError for an unknown axis or dim; CollectiveMismatchError, on all ranks, when they
    disagree.

    >>> y = iris.all_gather(x, "tp", dim=0)          # doctest: +SKIP
    """
    dim = _dim(x, dim, "all_gather")
    trace = tracing()
    if trace is None:
        return eager.all_gather(_group(axis, group, mesh), x, dim)
    axes = _axes(trace, axis, group)
    gathered = trace.gathered_size(axes, x, dim, size)
    return _all_gather(x, ",".join(axes), dim, gathered)


def reduce_scatter(
    x: Tensor,
    axis: Axis | None = None,
    dim: int = 0,
    op: str = "sum",
    *,
    group: GroupLike | None = None,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """Reduce ``x`` over ranks and keep this rank's rows of ``dim``: ``[n, ...]`` -> ``[n / ranks,
    ...]``.

    Sums run in rank order with fp32 accumulation, so results repeat bit for bit. When ``n`` does
    not divide, shards follow torch.chunk: the last are smaller or empty. ``op`` is sum, avg, max
    or min. Other arguments and errors: see :func:`all_gather`.

    >>> y = iris.reduce_scatter(x, "tp", dim=0)      # doctest: +SKIP
    """
    dim = _dim(x, dim, "reduce_scatter")
    _check_op(op)
    trace = tracing()
    if trace is None:
        return eager.reduce_scatter(_group(axis, group, mesh), x, dim, op)
    axes = _axes(trace, axis, group)
    return _reduce_scatter(x, ",".join(axes), dim, op, trace.kept(axes, x.shape[dim]))


def all_reduce(
    x: Tensor,
    axis: Axis | None = None,
    op: str = "sum",
    *,
    group: GroupLike | None = None,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """Reduce ``x`` elementwise over ranks; every rank gets the result, bit for bit the same.

    ``op`` is sum, avg, max or min; avg of integers rounds toward zero; integer sums wrap as
    torch's do. Other arguments and errors: see :func:`all_gather`.

    >>> y = iris.all_reduce(x, "tp")                 # doctest: +SKIP
    """
    _check_op(op)
    trace = tracing()
    if trace is None:
        return eager.all_reduce(_group(axis, group, mesh), x, op)
    return _all_reduce(x, ",".join(_axes(trace, axis, group)), op)


def all_to_all(
    x: Tensor,
    axis: Axis | None = None,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    size: int | None = None,
    group: GroupLike | None = None,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """Send piece i of ``split_dim`` to rank i and join what arrives along ``concat_dim``.

    Pieces follow torch.chunk. ``size``: rows of ``concat_dim`` afterwards, where uneven shards
    leave it open inside a program. Other arguments and errors: see :func:`all_gather`.

    >>> y = iris.all_to_all(x, "tp", split_dim=1, concat_dim=0)       # doctest: +SKIP
    """
    split_dim, concat_dim = _dim(x, split_dim, "all_to_all"), _dim(x, concat_dim, "all_to_all")
    trace = tracing()
    if trace is None:
        return eager.all_to_all(_group(axis, group, mesh), x, split_dim, concat_dim)
    axes = _axes(trace, axis, group)
    kept = trace.kept(axes, x.shape[split_dim])
    if split_dim == concat_dim:
        joined = kept = size or kept * trace.bind(axes)[0].size(axes)
    else:
        joined = trace.gathered_size(axes, x, concat_dim, size)
    return _all_to_all(x, ",".join(axes), split_dim, concat_dim, kept, joined)


def broadcast(
    x: Tensor,
    axis: Axis | None = None,
    src: int = 0,
    *,
    group: GroupLike | None = None,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """Every rank gets the tensor of the rank at place ``src`` along ``axis`` (or in ``group``).

    ``src`` is a place in the group, not a global rank. All ranks pass a tensor of one shape and
    dtype.

    >>> y = iris.broadcast(x, "tp", src=0)           # doctest: +SKIP
    """
    trace = tracing()
    if trace is None:
        group_ = _group(axis, group, mesh)
        _check_place("broadcast", "src", src, group_.size)
        return eager.broadcast(group_, x, src)
    axes = _axes(trace, axis, group)
    _check_place("broadcast", "src", src, trace.bind(axes)[0].size(axes))
    return _broadcast(x, ",".join(axes), src)


def ppermute(
    x: Tensor,
    axis: Axis | None = None,
    perm: Sequence[tuple[int, int]] = (),
    *,
    group: GroupLike | None = None,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """Send ``x`` from place s to place d for each ``(s, d)`` in ``perm``; places not listed as d
    get zeros.

    >>> y = iris.ppermute(x, "tp", [(0, 1), (1, 0)])  # doctest: +SKIP
    """
    pairs = tuple((int(s), int(d)) for s, d in perm)
    if len({d for _, d in pairs}) != len(pairs):
        raise SpecError(f"ppermute: a destination is listed twice in {pairs}")
    trace = tracing()
    axes = () if trace is None else _axes(trace, axis, group)
    group_ = _group(axis, group, mesh) if trace is None else None
    size = group_.size if group_ else trace.bind(axes)[0].size(axes)  # type: ignore[union-attr]
    for place in (place for pair in pairs for place in pair):
        _check_place("ppermute", "perm", place, size)
    if group_ is not None:
        return eager.ppermute(group_, x, pairs)
    return _ppermute(x, ",".join(axes), [place for pair in pairs for place in pair])


def axis_index(axis: Axis | None = None, *, mesh: DeviceMesh | None = None) -> Tensor:
    """This rank's place along ``axis`` as an int64 scalar tensor: it may differ by rank without
    changing the graph.

    >>> i = iris.axis_index("tp")                    # doctest: +SKIP
    """
    trace = tracing()
    if trace is None:
        ctx = current()
        return torch.tensor(_group(axis, None, mesh).index, device=ctx.device)
    return _axis_index(",".join(_axes(trace, axis, None)), torch.device(current_device(trace)))


def axis_size(axis: Axis | None = None, *, mesh: DeviceMesh | None = None) -> int:
    """Ranks along ``axis``, a plain int.

    >>> iris.axis_size("tp")                         # doctest: +SKIP
    """
    trace = tracing()
    if trace is None:
        return _group(axis, None, mesh).size
    axes = _axes(trace, axis, None)
    return trace.bind(axes)[0].size(axes)


def current_device(trace: TraceContext) -> str:
    """Device type that the traced program runs on."""
    return "cpu" if trace.mesh is None or trace.mesh.abstract else current().device.type


def _axes(trace: TraceContext, axis: Axis | None, group: GroupLike | None) -> tuple[str, ...]:
    """The axes of the traced program's mesh that an ``axis`` or ``group`` argument means."""
    if group is None and axis is not None:
        return trace.bind(axis)[1]
    mesh = trace.mesh
    if group is None:
        if mesh is not None and len(mesh.shape.names) == 1:
            return mesh.shape.names
        return trace.bind("world")[1]
    if mesh is None:
        mesh = trace.bind("world")[0]
    return mesh.axes_over(current().group(group).ranks)


def _group(axis: Axis | None, group: GroupLike | None, mesh: DeviceMesh | None) -> Group:
    """The ranks that an eager call means: a group, an axis of a mesh, or the world."""
    ctx = current()
    if group is not None:
        return ctx.group(group)
    if mesh is None or axis is None:
        return ctx.world
    place = ProgramMesh.of(mesh)
    trace = TraceContext("eager call", place)
    return ctx.group(place.members(trace.bind(axes_of(axis))[1]))


def _dim(x: Tensor, dim: int, name: str) -> int:
    if not isinstance(x, Tensor):
        raise SpecError(f"{name}: takes a tensor, got {type(x).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise SpecError(
            f"{name}: dim {dim} of a tensor with {x.dim()} dims (shape {tuple(x.shape)})"
        )
    return dim % x.dim()


def _check_op(op: str) -> None:
    if op not in eager.REDUCTIONS:
        raise SpecError(f"reduction {op!r} is not one of {', '.join(eager.REDUCTIONS)}")


def _check_place(name: str, argument: str, place: int, size: int) -> None:
    if not 0 <= place < size:
        raise SpecError(
            f"{name}: {argument} has place {place}, the group has places 0 to {size - 1}",
            help="places count within the group; they are not global ranks",
        )
