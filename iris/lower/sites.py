"""Collectives of a graph, built for one rank: sizes from the types, ranks from the mesh."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from iris.errors import UnsupportedError
from iris.graph.nodes import Graph, Node, refs
from iris.graph.ops.rules import axes_of, shard_sizes
from iris.graph.types import TensorType
from iris.lower import collectives
from iris.lower.collectives import Collective
from iris.lower.dtypes import TORCH_DTYPES
from iris.runtime.context import Iris
from iris.runtime.groups import Group
from iris.runtime.guards import nans


@dataclass(frozen=True)
class Place:
    """Where a program runs: this rank's coordinate, its context, and the group along any axes."""

    coord: Mapping[str, int]
    ctx: Iris
    group: Callable[[tuple[str, ...]], Group]

    def group_of(self, node: Node) -> Group:
        """The ranks that ``node`` communicates among."""
        return self.group(axes_of(node.kwargs["axis"]))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Site:
    """One collective of a graph at one place."""

    graph: Graph
    place: Place
    node: Node
    number_in_program: int  # the same on all ranks; value names are not where shards are uneven
    as_kernel: bool = False

    @property
    def group(self) -> Group:
        return self.place.group_of(self.node)

    @property
    def axes(self) -> tuple[str, ...]:
        return axes_of(self.node.kwargs["axis"])  # type: ignore[arg-type]

    @property
    def operand(self) -> TensorType:
        """Type of the value that is sent."""
        (name,) = refs(self.node.args)
        return self.graph.types[name]

    @property
    def shape(self) -> list[int]:
        """Local shape of the value that is sent."""
        return list(self.operand.local_shape(self.graph.mesh, self.place.coord))

    @property
    def dtype(self) -> Any:
        return TORCH_DTYPES[self.operand.dtype]

    @property
    def what(self) -> str:
        """How errors call this collective."""
        at = f" at {self.node.loc}" if self.node.loc else ""
        program = f"program {self.graph.name} {self.signature:08x}"
        return f"{self.node.op} #{self.number_in_program}{at} in {program}"

    @property
    def signature(self) -> int:
        """A number that differs between programs of one function: of their inputs' types."""
        types = [str(value.type) for value in self.graph.inputs] if self.graph.alike else []
        return zlib.crc32(", ".join(types).encode())

    def number(self, attribute: str) -> int:
        return int(self.node.kwargs[attribute])  # type: ignore[arg-type]

    def shards(self, size: int) -> tuple[int, ...]:
        """Rows that each member keeps of a dim of ``size`` rows."""
        return shard_sizes(size, self.graph.mesh, self.axes)

    def held(self, dim: int) -> Sequence[int]:
        """Rows of dim ``dim`` that each member has to give."""
        joined = self.node.out.type.local_shape(self.graph.mesh, self.place.coord)[dim]
        split = self.operand.spec[dim][-len(self.axes) :] == self.axes
        if not split and joined == self.shape[dim] * self.group.size:
            return [self.shape[dim]] * self.group.size
        return self.shards(joined)


class KernelCollective:
    """A collective as one kernel launch; with ``dry`` set the kernel is loaded and does nothing."""

    def __init__(self, stage: Any, shape: Sequence[int], dtype: Any, ctx: Iris) -> None:
        self.stage, self.shape, self.dtype, self.device = stage, shape, dtype, ctx.device
        self.empty: Callable[..., Tensor] = torch.empty if ctx.checks is None else nans
        self.dry = 0
        self.workspace: int = stage.workspace.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        out = self.empty(self.shape, dtype=self.dtype, device=self.device)
        self.stage(x.to(self.device).resolve_conj().resolve_neg(), out=out, dry=self.dry)
        return out


def _make(site: Site, name: str, *args: Any) -> Collective:
    """The collective ``name``: a kernel where the lowering is one and has it, else torch ops."""
    if site.as_kernel and site.group.size > 1:
        from iris.lower.kernels import collectives as kernels  # brings in triton

        try:
            stage = getattr(kernels, name)(site.place.ctx, site.group, *args, site.what)
        except UnsupportedError:  # the same on all ranks: it depends on dtype and op alone
            pass
        else:
            stage.workspace.named(site.what, f"{site.node.op} %{site.node.out.name}")
            shape = site.node.out.type.local_shape(site.graph.mesh, site.place.coord)
            return KernelCollective(stage, shape, site.dtype, site.place.ctx)
    made: Collective = getattr(collectives, f"make_{name}")(site.group, *args, site.what)
    return made


def _all_gather(site: Site) -> Collective:
    dim = site.number("dim")
    return _make(site, "all_gather", site.shape, site.held(dim), dim, site.dtype)


def _reduce_scatter(site: Site) -> Collective:
    dim, op = site.number("dim"), str(site.node.kwargs.get("op", "sum"))
    sizes = site.shards(site.shape[dim])
    return _make(site, "reduce_scatter", site.shape, sizes, dim, op, site.dtype)


def _all_reduce(site: Site) -> Collective:
    op = str(site.node.kwargs.get("op", "sum"))
    return _make(site, "all_reduce", site.shape, op, site.dtype)


def _all_to_all(site: Site) -> Collective:
    split, concat = site.number("split_dim"), site.number("concat_dim")
    shapes = [site.shape for _ in range(site.group.size)]
    if split != concat:
        for shape, size in zip(shapes, site.held(concat), strict=True):
            shape[concat] = size
    splits = site.shards(site.shape[split])
    return _make(site, "all_to_all", shapes, split, splits, concat, site.dtype)


def _broadcast(site: Site) -> Collective:
    return _make(site, "broadcast", site.shape, site.number("src"), site.dtype)


def _ppermute(site: Site) -> Collective:
    perm: Any = site.node.kwargs["perm"]
    made = _make(site, "ppermute", site.shape, perm, site.dtype)
    if isinstance(made, KernelCollective) and site.group.index not in (d for _, d in perm):
        made.empty = torch.zeros  # nothing is sent to this rank
    return made


MAKERS: Mapping[str, Callable[[Site], Collective]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "ppermute": _ppermute,
}
"""How each collective is built."""
