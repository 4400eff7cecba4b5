"""Collectives as FX calls, iris's own and torch's functional ones, in the graph's terms."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed import distributed_c10d

from iris.errors import TraceError
from iris.graph.nodes import Arg

_OPS: Any = torch.ops._c10d_functional
_SPLIT, _CAT = torch.ops.aten.split.Tensor, torch.ops.aten.cat.default

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
    node: Any,
    name: str,
    args: tuple[Arg, ...],
    axes_over: Callable[[tuple[int, ...]], tuple[str, ...]],
    env: Mapping[Any, Arg],
) -> Call | None:
    """``_c10d_functional::name(x, ..., group_name)``; None for an op that the graph has no name
    for.

    Torch gathers and scatters along dim 0 only, and cuts and joins for other dims: what it does so
    becomes one collective of that dim.
    """
    group_name: Any = args[-1]
    if name not in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast"):
        return None
    group = distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined]
    axis = _axis(axes_over(tuple(torch.distributed.get_process_group_ranks(group))))
    if name == "all_gather_into_tensor":
        cat = _cat_after(node)
        return "all_gather", args[:1], (("axis", axis), ("dim", _dim(cat) if cat else 0))
    if name == "reduce_scatter_tensor":
        split = _split_before(node, args[2])
        dim, source = (0, args[0]) if split is None else (_dim(split), env[split.args[0]])
        return "reduce_scatter", (source,), (("axis", axis), ("dim", dim), ("op", args[1]))
    if name == "all_reduce":
        return "all_reduce", args[:1], (("axis", axis), ("op", args[1]))
    return "broadcast", args[:1], (("axis", axis), ("src", args[1]))


def joined(node: Any, stands_for: dict[Any, Any]) -> Any:
    """The FX node whose value a gather of another dim than 0 gives; notes in ``stands_for`` the
    nodes that are then not needed.
    """
    cat = _cat_after(node)
    if cat is not None:
        (wait,) = node.users
        (split,) = wait.users
        stands_for.update(dict.fromkeys((wait, split, *split.users, cat), node))
    return cat


def _cat_after(node: Any) -> Any:
    """The cat in ``cat(split(wait(gather(x))), dim)``, where nothing else reads what is between."""
    if node.target is not _OPS.all_gather_into_tensor.default:
        return None
    split = _only_user(_only_user(node))
    if split is None or split.target is not _SPLIT or _dim(split):
        return None
    parts = list(split.users)
    cat = _only_user(parts[0])
    whole = cat is not None and cat.target is _CAT and len(parts) == node.args[1]
    return cat if whole and _are_parts(cat, split) and all(map(_only_user, parts)) else None


def _split_before(node: Any, size: Any) -> Any:
    """The split in ``reduce_scatter(cat(split(x, dim)))``."""
    cat = node.args[0]
    if getattr(cat, "target", None) is not _CAT or _dim(cat) or len(cat.args[0]) != size:
        return None
    first = cat.args[0][0]
    split = first.args[0] if first.target is operator.getitem else None
    whole = split is not None and split.target is _SPLIT and len(split.meta["val"]) == size
    return split if whole and _are_parts(cat, split) else None


def _are_parts(cat: Any, split: Any) -> bool:
    """Whether ``cat`` joins the parts of ``split`` in order."""
    return all(
        part.target is operator.getitem and part.args == (split, index)
        for index, part in enumerate(cat.args[0])
    )


def _only_user(node: Any) -> Any:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def _dim(node: Any) -> int:
    """The dim of a cat or a split, counted from the front."""
    value = node.meta["val"]
    at = 1 if node.target is _CAT else 2
    rank = (value if node.target is _CAT else value[0]).dim()
    return int(node.args[at]) % rank if len(node.args) > at else 0


# In the names of torch.distributed's operators, and ours.
IN_PLACE = {
    "allreduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce": "all_reduce",
    "gather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "scatter": "all_to_all",
}


def refusal(program: str, name: str, loc: str) -> TraceError:
    """The error for a collective of torch.distributed that works in place."""
    instead = next((ours for theirs, ours in IN_PLACE.items() if theirs in name), "ppermute")
    return TraceError(
        f"{program}: torch.distributed's {name} works in place and cannot be traced\n  at {loc}",
        help=f"use iris.{instead}, or torch.distributed._functional_collectives",
    )


def _axis(axes: tuple[str, ...]) -> Arg:
    return axes[0] if len(axes) == 1 else axes
