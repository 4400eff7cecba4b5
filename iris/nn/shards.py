"""This rank's place along a mesh axis, and the slices of weights that it holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from iris.errors import SpecError
from iris.graph.types import chunk_sizes
from iris.spmd.mesh import ProgramMesh


class Source(Protocol):
    """A weight to slice: a tensor, or a part of a file that is read when it is sliced."""

    @property
    def shape(self) -> Any: ...
    def __getitem__(self, index: Any) -> Tensor: ...


class LinearSource(Protocol):
    """A weight ``[out, in]`` and a bias ``[out]`` or None: `nn.Linear`, or a `StoredLinear`."""

    @property
    def weight(self) -> Source: ...
    @property
    def bias(self) -> Source | None: ...


def linear_source(linear: LinearSource) -> LinearSource:
    """``linear`` itself. SpecError where it is no linear layer: another layout of its weight would
    be cut wrongly.
    """
    other = isinstance(linear, nn.Module) and not isinstance(linear, nn.Linear)
    if other or len(linear.weight.shape) != 2:
        raise SpecError(
            f"a {type(linear).__name__} is no linear layer with a weight [out, in]",
            help="pass an nn.Linear, or the tensors as iris.nn.shards.StoredLinear(weight, bias)",
        )
    return linear


@dataclass(frozen=True)
class Place:
    """Where this rank is along a mesh axis."""

    axis: str
    index: int
    size: int

    @classmethod
    def of(cls, axis: str, mesh: DeviceMesh | None) -> "Place":
        """The place along ``axis`` of ``mesh``; without a mesh all ranks are that axis. SpecError
        for an unknown axis.
        """
        where = ProgramMesh.world(axis) if mesh is None else ProgramMesh.of(mesh)
        if axis not in where.shape.names:
            raise SpecError(
                f"unknown mesh axis {axis!r}; the mesh has {where.shape}",
                help="pass axis= with the name of an axis of the mesh",
            )
        return cls(axis, dict(where.coord)[axis], where.shape.size(axis))

    def span(self, n: int) -> tuple[int, int]:
        """First and last-but-one of the rows, of ``n``, that this rank holds; the rule is that of
        torch.chunk.
        """
        sizes = chunk_sizes(n, self.size)
        start = sum(sizes[: self.index])
        return start, start + sizes[self.index]

    def take(self, source: Source, dim: int, grain: int = 1) -> Tensor:
        """This rank's own copy of its part of ``source`` along ``dim``, in whole groups of
        ``grain`` rows.
        """
        start, stop = self.span(source.shape[dim] // grain)
        index = (slice(None),) * dim + (slice(start * grain, stop * grain),)
        return source[index].detach().clone(memory_format=torch.contiguous_format)


def parameter(data: Tensor) -> nn.Parameter:
    """``data`` as a parameter that wants no gradient (these layers are for inference), or itself
    if it is one.
    """
    return data if isinstance(data, nn.Parameter) else nn.Parameter(data, requires_grad=False)


class StoredTensor:
    """A tensor of a safetensors file; a slice reads only the bytes of that slice from the mapped
    file.
    """

    def __init__(self, part: Any) -> None:
        """``part``: what ``get_slice`` of an opened file gives; it keeps the file mapped."""
        self._slice = part

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._slice.get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        found: Tensor = self._slice[index]
        return found


@dataclass(frozen=True)
class StoredLinear:
    """The tensors of a linear layer in a file."""

    weight: Source
    bias: Source | None = None


class Checkpoint:
    """Weights by name, each read when it is sliced.

    >>> linear = Checkpoint.open("model/").linear("layers.0.up_proj")       # doctest: +SKIP
    >>> layer = iris.nn.ColumnParallelLinear.from_linear(linear)            # doctest: +SKIP
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """The tensors of a safetensors file, or of all such files in a folder. SpecError where
        there is none, or where two hold a tensor of one name.
        """
        from safetensors import SafetensorError, safe_open

        place = Path(path)
        files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
        if not all(file.is_file() for file in files) or not files:
            raise SpecError(f"no safetensors file at {place}", help="give a file, or its folder")
        sources: dict[str, Source] = {}
        for file in files:
            try:
                with safe_open(file, "pt") as opened:
                    parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            except SafetensorError as error:
                raise SpecError(f"{file} is no safetensors file: {error}") from error
            if twice := parts.keys() & sources.keys():
                raise SpecError(
                    f"{min(twice)} is in {file.name} and in another file of {place}",
                    help="give one file, or a folder of the files of one model",
                )
            sources.update((name, StoredTensor(part)) for name, part in parts.items())
        return cls(sources)

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def __getitem__(self, name: str) -> Source:
        """SpecError for a name that is not there."""
        if name not in self._sources:
            raise SpecError(
                f"the checkpoint has no tensor {name!r}",
                help=f"it has {', '.join(sorted(self._sources)[:3])}, ...",
            )
        return self._sources[name]

    def linear(self, prefix: str) -> StoredLinear:
        """The weight and, if there is one, the bias of a linear layer."""
        bias = f"{prefix}.bias"
        return StoredLinear(self[f"{prefix}.weight"], self._sources.get(bias))
