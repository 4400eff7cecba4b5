"""Whose memory the caller gets to see."""

from iris.graph.nodes import Graph, Node
from iris.graph.ops.views import VIEWS

RENAMES = frozenset({"alias", "detach"})
_VIEWS = VIEWS.keys() - {"cat", "stack", "roll", "flip", "repeat"} | RENAMES  # those copy


def base(op: str) -> str:
    """The op without its overload: ``transpose`` of ``transpose.int``."""
    return op.partition(".")[0]


def is_view(node: Node) -> bool:
    """Whether outputs of ``node`` lie in the first value that it reads."""
    return base(node.op) in _VIEWS


def exposed(graph: Graph) -> set[str]:
    """Values that are outputs of the program, or that outputs are views of."""
    names = set(graph.live_out)
    for node in reversed(graph.nodes):
        if is_view(node) and any(value.name in names for value in node.outputs):
            names.update(node.uses)
    return names
