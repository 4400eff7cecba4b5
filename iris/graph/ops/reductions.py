"""Reductions, softmax, scans and sorts of ATen: ops that mix the elements along some dims."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from iris.graph.nodes import Node
from iris.graph.ops.base import Args, Attrs, InferContext, Locals, Op, PerRank, Types
from iris.graph.ops.numerics import numpy_dtype
from iris.graph.ops.rules import Linear, Link, at, propagate, shape_dim, tensors
from iris.graph.types import Mesh

FIRST: Linear = ((0,),)


@dataclass(frozen=True)
class Mixing:
    """How an op treats the dims it mixes.

    ``function(array, dims, keep, args, attrs)`` gives one rank's output, or a tuple of them.
    """

    function: Callable[..., Any]
    dims_at: int = 1  # position of the ``dim`` argument
    default: Any = None  # its value where the call has none; None: all dims
    linear: Linear = ()
    sums: bool = False  # shards add up: a split dim gives a partial value


class Reduction(Op):
    """An op along dims: sum over dim 0 ``f32[8/tp, 4] -> f32[4]+tp``, its amax ``-> f32[4]~tp``.

    Other dims keep their split. Along a split dim each rank works on its own shard.
    """

    def __init__(self, name: str, mixing: Mixing) -> None:
        super().__init__(name)
        self.mixing = mixing

    def mixed_dims(
        self, args: Sequence[Any], attrs: Mapping[str, Any], ndim: int
    ) -> tuple[int, ...]:
        """The dims that the call works along."""
        how = self.mixing
        given = attrs.get("dim", at(args, how.dims_at, how.default))
        if given is None or given == ():
            return tuple(range(ndim))
        listed = given if isinstance(given, tuple | list) else (given,)
        return tuple(shape_dim(d, ndim) for d in listed)

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        operands = list(tensors(args))
        ndim = len(operands[0].shape)
        mixed = self.mixed_dims(args, attrs, ndim)
        types = []
        for local in locals:
            kept = len(local.shape) == ndim
            free = iter(range(len(local.shape)))
            links: list[Link] = []
            for d in range(ndim):
                target = next(free) if kept or d not in mixed else None
                summed = f"dim {d}" if self.mixing.sums else None
                links.append(summed if d in mixed else target)
            all_links = [links] * len(operands)
            types.append(propagate(self.name, ctx, operands, all_links, local, self.mixing.linear))
        return tuple(types)

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        outs: list[PerRank] = [[] for _ in node.outputs]
        for array in args[0]:
            dims = self.mixed_dims(args, attrs, array.ndim)
            keep = len(node.outputs[0].type.shape) == array.ndim
            result = self.mixing.function(array, dims, keep, args, attrs)
            pieces = result if isinstance(result, tuple) else (result,)
            for out, value, piece in zip(outs, node.outputs, pieces, strict=True):
                out.append(np.asarray(piece).astype(numpy_dtype(value.type.dtype)))
        return outs


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A numpy reduction as a mixing function."""
    return lambda x, dims, keep, args, attrs: function(x, axis=dims, keepdims=keep)


def mean(x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
    """NaN of no elements, without a warning."""
    return np.sum(x, axis=axis, keepdims=keepdims) / np.prod([x.shape[d] for d in axis])


def softmax(x: Any, dims: tuple[int, ...], keep: bool, args: Any, attrs: Any) -> Any:
    e = np.exp(x - x.max(dims, keepdims=True, initial=-np.inf))
    return e / e.sum(dims, keepdims=True)


def variance(x: Any, dims: tuple[int, ...], keep: bool, args: Any, attrs: Any) -> Any:
    return np.var(x, axis=dims, keepdims=keep, ddof=attrs.get("correction", 1))


def vector_norm(x: Any, dims: tuple[int, ...], keep: bool, args: Any, attrs: Any) -> Any:
    order = at(args, 1, 2)
    return (np.abs(x) ** order).sum(axis=dims, keepdims=keep) ** (1 / order)


def extreme(best: Callable[..., Any], place: Callable[..., Any]) -> Callable[..., Any]:
    """``max.dim`` and ``min.dim``: the value and its index."""
    return lambda x, dims, keep, args, attrs: (
        best(x, axis=dims[0], keepdims=keep),
        place(x, axis=dims[0], keepdims=keep),
    )


def index_of(place: Callable[..., Any]) -> Callable[..., Any]:
    """argmax and argmin: over all elements where no dim is given."""
    return lambda x, dims, keep, args, attrs: place(
        x, axis=dims[0] if at(args, 1) is not None else None, keepdims=keep
    )


def topk(x: Any, dims: tuple[int, ...], keep: bool, args: Any, attrs: Any) -> Any:
    sign = -1 if at(args, 3, True) else 1
    order = np.argsort(sign * x, axis=dims[0], kind="stable").take(range(args[1]), dims[0])
    return np.take_along_axis(x, order, dims[0]), order


def sort(x: Any, dims: tuple[int, ...], keep: bool, args: Any, attrs: Any) -> Any:
    down = attrs.get("descending", at(args, 2, False))
    order = np.argsort(-x if down else x, axis=dims[0], kind="stable")
    return np.take_along_axis(x, order, dims[0]), order


def logsumexp(x: Any, dims: tuple[int, ...], keep: bool, args: Any, attrs: Any) -> Any:
    return np.log(np.exp(x).sum(axis=dims, keepdims=keep))


# fmt: off
MIXING: dict[str, Mixing] = {
    "sum": Mixing(plain(np.sum), linear=FIRST, sums=True),
    "nansum": Mixing(plain(np.nansum)),
    "mean": Mixing(plain(mean), linear=FIRST),
    "prod": Mixing(plain(np.prod)),
    "amax": Mixing(plain(np.max)), "amin": Mixing(plain(np.min)),
    "max": Mixing(plain(np.max)), "min": Mixing(plain(np.min)),
    "max.dim": Mixing(extreme(np.max, np.argmax)), "min.dim": Mixing(extreme(np.min, np.argmin)),
    "argmax": Mixing(index_of(np.argmax)), "argmin": Mixing(index_of(np.argmin)),
    "any": Mixing(plain(np.any)), "all": Mixing(plain(np.all)),
    "count_nonzero": Mixing(plain(np.count_nonzero)),
    "var": Mixing(variance), "std": Mixing(lambda *call: np.sqrt(variance(*call))),
    "var_mean": Mixing(lambda x, dims, keep, args, attrs: (
        variance(x, dims, keep, args, attrs), np.mean(x, axis=dims, keepdims=keep))),
    "logsumexp": Mixing(logsumexp),
    "linalg_vector_norm": Mixing(vector_norm, dims_at=2), "norm": Mixing(vector_norm, dims_at=2),
    "cumsum": Mixing(lambda x, dims, *_: np.cumsum(x, dims[0]), linear=FIRST),
    "cumprod": Mixing(lambda x, dims, *_: np.cumprod(x, dims[0])),
    "softmax": Mixing(softmax), "_softmax": Mixing(softmax), "_safe_softmax": Mixing(softmax),
    "_log_softmax": Mixing(lambda *call: np.log(softmax(*call))),
    "sort": Mixing(sort, default=-1), "topk": Mixing(topk, dims_at=2, default=-1),
}
# fmt: on
REDUCTIONS: dict[str, Op] = {name: Reduction(name, mixing) for name, mixing in MIXING.items()}
"""Every mixing op by ATen name; an overload with an entry (``max.dim``) is not its base op."""
