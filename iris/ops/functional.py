"""Collectives that run at once. Ranks first exchange what they were asked for, so a mismatch is an
error on all.
"""

from collections.abc import Callable, Hashable

from torch import Tensor

from iris.errors import CollectiveMismatchError
from iris.graph.types import chunk_sizes
from iris.lower import collectives as lowered
from iris.lower.collectives import REDUCTIONS as REDUCTIONS
from iris.runtime.groups import Group

KEPT_CALLS = 256

Make = Callable[..., lowered.Collective]


def all_gather(group: Group, x: Tensor, dim: int) -> Tensor:
    """See :func:`iris.all_gather`."""
    shapes = _agree(group, "all_gather", x, free_dim=dim, detail=f"dim={dim}")
    sizes = tuple(shape[dim] for shape in shapes)
    return _build(lowered.make_all_gather, group, tuple(x.shape), sizes, dim, x.dtype)(x)


def reduce_scatter(group: Group, x: Tensor, dim: int, op: str) -> Tensor:
    """See :func:`iris.reduce_scatter`."""
    _agree(group, "reduce_scatter", x, detail=f"dim={dim}, op={op}")
    sizes = chunk_sizes(x.shape[dim], group.size)
    return _build(lowered.make_reduce_scatter, group, tuple(x.shape), sizes, dim, op, x.dtype)(x)


def all_reduce(group: Group, x: Tensor, op: str) -> Tensor:
    """See :func:`iris.all_reduce`."""
    _agree(group, "all_reduce", x, detail=f"op={op}")
    return _build(lowered.make_all_reduce, group, tuple(x.shape), op, x.dtype)(x)


def all_to_all(group: Group, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
    """See :func:`iris.all_to_all`."""
    free = concat_dim if concat_dim != split_dim else None
    detail = f"split_dim={split_dim}, concat_dim={concat_dim}"
    shapes = _agree(group, "all_to_all", x, free_dim=free, detail=detail)
    splits = chunk_sizes(x.shape[split_dim], group.size)
    make = lowered.make_all_to_all
    return _build(make, group, tuple(shapes), split_dim, splits, concat_dim, x.dtype)(x)


def broadcast(group: Group, x: Tensor, src: int) -> Tensor:
    """See :func:`iris.broadcast`."""
    _agree(group, "broadcast", x, detail=f"src={src}")
    return _build(lowered.make_broadcast, group, tuple(x.shape), src, x.dtype)(x)


def ppermute(group: Group, x: Tensor, perm: tuple[tuple[int, int], ...]) -> Tensor:
    """See :func:`iris.ppermute`."""
    _agree(group, "ppermute", x, detail=f"perm={perm}")
    return _build(lowered.make_ppermute, group, tuple(x.shape), perm, x.dtype)(x)


def _agree(
    group: Group, name: str, x: Tensor, *, detail: str, free_dim: int | None = None
) -> list[tuple[int, ...]]:
    """Shapes of all members, after checking that they differ in ``free_dim`` at most."""
    mine = (tuple(x.shape), str(x.dtype).removeprefix("torch."), detail)
    calls = group.exchange_object(name, mine)

    def fixed(call: tuple[tuple[int, ...], str, str]) -> object:
        shape, dtype, text = call
        kept = tuple(n for d, n in enumerate(shape) if d != free_dim)
        return len(shape), kept, dtype, text

    if len({fixed(call) for call in calls}) > 1:
        lines = [
            f"  rank {rank}: {dtype}{list(shape)}, {text}"
            for rank, (shape, dtype, text) in zip(group.ranks, calls, strict=True)
        ]
        raise CollectiveMismatchError(
            f"{name}: ranks of one group passed different operands\n" + "\n".join(lines),
            help="all ranks must pass the same shape, dtype and arguments"
            + (f"; only dim {free_dim} may differ" if free_dim is not None else ""),
        )
    return [call[0] for call in calls]


def _build(make: Make, group: Group, *args: Hashable) -> lowered.Collective:
    """The collective for these arguments, kept by the group.

    Members call in one order, so what they keep and what they drop is the same on all of them.
    """
    key = (make, *args)
    if key not in group.kept:
        if len(group.kept) >= KEPT_CALLS:
            group.kept.pop(next(iter(group.kept)))
        group.kept[key] = make(group, *args, make.__name__.removeprefix("make_"))
    collective: lowered.Collective = group.kept[key]
    return collective
