"""The mesh of a program: named axes over ranks, this rank's place, and the group along any axes."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from iris.errors import SpecError
from iris.graph.ops import group_size
from iris.graph.types import Mesh
from iris.runtime.context import current
from iris.runtime.groups import Group


@dataclass(frozen=True)
class AbstractMesh:
    """A mesh with no ranks behind it: programs over it can be traced and shown, not run.

    >>> AbstractMesh((4,), ("tp",)).names
    ('tp',)
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.names):
            raise SpecError(
                f"a mesh of shape {self.shape} needs {len(self.shape)} names, got {self.names}"
            )


def mesh(shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """A ``DeviceMesh`` over all ranks of the current context, row-major.

    Args:
        shape: ranks along each axis; their product is the world size.
        names: one name an axis.

    Raises SpecError when the product is not the world size, or names are missing or repeated.

    >>> mesh = iris.mesh((2, 4), ("dp", "tp"))          # doctest: +SKIP
    """
    ctx = current()
    if len(shape) != len(names) or len(set(names)) != len(names):
        raise SpecError(
            f"mesh {tuple(shape)} needs {len(shape)} different names, got {tuple(names)}"
        )
    if math.prod(shape) != ctx.num_ranks:
        raise SpecError(
            f"mesh {tuple(shape)} has {math.prod(shape)} places, "
            f"the world has {ctx.num_ranks} ranks",
            help="the product of the shape must be the number of ranks",
        )
    return init_device_mesh(ctx.device.type, tuple(shape), mesh_dim_names=tuple(names))


@dataclass(frozen=True)
class ProgramMesh:
    """Axes, the global ranks at each place (row-major), and this rank's coordinate."""

    shape: Mesh
    ranks: tuple[int, ...]
    coord: tuple[tuple[str, int], ...]
    abstract: bool = False

    @classmethod
    def of(cls, mesh: "DeviceMesh | AbstractMesh | Group | ProgramMesh") -> "ProgramMesh":
        """The program mesh of a DeviceMesh, of an AbstractMesh seen from its first place, or of a
        group of ranks (its one axis is called ``ranks``).
        """
        if isinstance(mesh, ProgramMesh):
            return mesh
        if isinstance(mesh, Group):
            shape = Mesh((("ranks", mesh.size),))
            return cls(shape, mesh.ranks, (("ranks", mesh.index),))
        if isinstance(mesh, AbstractMesh):
            shape = Mesh(tuple(zip(mesh.names, mesh.shape, strict=True)))
            ranks = tuple(range(math.prod(mesh.shape)))
            return cls(shape, ranks, tuple(shape.origin.items()), abstract=True)
        names = mesh.mesh_dim_names
        place = mesh.get_coordinate()
        if names is None or place is None:
            why = "has no axis names" if names is None else "does not hold this rank"
            raise SpecError(f"the mesh {why}: {mesh}", help="use iris.mesh(shape, names)")
        sizes, ranks = cls.places(mesh)
        shape = Mesh(tuple(zip(names, sizes, strict=True)))
        return cls(shape, ranks, tuple(zip(names, place, strict=True)))

    @staticmethod
    def places(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of the axes of a DeviceMesh, named or not, and its ranks."""
        return tuple(map(int, mesh.mesh.shape)), tuple(mesh.mesh.flatten().tolist())

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(n for _, n in self.shape.axes)

    @classmethod
    def world(cls, axis: str) -> "ProgramMesh":
        """All ranks of the current context as one axis."""
        ctx = current()
        shape = Mesh(((axis, ctx.num_ranks),))
        return cls(shape, tuple(range(ctx.num_ranks)), ((axis, ctx.cur_rank),))

    def members(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Global ranks along ``axes`` (outermost first) through this rank's place."""
        table = torch.tensor(self.ranks).reshape(self.sizes)
        place = dict(self.coord)
        found = []
        for index in itertools.product(*(range(self.shape.size(a)) for a in axes)):
            place.update(zip(axes, index, strict=True))
            found.append(int(table[tuple(place[name] for name in self.shape.names)]))
        return tuple(found)

    def size(self, axes: tuple[str, ...]) -> int:
        """Ranks along ``axes`` together."""
        return group_size(self.shape, axes)

    def axes_over(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """The axes along which these global ranks lie. SpecError if there are none."""
        names = self.shape.names
        for axes in (*((name,) for name in names), *itertools.permutations(names)):
            if self.members(axes) == ranks:
                return axes
        raise SpecError(
            f"ranks {ranks} are no axis of the mesh {self.shape}",
            help="inside a program name a mesh axis, "
            "or give @iris.spmd a mesh that has these ranks",
        )
