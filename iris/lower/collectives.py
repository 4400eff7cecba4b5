"""Collectives as torch ops over the shared heap: the plain lowering, and the oracle for every
kernel.

Each ``make_*`` is collective (it may grow the group's staging) and returns a function that does
the work: write this rank's part into its staging buffer, meet (`Group.sync`), read the peers'
buffers. Two buffers alternate with the group's epoch, so no second meeting is needed: see NOTE
[Staging parity] in `iris.runtime.groups`.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from iris.errors import UnsupportedError
from iris.lower.dtypes import accumulator
from iris.runtime.groups import Group

Collective = Callable[[Tensor], Tensor]
REDUCTIONS = ("sum", "max", "min", "avg")


class Meeting:
    """Staging views of one collective: this rank's for writing, every member's for reading, by
    parity.
    """

    @torch.inference_mode(False)  # views that are kept, and written to in any mode
    def __init__(
        self, group: Group, shapes: Sequence[Sequence[int]], dtype: torch.dtype, what: str
    ) -> None:
        self.group, self.what = group, what
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        staging = group.staging(max(*sizes, 1))

        def typed(buffer: Tensor, member: int) -> Tensor:
            return buffer[: sizes[member]].view(dtype).view(tuple(shapes[member]))

        self.mine = [typed(staging.local(parity), group.index) for parity in (0, 1)]
        self.parts = [
            [typed(staging.peer(member, parity), member) for member in range(group.size)]
            for parity in (0, 1)
        ]
        self.is_cuda = self.mine[0].is_cuda

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Publish ``x``, wait for all members, return views of every member's tensor."""
        parity = (self.group.epoch + 1) & 1
        self.mine[parity].copy_(x)
        if self.is_cuda:
            torch.cuda.current_stream().synchronize()
        self.group.sync(self.what)
        return self.parts[parity]


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def make_all_gather(
    group: Group,
    shape: Sequence[int],
    sizes: Sequence[int],
    dim: int,
    dtype: torch.dtype,
    what: str,
) -> Collective:
    """Concatenate along ``dim``; ``sizes[i]`` rows come from member i (uneven and zero allowed)."""
    if group.size == 1:
        return torch.clone
    meeting = Meeting(group, [resized(shape, dim, n) for n in sizes], dtype, what)
    # torch.cat has no kernel for some one-byte floats: move them as bytes.
    carrier = torch.uint8 if dtype.itemsize == 1 else dtype

    def run(x: Tensor) -> Tensor:
        return torch.cat([part.view(carrier) for part in meeting(x)], dim).view(dtype)

    return run


def reduction(op: str, dtype: torch.dtype, size: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """Combine tensors in rank order; sums of narrow floats are held in fp32.

    ``avg`` of integers rounds toward zero. Integer sums wrap as torch's do.
    """
    if op not in REDUCTIONS:
        raise UnsupportedError(f"reduction {op!r} is not one of {', '.join(REDUCTIONS)}")
    if dtype == torch.bool and op != "max" and op != "min":
        raise UnsupportedError(
            f"{op} of bool tensors has no meaning", help="use max (or) or min (and)"
        )
    if dtype.is_complex and op in ("max", "min"):
        raise UnsupportedError(f"{op} of complex tensors has no order")
    combine = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
    wide = accumulator(dtype)

    def run(parts: Sequence[Tensor]) -> Tensor:
        total = reduce(combine, parts[1:], parts[0].to(wide, copy=True))
        if op == "avg":
            rounding = None if dtype.is_floating_point or dtype.is_complex else "trunc"
            total = torch.div(total, size, rounding_mode=rounding)
        return total.to(dtype)

    def run_narrow(parts: Sequence[Tensor]) -> Tensor:
        return run([part.to(wide) for part in parts])

    # One-byte floats promote with nothing, so they are widened first.
    return run_narrow if dtype.is_floating_point and dtype.itemsize == 1 else run


def make_all_reduce(
    group: Group, shape: Sequence[int], op: str, dtype: torch.dtype, what: str
) -> Collective:
    """Reduce elementwise over members, in rank order; the same bits on every member."""
    combine = reduction(op, dtype, group.size)
    if group.size == 1:
        return torch.clone
    meeting = Meeting(group, [shape] * group.size, dtype, what)
    return lambda x: combine(meeting(x))


def make_reduce_scatter(
    group: Group,
    shape: Sequence[int],
    sizes: Sequence[int],
    dim: int,
    op: str,
    dtype: torch.dtype,
    what: str,
) -> Collective:
    """Reduce over members and keep rows ``sizes[index]`` of ``dim``, in member order."""
    combine = reduction(op, dtype, group.size)
    if group.size == 1:
        return torch.clone
    meeting = Meeting(group, [shape] * group.size, dtype, what)
    start, size = sum(sizes[: group.index]), sizes[group.index]
    return lambda x: combine([part.narrow(dim, start, size) for part in meeting(x)])


def make_all_to_all(
    group: Group,
    shapes: Sequence[Sequence[int]],
    split_dim: int,
    splits: Sequence[int],
    concat_dim: int,
    dtype: torch.dtype,
    what: str,
) -> Collective:
    """Send piece i of ``split_dim`` (``splits[i]`` rows) to member i; join what comes along
    ``concat_dim``.

    ``shapes[i]`` is member i's operand.
    """
    if group.size == 1:
        return torch.clone
    meeting = Meeting(group, shapes, dtype, what)
    start, size = sum(splits[: group.index]), splits[group.index]
    carrier = torch.uint8 if dtype.itemsize == 1 else dtype

    def run(x: Tensor) -> Tensor:
        pieces = [part.narrow(split_dim, start, size).view(carrier) for part in meeting(x)]
        return torch.cat(pieces, concat_dim).view(dtype)

    return run


def make_broadcast(
    group: Group, shape: Sequence[int], src: int, dtype: torch.dtype, what: str
) -> Collective:
    """Every member gets the tensor of member ``src`` (its place in the group)."""
    if group.size == 1:
        return torch.clone
    meeting = Meeting(group, [shape] * group.size, dtype, what)
    return lambda x: meeting(x)[src].clone()


def make_ppermute(
    group: Group,
    shape: Sequence[int],
    perm: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    what: str,
) -> Collective:
    """Member d gets the tensor of member s for each ``(s, d)`` in ``perm``; others get zeros."""
    source = next((s for s, d in perm if d == group.index), None)
    if group.size == 1:
        return torch.clone if source is not None else torch.zeros_like
    meeting = Meeting(group, [shape] * group.size, dtype, what)

    def run(x: Tensor) -> Tensor:
        parts = meeting(x)
        return torch.zeros_like(x) if source is None else parts[source].clone()

    return run
