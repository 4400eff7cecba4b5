"""Does once what a program does twice."""

from dataclasses import replace

from iris.graph.congruence import congruence
from iris.graph.nodes import Graph, Node, Ref, rename
from iris.graph.passes.memory import exposed


def dedupe(graph: Graph) -> Graph:
    """``a = f(x); b = f(x) => a = f(x)`` with ``b`` read as ``a``, for ``f`` pure or all_gather.

    Other effects stay as they are. The graph is the same on all ranks, so a gather goes on all of
    them or on none. Two outputs of the program never become one tensor: a pure node is then run
    twice, a gathered value cloned.
    """
    names = congruence(graph)
    if not names:
        return graph
    seen = exposed(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        repeated = bool(node.outputs) and node.outputs[0].name in names
        if not repeated:
            nodes.append(rename(node, names))
        elif any(value.name in seen for value in node.outputs):
            nodes.append(_again(rename(node, names), names))
    return graph.with_nodes(tuple(nodes))


def _again(node: Node, names: dict[str, str]) -> Node:
    """A repeated node that the caller sees: a gather becomes a copy of the first one."""
    if node.op != "all_gather":
        return node
    return replace(node, op="clone", args=(Ref(names[node.out.name]),), attrs=())
