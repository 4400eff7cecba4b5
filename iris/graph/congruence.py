"""Which values of a graph are equal by construction."""

from iris.graph.nodes import Graph, Node, Ref, map_refs
from iris.graph.ops import effects
from iris.graph.printing import format_arg


def congruence(graph: Graph) -> dict[str, str]:
    """For each value that repeats an earlier one (same op, same arguments), the name of the first.

    Nodes with effects repeat nothing, but for gathers: one value gathered twice gives the same
    twice. Bodies of stages are not
    looked into.
    """
    first: dict[str, str] = {}
    seen: dict[tuple[object, ...], Node] = {}
    for node in graph.nodes:
        if node.body or (node.op != "all_gather" and effects(node)):
            continue
        earlier = seen.setdefault(_key(node, first), node)
        if earlier is not node:
            for value, same in zip(node.outputs, earlier.outputs, strict=True):
                first[value.name] = same.name
    return first


def _key(node: Node, first: dict[str, str]) -> tuple[object, ...]:
    """What equal nodes share. As text: to Python 1, 1.0 and True are equal, and 0.0 and -0.0."""
    args = [*node.args, *(arg for _, arg in node.attrs)]
    if first:
        args = [map_refs(arg, lambda name: Ref(first.get(name, name))) for arg in args]
    names = tuple(key for key, _ in node.attrs)
    types = tuple(value.type for value in node.outputs)
    return (node.op, names, tuple(map(format_arg, args)), types)
