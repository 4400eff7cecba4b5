"""Runs a graph in numpy on all ranks, in one process: what passes and lowerings must keep."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from iris.errors import GraphError
from iris.graph.nodes import Arg, Graph, Node, Ref
from iris.graph.ops import get_op, shard_sizes
from iris.graph.ops.base import PerRank
from iris.graph.ops.groups import coordinates
from iris.graph.ops.numerics import numpy_dtype
from iris.graph.types import Mesh, TensorType


class Result(NamedTuple):
    """Outputs in order, constants as they are; by input name, what in-place writes leave there."""

    outputs: list[Any]
    writes: dict[str, PerRank]


def run(graph: Graph, inputs: Sequence[Sequence[np.ndarray]]) -> Result:
    """``graph`` on all ranks. ``inputs[i][r]``: input i on rank r.

    bf16 and fp8 are computed in f32. GraphError if an op has no reference (random ops, ops that
    nobody described).
    """
    names = [value.name for value in graph.inputs]
    values = {name: list(arrays) for name, arrays in zip(names, inputs, strict=True)}
    evaluate(graph.nodes, values, graph.mesh)
    outputs = [_resolve(arg, values) for arg in graph.outputs]
    return Result(outputs, {target: values[name] for target, name in graph.writes})


def evaluate(nodes: Iterable[Node], values: MutableMapping[str, PerRank], mesh: Mesh) -> None:
    """Run ``nodes`` in order, adding every output to ``values``."""
    for node in nodes:
        args = [_resolve(arg, values) for arg in node.args]
        attrs = {key: _resolve(arg, values) for key, arg in node.attrs}
        with np.errstate(all="ignore"):
            results = get_op(node.op).reference(node, args, attrs, mesh)
        for value, arrays in zip(node.outputs, results, strict=True):
            values[value.name] = arrays


def run_body(node: Node, args: Sequence[Any], mesh: Mesh) -> list[PerRank]:
    """Outputs of a stage: its body run on its arguments."""
    values = {arg.name: x for arg, x in zip(node.args, args, strict=True) if isinstance(arg, Ref)}
    evaluate(node.body, values, mesh)
    return [values[value.name] for value in node.outputs]


def _resolve(arg: Arg, values: Mapping[str, PerRank]) -> Any:
    if isinstance(arg, Ref):
        if arg.name not in values:
            raise GraphError(f"%{arg.name} is used before it is defined")
        return values[arg.name]
    return tuple(_resolve(item, values) for item in arg) if isinstance(arg, tuple) else arg


def shard(array: np.ndarray, type: TensorType, mesh: Mesh) -> PerRank:
    """Every rank's shard of a global array of ``type``. A varying axis gets copies.

    >>> mesh = Mesh((("tp", 2),))
    >>> [s.tolist() for s in shard(np.arange(3), TensorType("i64", (3,), (("tp",),)), mesh)]
    [[0, 1], [2]]
    """
    shards = []
    for coord in coordinates(mesh):
        piece = array
        for dim, axes in enumerate(type.spec):
            for axis in axes:
                sizes = shard_sizes(piece.shape[dim], mesh, (axis,))
                start = sum(sizes[: coord[axis]])
                piece = piece.take(range(start, start + sizes[coord[axis]]), axis=dim)
        shards.append(piece)
    return shards


def random_inputs(graph: Graph, seed: int = 0) -> list[PerRank]:
    """Small integers for every input of ``graph``, in its types: the same every time.

    Where a type says varying or partial, ranks get numbers of their own.
    """
    rng, inputs = np.random.default_rng(seed), []
    for value in graph.inputs:
        type = value.type
        free = (*type.varying, *type.partial)
        drawn: dict[tuple[int, ...], PerRank] = {}
        shards = []
        for rank, coord in enumerate(coordinates(graph.mesh)):
            place = tuple(coord[axis] for axis in free)
            if place not in drawn:
                whole = rng.integers(-3, 4, type.shape).astype(numpy_dtype(type.dtype))
                drawn[place] = shard(whole, type, graph.mesh)
            shards.append(drawn[place][rank])
        inputs.append(shards)
    return inputs
