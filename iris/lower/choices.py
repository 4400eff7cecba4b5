"""How each stage of a program is computed, and why."""

from collections.abc import Mapping
from dataclasses import dataclass

from iris.graph.nodes import Graph, Node
from iris.graph.ops import COLLECTIVES
from iris.graph.types import Mesh, TensorType
from iris.lower.cost import Profile, predict
from iris.lower.stages import Match, match

MARGIN = (
    0.9  # unfused must be predicted this much faster: the model is coarse, and fused is the rule
)


@dataclass(frozen=True)
class Choice:
    """How a stage is computed, why, and what each candidate was predicted to take (microseconds).

    ``match`` is how the stage is cut for its kernel; None where it runs as torch ops.
    """

    algorithm: str
    why: str
    candidates: tuple[tuple[str, float], ...] = ()
    match: Match | None = None


def choose(graph: Graph, lowering: str, profile: Profile | None) -> Mapping[str, Choice]:
    """A choice for every stage and every collective outside one, by the name of its first output.

    ``lowering`` is "torch" or "triton"; ``profile`` describes the GPU, None on CPU ranks, where
    kernels are chosen wherever there are any. Ranks compare what they chose before they run it.
    """
    chooser = _Chooser(graph.types, graph.mesh, lowering, profile)
    return {
        node.outputs[0].name: chooser.choose(node)
        for node in graph.nodes
        if node.body or node.op in COLLECTIVES
    }


@dataclass(frozen=True)
class _Chooser:
    types: Mapping[str, TensorType]
    mesh: Mesh
    lowering: str
    profile: Profile | None

    def choose(self, node: Node) -> Choice:
        if not node.body:
            if self.lowering == "triton":
                return Choice("kernel", "one launch over the shared heap")
            return Choice("torch", "torch ops over the shared heap")
        if self.lowering == "torch":
            return Choice(
                "torch", "lowering is torch: one op after the other, over the shared heap"
            )
        found = match(node, self.types)
        if isinstance(found, str):
            return Choice("unfused", f"no kernel: {found}")
        if self.profile is None:
            return Choice("fused", "one kernel computes and communicates", match=found)
        return self._by_cost(found, self.profile)

    def _by_cost(self, found: Match, profile: Profile) -> Choice:
        times = predict(found, self.types, self.mesh, profile)
        candidates = tuple(sorted(times.items(), key=lambda item: item[1]))
        if times["unfused"] < MARGIN * times["fused"]:
            return Choice("unfused", f"predicted faster on {profile.name}", candidates)
        return Choice("fused", f"predicted faster on {profile.name}", candidates, found)
