"""Ops by name, and the one entry to their type rules."""

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from iris.errors import IrisError
from iris.graph.nodes import Node
from iris.graph.ops.all_gather import AllGather
from iris.graph.ops.all_reduce import AllReduce
from iris.graph.ops.all_to_all import AllToAll
from iris.graph.ops.attention import ATTENTION
from iris.graph.ops.axis_index import AxisIndex as AxisIndex
from iris.graph.ops.base import (
    Args,
    Attrs,
    Effect as Effect,
    InferContext as InferContext,
    Local as Local,
    Locals,
    Op as Op,
    Types,
    registry as registry,
)
from iris.graph.ops.broadcast import Broadcast
from iris.graph.ops.indexing import INDEXING
from iris.graph.ops.matmul import PRODUCTS
from iris.graph.ops.norms import NORMS
from iris.graph.ops.opaque import FACTORIES, RANDOM, Opaque
from iris.graph.ops.outputs import Output as Output, check_outputs as check_outputs
from iris.graph.ops.pointwise import POINTWISE
from iris.graph.ops.ppermute import Ppermute
from iris.graph.ops.reduce_scatter import ReduceScatter
from iris.graph.ops.reductions import REDUCTIONS
from iris.graph.ops.rules import group_size as group_size, shard_sizes as shard_sizes
from iris.graph.ops.stages import STAGES as STAGES
from iris.graph.ops.views import VIEWS
from iris.graph.types import Mesh

COLLECTIVES = frozenset(
    op.name for op in (AllGather, AllReduce, AllToAll, Broadcast, Ppermute, ReduceScatter)
)
"""Names of the ops that move values between ranks."""

FAMILIES: Mapping[str, Op] = {
    **PRODUCTS,
    **POINTWISE,
    **VIEWS,
    **REDUCTIONS,
    **INDEXING,
    **NORMS,
    **ATTENTION,
    **FACTORIES,
    **RANDOM,
    "view.dtype": Opaque("view.dtype"),
}
"""ATen ops whose rule is that of a family, by full name or without the overload."""


@cache
def get_op(name: str) -> Op:
    """The op called ``name``: an own op, one of an ATen family, or `Opaque`.

    >>> get_op("add.Tensor").name
    'add'
    """
    found = registry().get(name) or FAMILIES.get(name)
    return found or FAMILIES.get(name.partition(".")[0]) or Opaque(name)


def infer_node(op: str, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
    """Types of the outputs of ``op``.

    ``args`` and ``attrs`` hold a `TensorType` where the node reads a value. ``locals`` is what
    tracing saw of each output on the rank at ``ctx.coord``; collectives work it out themselves.
    TypeRuleError if the program uses a value against its type.
    """
    place, given = tuple(ctx.coord.items()), tuple(attrs.items())
    try:
        return _inferred(op, ctx.mesh, place, tuple(args), given, tuple(locals))
    except IrisError:
        return _infer(op, ctx, args, attrs, locals)  # again, to say where


@lru_cache(maxsize=4096)  # programs repeat their layers, and are verified after each pass
def _inferred(
    op: str,
    mesh: Mesh,
    place: tuple[tuple[str, int], ...],
    args: tuple[Any, ...],
    attrs: tuple[tuple[str, Any], ...],
    locals: tuple[Local, ...],
) -> Types:
    return _infer(op, InferContext(mesh, dict(place)), args, dict(attrs), locals)


def _infer(op: str, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
    rule = get_op(op)
    try:
        return rule.infer(ctx, args, attrs, locals)
    except IrisError:
        raise
    except (IndexError, KeyError, TypeError, ValueError):
        # An overload with a signature that its family's rule does not know: nothing is claimed.
        if op in registry():
            raise
        return Opaque(op).infer(ctx, args, attrs, locals)


def effects(node: Node) -> frozenset[Effect]:
    """What ``node`` does besides computing; of a stage, what its body does."""
    own = get_op(node.op).effects_of(node)
    return own.union(*map(effects, node.body)) if node.body else own
