"""Copies between strided tensors, as the few rectangles of bytes that a copy engine takes."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from iris.errors import ConfigError

_MOST = 4096  # rectangles of one copy


@dataclass(frozen=True)
class Rectangle:
    """``height`` rows of ``width`` bytes, which start every so many bytes (a pitch)."""

    dst: int
    src: int
    width: int
    height: int = 1
    dst_pitch: int = 0
    src_pitch: int = 0

    @property
    def dst_end(self) -> int:
        """One past the last byte that is written."""
        return self.dst + max(0, self.height - 1) * self.dst_pitch + self.width


def rectangles(
    dst: int,
    dst_strides: Sequence[int],
    src: int,
    src_strides: Sequence[int],
    shape: Sequence[int],
    item: int,
) -> list[Rectangle]:
    """Split the copy of a tensor. Addresses and strides are in bytes; ``item`` is an element's.

    Raises ``ConfigError`` where the layouts have so little in common that it takes thousands.

    Example::

        rectangles(0, (8, 4), 64, (16, 4), (2, 2), 4)  # [Rectangle(0, 64, 8, 2, 8, 16)]
    """
    if 0 in shape:
        return []
    dims = [(d, s, n) for d, s, n in zip(dst_strides, src_strides, shape, strict=True) if n > 1]
    dims = _merged(sorted(dims, reverse=True))
    width = item
    if dims and dims[-1][:2] == (item, item):
        width *= dims.pop()[2]
    dst_pitch, src_pitch, height = 0, 0, 1
    apart = [dim for dim in dims if min(dim[:2]) >= width]
    if apart:
        dst_pitch, src_pitch, height = longest = max(apart, key=lambda dim: dim[2])
        dims.remove(longest)
    if math.prod(n for _, _, n in dims) > _MOST:
        raise ConfigError(
            f"a copy of shape {tuple(shape)} falls into more than {_MOST} pieces",
            help="copy between tensors of one layout: call contiguous() first",
        )
    return [
        Rectangle(dst + d, src + s, width, height, dst_pitch, src_pitch) for d, s in _steps(dims)
    ]


def _merged(dims: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join dims that run on into the next one, on both sides."""
    merged: list[tuple[int, int, int]] = []
    for d, s, n in dims:
        if merged and merged[-1][0] == d * n and merged[-1][1] == s * n:
            n *= merged.pop()[2]
        merged.append((d, s, n))
    return merged


def _steps(dims: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Every place of the outer dims, as bytes from the start on both sides."""
    for places in itertools.product(*(range(n) for _, _, n in dims)):
        yield (
            sum(i * d for i, (d, _, _) in zip(places, dims, strict=True)),
            sum(i * s for i, (_, s, _) in zip(places, dims, strict=True)),
        )
