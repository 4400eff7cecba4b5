"""Which values of a graph are equal by construction."""

from iris.graph.nodes import Graph, Node, Ref, map_refs
from iris.graph.ops import effects
from iris.graph.printing import format_arg


def congruence(graph: Graph) -> dict[str, str]:
    """For each value that repeats an earlier one, the name of the first: same op, same arguments, no effects.

    Gathers count too: gathering one value twice gives the same twice. Bodies of stages are not
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
    """What two nodes must share to be equal. As text, for 1, 1.0, True and 0.0, -0.0 are equal in Python."""
    args = [*node.args, *(arg for _, arg in node.attrs)]
    if first:
        args = [map_refs(arg, lambda name: Ref(first.get(name, name))) for arg in args]
    names = tuple(key for key, _ in node.attrs)
    types = tuple(value.type for value in node.outputs)
    return (node.op, names, tuple(map(format_arg, args)), types)
