"""The algebra that every type rule is written in.

An op says where each dim of each operand goes: to an output dim, into a sum (a label), or nowhere
(``None``, the ranks' values mix). `propagate` turns that into the type of the output.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from iris.errors import TypeRuleError
from iris.graph.ops.base import InferContext, Local
from iris.graph.types import Mesh, TensorType, chunk_sizes

# Where a dim of an operand goes: an output dim, a sum over dims of the same label, or None.
Link = int | str | None
# Operand positions in which an op is linear together: ((0, 1),) for add, ((0,), (1,)) for mul.
Linear = tuple[tuple[int, ...], ...]
Dim = tuple[int, tuple[str, ...]]


def axes_of(axis: str | Sequence[str]) -> tuple[str, ...]:
    """The ``axis`` argument of a collective as a tuple, outermost axis first."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def group_size(mesh: Mesh, axes: Iterable[str]) -> int:
    """Ranks in one group over ``axes``."""
    return math.prod(mesh.size(axis) for axis in axes)


def shard_sizes(n: int, mesh: Mesh, axes: Sequence[str]) -> tuple[int, ...]:
    """Rows of every shard of ``n`` rows split over ``axes``, in group order (first axis slowest).

    >>> shard_sizes(5, Mesh((("dp", 2), ("tp", 2))), ("dp", "tp"))
    (2, 1, 1, 1)
    """
    sizes: tuple[int, ...] = (n,)
    for axis in axes:
        sizes = tuple(part for size in sizes for part in chunk_sizes(size, mesh.size(axis)))
    return sizes


def tensors(args: Iterable[Any], attrs: Mapping[str, Any] | None = None) -> Iterator[TensorType]:
    """Every tensor among typed arguments, in the order of `Node.uses`."""
    for arg in (*args, *(attrs or {}).values()):
        if isinstance(arg, TensorType):
            yield arg
        elif isinstance(arg, tuple | list):
            yield from tensors(arg)


def at(args: Sequence[Any], position: int, default: Any = None) -> Any:
    """``args[position]``, or ``default`` where the call is shorter."""
    return args[position] if position < len(args) else default


def shape_dim(dim: int, ndim: int) -> int:
    """``dim`` counted from the front; a scalar has one dim, as in torch."""
    return dim % max(ndim, 1)


def aligned(sizes: Sequence[int], out: Sequence[int]) -> tuple[Link, ...]:
    """Links of an operand that broadcasts to ``out``: dims meet from the right if sizes agree."""
    skip = len(out) - len(sizes)
    return tuple(skip + d if n == out[skip + d] else None for d, n in enumerate(sizes))


def propagate(
    op: str,
    ctx: InferContext,
    operands: Sequence[TensorType | None],
    links: Sequence[Sequence[Link]],
    local: Local,
    linear: Linear = (),
) -> TensorType:
    """Type of an output whose dims come from dims of the operands (None: a number).

    Operands that meet in an output dim give it their split; where they disagree the value varies
    over those axes. Operands split alike on a summed dim make the output partial. Partial operands
    are allowed where ``op`` is linear.
    """
    plain = TensorType(local.dtype, local.shape)
    if all(t is None or t.is_replicated for t in operands):
        return plain
    partial, lost = carry_partial(op, ctx, operands, linear)
    meeting: dict[int | str, set[Dim]] = {}
    for type, targets in zip(operands, links, strict=True):
        if type is None:
            continue
        lost.update(type.varying)
        for n, axes, target in zip(type.shape, type.spec, targets, strict=True):
            if target is None:
                lost.update(axes)
            elif axes or isinstance(target, str):
                meeting.setdefault(target, set()).add((n, axes))
    dims: list[Dim] = [(n, ()) for n in local.shape]
    for target, found in meeting.items():
        if len(found) > 1:
            lost.update(axis for _, axes in found for axis in axes)
        elif isinstance(target, str):
            partial.update(next(iter(found))[1])
        else:
            dims[target] = next(iter(found))
    return settle(ctx, dims, local, partial, lost)


def settle(
    ctx: InferContext,
    dims: Sequence[Dim],
    local: Local,
    partial: Iterable[str] = (),
    lost: Iterable[str] = (),
) -> TensorType:
    """The type with these dims, as far as it holds.

    An axis claimed by two dims, and a type whose shard is not what tracing saw, fall back to
    varying. An axis in ``lost`` varies unless it splits a dim: a shard may hold anything.
    """
    claims = Counter(axis for _, axes in dims for axis in axes)
    lost = set(lost)
    if any(count > 1 for count in claims.values()):
        twice = {axis for axis, count in claims.items() if count > 1}
        lost.update(axis for _, axes in dims if twice & set(axes) for axis in axes)
        dims = [
            (n, ()) if twice & set(axes) else (size, axes)
            for n, (size, axes) in zip(local.shape, dims, strict=True)
        ]
    split = {axis for _, axes in dims for axis in axes}
    shape, spec = tuple(n for n, _ in dims), tuple(axes for _, axes in dims)
    varying = lost - split
    type = TensorType(
        local.dtype, shape, spec, tuple(set(partial) - varying - split), tuple(varying)
    )
    if ctx.local(type) == local.shape:
        return type
    return TensorType(local.dtype, local.shape, (), type.partial, (*varying, *split))


def own_numbers(ctx: InferContext, x: TensorType) -> TensorType:
    """``x`` where each rank draws its own numbers: varying over every axis that splits nothing."""
    return replace(x, varying=tuple(axis for axis in ctx.mesh.names if axis not in x.split_axes))


def redimmed(ctx: InferContext, x: TensorType, dims: Sequence[Dim], local: Local) -> TensorType:
    """``x`` rearranged by a linear op into ``dims``; axes that no dim claims any more vary."""
    lost = {*x.varying, *x.split_axes}
    return settle(ctx, dims, local, x.partial, lost)


def carry_partial(
    op: str, ctx: InferContext, operands: Sequence[TensorType | None], linear: Linear
) -> tuple[set[str], set[str]]:
    """Axes over which the output is partial, and axes over which nothing is known any more.

    A sum still due passes through where ``op`` is linear in just the operands that carry it. Where
    another operand varies the user may be adding up parts by hand, so nothing is claimed. All else
    is an error.
    """
    kept: set[str] = set()
    lost: set[str] = set()
    for axis in sorted({axis for t in operands if t is not None for axis in t.partial}):
        parts = tuple(i for i, t in enumerate(operands) if t is not None and axis in t.partial)
        rest = [t for i, t in enumerate(operands) if t is not None and i not in parts]
        if parts in linear and all(t.replicated_over(axis) for t in rest):
            kept.add(axis)
        elif (
            any(set(parts) <= set(group) for group in linear)
            and any(axis in t.varying for t in rest)
            and not any(axis in t.split_axes for t in rest)
        ):
            lost.add(axis)
        else:
            raise_not_linear(op, ctx, operands, axis, parts, linear)
    return kept, lost


def raise_not_linear(
    op: str,
    ctx: InferContext,
    operands: Sequence[TensorType | None],
    axis: str,
    parts: tuple[int, ...],
    linear: Linear,
) -> NoReturn:
    """Say which operand still needs its sum, and what ``op`` would do to the parts."""
    names = operand_names(ctx, operands)
    part, short = names[parts[0]], op.partition(".")[0]
    due = f"is a partial sum over {axis!r}"
    why = f"{short} of the parts does not add up to {short} of the sum"
    missing = [i for group in linear if set(parts) < set(group) for i in group if i not in parts]
    if missing:
        other, times = names[missing[0]], ctx.mesh.size(axis)
        what = f"{part} {due} but {other} is not"
        why = f"each rank would use {other} in its part: the sum would count it {times} times"
    elif len(parts) > 1:
        what = f"{part} {due} and so is {names[parts[1]]}"
    elif linear:
        split = [i for i, t in enumerate(operands) if t is not None and axis in t.split_axes]
        other = names[split[0]]
        what = f"{part} {due} and {other} is split over it"
    else:
        what = f"{part} {due} and {short} is not linear"
    help = f"all_reduce or reduce_scatter {part} over {axis!r} first"
    refuse(ctx, operands, f"{short}: {what}", help, why)


def operand_names(ctx: InferContext, operands: Sequence[TensorType | None]) -> list[str]:
    """How an error calls each operand: ``%x``, or its place where names are not known."""
    names, source = [], iter(ctx.sources)
    for position, type in enumerate(operands):
        if type is None:
            names.append("the number")
        else:
            name, _ = next(source, ("", ""))
            names.append(f"%{name}" if name else f"operand {position}")
    return names


def where(ctx: InferContext, operands: Sequence[TensorType | None]) -> list[str]:
    """Lines of an error: the user's line, then every operand and its origin."""
    lines = [f"  at {ctx.loc}"] if ctx.loc else []
    made = iter(ctx.sources)
    for name, type in zip(operand_names(ctx, operands), operands, strict=True):
        if type is not None:
            _, loc = next(made, ("", ""))
            lines.append(f"  {name}: {type}" + (f", made at {loc}" if loc else ""))
    return lines


def refuse(
    ctx: InferContext, operands: Sequence[TensorType | None], what: str, help: str, why: str = ""
) -> NoReturn:
    """Raise a type rule's error: what is wrong, the user's line, the operands, the way out."""
    lines = [what, *where(ctx, operands), *([f"  {why}"] if why else [])]
    raise TypeRuleError("\n".join(lines), help=help)
