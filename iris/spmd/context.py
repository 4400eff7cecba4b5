"""What is traced right now: the program's name and mesh, and sizes along its axes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from iris.errors import SpecError
from iris.graph.ops.rules import axes_of, shard_sizes
from iris.graph.types import TensorType
from iris.spmd.mesh import ProgramMesh

Axis = str | tuple[str, ...]


@dataclass
class TraceContext:
    """One trace. ``mesh`` is None until specs or a collective name the world's axis."""

    name: str
    mesh: ProgramMesh | None
    uneven: bool = False
    calls: list[Any] = field(default_factory=list)  # traces of nested functions
    # Of nested functions: the place among those, or None where a trace does not serve.
    signatures: dict[object, int | None] = field(default_factory=dict)
    recorder: Any = None  # of what runs
    # Of a traced tensor, where shards are uneven.
    type_of: Callable[[Tensor], TensorType] | None = None

    def bind(self, axis: Axis) -> tuple[ProgramMesh, tuple[str, ...]]:
        """The mesh and the axes that ``axis`` names in it. SpecError for an unknown axis."""
        names = axes_of(axis)
        if self.mesh is None and len(names) == 1:
            self.mesh = ProgramMesh.world(names[0])
        known = self.mesh.shape.names if self.mesh else ()
        unknown = [name for name in names if name not in known]
        if self.mesh is None or unknown or not names:
            raise SpecError(
                f"{self.name}: unknown mesh axis {(unknown or names or [''])[0]!r}; "
                f"the mesh has {self.mesh.shape if self.mesh else 'no axes'}",
                help="name an axis of the mesh, or pass mesh= to @iris.spmd",
            )
        return self.mesh, names

    def know(self, axes: tuple[str, ...], size: int) -> None:
        """Notice that some dim of ``size`` rows is split over ``axes``, perhaps unevenly."""
        if self.mesh is not None:
            self.uneven |= len(set(self.scattered_sizes(axes, size))) > 1

    def gathered_size(self, axes: tuple[str, ...], x: Tensor, dim: int, size: int | None) -> int:
        """Rows of dim ``dim`` of ``x`` once it is gathered over ``axes``."""
        assert self.mesh is not None
        if size is not None:
            return size
        if self.uneven and self.type_of is not None:
            type_ = self.type_of(x)
            kept = len(type_.spec[dim]) - len(axes)
            if type_.spec[dim][max(kept, 0) :] == axes:
                joined = type_.with_dim(dim, type_.shape[dim], type_.spec[dim][:kept])
                return joined.local_shape(self.mesh.shape, dict(self.mesh.coord))[dim]
        return x.shape[dim] * self.mesh.size(axes)

    def scattered_sizes(self, axes: tuple[str, ...], size: int) -> tuple[int, ...]:
        """Rows that each member of ``axes`` keeps of ``size``."""
        assert self.mesh is not None
        return shard_sizes(size, self.mesh.shape, axes)

    def kept(self, axes: tuple[str, ...], size: int) -> int:
        """Rows of this rank's shard, where ``size`` rows are split over ``axes``."""
        self.know(axes, size)
        return self.scattered_sizes(axes, size)[self.member(axes)]

    def member(self, axes: tuple[str, ...]) -> int:
        """This rank's place among the members of ``axes``."""
        assert self.mesh is not None
        place, index = dict(self.mesh.coord), 0
        for axis in axes:
            index = index * self.mesh.shape.size(axis) + place[axis]
        return index


_TRACING: ContextVar[TraceContext | None] = ContextVar("iris_tracing", default=None)


tracing = _TRACING.get  # a function: the trace in progress in this thread, or None


@contextmanager
def trace_scope(context: TraceContext) -> Iterator[TraceContext]:
    token = _TRACING.set(context)
    try:
        yield context
    finally:
        _TRACING.reset(token)
