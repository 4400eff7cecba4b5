"""Every pass of a program, in order: those of the graph, then `Choose`, which needs a machine."""

from collections.abc import Mapping
from dataclasses import replace

from iris.graph.nodes import Graph, Node
from iris.graph.passes import PASSES, Pass
from iris.lower.choices import Choice, StageConfig, choose
from iris.lower.cost import Profile
from iris.lower.tuned import Times


class Choose:
    """``all_gather_matmul(x, w) => all_gather_matmul(x, w, algorithm=fused)``, for every stage.

    ``choices`` then says why, also of the collectives outside stages, by the name of a first
    output. Arguments: see :func:`iris.lower.choices.choose`.
    """

    __name__ = "choose"

    def __init__(
        self,
        lowering: str,
        profile: Profile | None,
        measured: Times,
        config: StageConfig | None = None,
        engine: bool = False,
    ) -> None:
        self._how = lowering, profile, measured, config, engine
        self.choices: Mapping[str, Choice] = {}

    def __call__(self, graph: Graph) -> Graph:
        self.choices = choose(graph, *self._how)
        return graph.with_nodes(tuple(map(self._noted, graph.nodes)))

    def _noted(self, node: Node) -> Node:
        if not node.body:
            return node
        algorithm = self.choices[node.outputs[0].name].algorithm
        return replace(node, attrs=(("algorithm", algorithm),))


def passes_of(choose: Choose) -> tuple[Pass, ...]:
    """The whole list, as it runs and as ``IRIS_DUMP`` numbers it."""
    return (*PASSES, choose)
