"""How each stage of a program is computed, and why."""

from collections.abc import Mapping
from dataclasses import dataclass

from iris.graph.nodes import Graph, Node
from iris.graph.ops import COLLECTIVES
from iris.graph.types import TensorType
from iris.lower.stages import Match, match


@dataclass(frozen=True)
class Choice:
    """How a stage is computed, why, and what each candidate was predicted to take (microseconds).

    ``match`` is how the stage is cut for its kernel; None where it runs as torch ops.
    """

    algorithm: str
    why: str
    candidates: tuple[tuple[str, float], ...] = ()
    match: Match | None = None


def choose(graph: Graph, lowering: str) -> Mapping[str, Choice]:
    """A choice for every stage and every collective outside one, by the name of its first output.

    ``lowering`` is "torch" or "triton". Depends on the graph alone, so all ranks choose alike.
    """
    types = graph.types
    return {
        node.outputs[0].name: _choose(node, types, lowering)
        for node in graph.nodes
        if node.body or node.op in COLLECTIVES
    }


def _collective(lowering: str) -> Choice:
    if lowering == "triton":
        return Choice("kernel", "one launch over the shared heap")
    return Choice("torch", "torch ops over the shared heap")


def _choose(node: Node, types: Mapping[str, TensorType], lowering: str) -> Choice:
    if not node.body:
        return _collective(lowering)
    if lowering == "torch":
        return Choice("torch", "lowering is torch: ops one after the other, over the shared heap")
    found = match(node, types)
    if isinstance(found, str):
        return Choice("unfused", f"no kernel: {found}")
    return Choice("fused", "one kernel computes and communicates", match=found)
