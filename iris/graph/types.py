"""Types of values: dtype, global shape, and where the value lives on the mesh.

``bf16[4096/tp, 8192]``   dim 0 is split over mesh axis ``tp`` (torch.chunk rule when it does not
divide) ``f32[512, 8192]+tp``     partial: a sum over ``tp`` is still due
``f32[512, 8192]~tp``     varying: nothing is known over ``tp``; sizes are this rank's
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

DTYPES = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8e4m3fn": 1, "f8e5m2": 1, "f8e4m3fnuz": 1,
    "f8e5m2fnuz": 1, "f8e8m0fnu": 1, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u64": 8, "u32": 4,
    "u16": 2, "u8": 1, "bool": 1, "c64": 8, "c128": 16, "c32": 4,
}  # fmt: skip
"""Names of element types, with their size in bytes."""


def chunk_sizes(n: int, parts: int) -> tuple[int, ...]:
    """Sizes of ``n`` rows split over ``parts`` ranks, as torch.chunk and DTensor split them.

    >>> chunk_sizes(5, 4)
    (2, 2, 1, 0)
    """
    chunk = -(-n // parts)
    return tuple(max(0, min(chunk, n - i * chunk)) for i in range(parts))


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes and their sizes, outermost first: ``Mesh((("dp", 2), ("tp", 4)))``."""

    axes: tuple[tuple[str, int], ...]

    def size(self, axis: str) -> int:
        """Ranks along ``axis``. KeyError if the mesh has no such axis."""
        return dict(self.axes)[axis]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def origin(self) -> dict[str, int]:
        """The coordinate of the first rank."""
        return dict.fromkeys(self.names, 0)

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)


@dataclass(frozen=True, slots=True)
class TensorType:
    """dtype, global shape and distribution; ``spec[d]`` names the axes that split dim d."""

    dtype: str
    shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...] = ()
    partial: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.spec:
            object.__setattr__(self, "spec", ((),) * len(self.shape))
        if len(self.partial) > 1:
            object.__setattr__(self, "partial", tuple(sorted(set(self.partial))))
        if len(self.varying) > 1:
            object.__setattr__(self, "varying", tuple(sorted(set(self.varying))))

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Every axis that splits some dim, in order of dims."""
        return tuple(axis for axes in self.spec for axis in axes)

    @property
    def is_replicated(self) -> bool:
        """The same value on every rank, and known to be."""
        return not (self.split_axes or self.partial or self.varying)

    def replicated_over(self, axis: str) -> bool:
        """Known to be the same on all ranks of ``axis``."""
        return not (axis in self.split_axes or axis in self.partial or axis in self.varying)

    def local_shape(self, mesh: Mesh, coord: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the shard at ``coord`` (axis -> index)."""
        if not any(self.spec):
            return self.shape
        sizes = []
        for n, axes in zip(self.shape, self.spec, strict=True):
            for axis in axes:
                chunk = -(-n // mesh.size(axis))
                n = max(0, min(chunk, n - coord[axis] * chunk))
            sizes.append(n)
        return tuple(sizes)

    def is_even(self, mesh: Mesh) -> bool:
        """Every split divides, so all shards have one shape."""
        for n, axes in zip(self.shape, self.spec, strict=True):
            for axis in axes:
                if n % mesh.size(axis):
                    return False
                n //= mesh.size(axis)
        return True

    def with_dim(self, dim: int, size: int, axes: Iterable[str]) -> "TensorType":
        """This type with dim ``dim`` of ``size`` rows, split over ``axes``."""
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        spec = (*self.spec[:dim], tuple(axes), *self.spec[dim + 1 :])
        return replace(self, shape=shape, spec=spec)

    def __str__(self) -> str:
        dims = ", ".join(
            "/".join((str(n), *axes)) for n, axes in zip(self.shape, self.spec, strict=True)
        )
        marks = "".join(f"+{a}" for a in self.partial) + "".join(f"~{a}" for a in self.varying)
        return f"{self.dtype}[{dims}]{marks}"
