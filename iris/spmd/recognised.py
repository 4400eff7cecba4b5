"""Collectives as FX calls, iris's own and torch's functional ones (what DTensor emits), in terms
of the graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d

from iris.errors import TraceError
from iris.graph.nodes import Arg

Call = tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]

_FIELDS = {
    "all_gather": ("axis", "dim"),
    "reduce_scatter": ("axis", "dim", "op"),
    "all_reduce": ("axis", "op"),
    "all_to_all": ("axis", "split_dim", "concat_dim"),
    "broadcast": ("axis", "src"),
    "ppermute": ("axis", "perm"),
    "axis_index": ("axis",),
}


def own(name: str, args: tuple[Arg, ...]) -> Call:
    """``iris::name(x, axis, ...)``: axis names apart, local sizes left to the types."""
    operands, rest = (args[:1], args[1:]) if name != "axis_index" else ((), args)
    attrs = dict(zip(_FIELDS[name], rest, strict=False))
    attrs["axis"] = _axis(tuple(str(attrs["axis"]).split(",")))
    if name == "ppermute":
        flat = attrs["perm"]
        assert isinstance(flat, tuple)
        attrs["perm"] = tuple(zip(flat[::2], flat[1::2], strict=True))
    return name, operands, tuple(attrs.items())


def functional(
    name: str, args: tuple[Arg, ...], axes_over: Callable[[tuple[int, ...]], tuple[str, ...]]
) -> Call | None:
    """``_c10d_functional::name(x, ..., group_name)``; None for an op that the graph has no name
    for.
    """
    group_name: Any = args[-1]
    if name not in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast"):
        return None
    group = distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined]
    axis = _axis(axes_over(tuple(torch.distributed.get_process_group_ranks(group))))
    if name == "all_gather_into_tensor":
        return "all_gather", args[:1], (("axis", axis), ("dim", 0))
    if name == "reduce_scatter_tensor":
        return "reduce_scatter", args[:1], (("axis", axis), ("dim", 0), ("op", args[1]))
    if name == "all_reduce":
        return "all_reduce", args[:1], (("axis", axis), ("op", args[1]))
    return "broadcast", args[:1], (("axis", axis), ("src", args[1]))


def refusal(program: str, name: str, loc: str) -> TraceError:
    """The error for a collective of torch.distributed that works in place."""
    return TraceError(
        f"{program}: torch.distributed's {name} works in place and cannot be traced\n  at {loc}",
        help=f"use iris.{name.strip('_')}, or torch.distributed._functional_collectives",
    )


def _axis(axes: tuple[str, ...]) -> Arg:
    return axes[0] if len(axes) == 1 else axes
