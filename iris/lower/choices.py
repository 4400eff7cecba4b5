"""How each stage of a program is computed, and why."""

from collections.abc import Mapping
from dataclasses import dataclass

from iris.graph.nodes import Graph
from iris.graph.ops import COLLECTIVES


@dataclass(frozen=True)
class Choice:
    """How a stage is computed, why, and what each candidate was predicted to take (microseconds)."""

    algorithm: str
    why: str
    candidates: tuple[tuple[str, float], ...] = ()


def choose(graph: Graph) -> Mapping[str, Choice]:
    """A choice for every stage and every collective outside one, by the name of its first output."""
    choices = {}
    for node in graph.nodes:
        if node.body:
            choices[node.outputs[0].name] = Choice(
                "torch", "torch ops, one after the other, over the shared heap"
            )
        elif node.op in COLLECTIVES:
            choices[node.outputs[0].name] = Choice("torch", "over the shared heap")
    return choices
