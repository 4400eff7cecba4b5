"""Whose memory the caller gets to see."""

from iris.graph.nodes import Graph, Node
from iris.graph.ops.views import VIEWS

RENAMES = frozenset({"alias", "detach"})
COPIES = frozenset({"cat", "stack", "roll", "flip", "repeat"})  # of the ops that rearrange


def base(op: str) -> str:
    """The op without its overload: ``transpose`` of ``transpose.int``."""
    return op.partition(".")[0]


def may_alias(node: Node) -> bool:
    """Whether outputs of ``node`` can share memory with what it reads."""
    return base(node.op) in VIEWS or node.op in RENAMES


def is_view(node: Node) -> bool:
    """Whether outputs of ``node`` lie in the first value that it reads."""
    return may_alias(node) and base(node.op) not in COPIES


def exposed(graph: Graph) -> set[str]:
    """Values that are outputs of the program, or that outputs are views of."""
    names = set(graph.live_out)
    for node in reversed(graph.nodes):
        if may_alias(node) and any(value.name in names for value in node.outputs):
            names.update(node.uses)
    return names
