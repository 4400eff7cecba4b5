"""How each stage of a program is computed, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from iris.graph.nodes import Graph, Node
from iris.graph.ops import COLLECTIVES
from iris.graph.types import Mesh, TensorType
from iris.lower.cost import Profile, predict
from iris.lower.stages import Match, match
from iris.lower.tuned import Times, text_of

MARGIN = (
    0.9  # unfused must be predicted this much faster: the model is coarse, and fused is the rule
)


@dataclass(frozen=True)
class Choice:
    """How a stage is computed, why, and what each candidate was predicted to take (microseconds).

    ``match`` is how the stage is cut for its kernel; None where it runs as torch ops. ``stage`` is
    what `iris.tune` knows it by.
    """

    algorithm: str
    why: str
    candidates: tuple[tuple[str, float], ...] = ()
    match: Match | None = None
    stage: str = ""


def choose(
    graph: Graph, lowering: str, profile: Profile | None, measured: Times
) -> Mapping[str, Choice]:
    """A choice for every stage and every collective outside one, by the name of its first output.

    ``lowering`` is "torch" or "triton"; ``profile`` describes the GPU, None on CPU ranks, where
    kernels are chosen wherever there are any. What was ``measured`` goes before what is predicted.
    Ranks compare what they chose before they run it.
    """
    chooser = _Chooser(graph.types, graph.mesh, lowering, profile, measured)
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
    measured: Times

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
        text = text_of(node, self.types, self.mesh)
        if text in self.measured:
            return self._fastest(found, text, self.measured[text], "measured")
        if self.profile is None:
            why = "one kernel computes and communicates"
            return Choice("fused", why, match=found, stage=text)
        times = predict(found, self.types, self.mesh, self.profile)
        fused = {**times, "fused": MARGIN * times["fused"]}
        choice = self._fastest(found, text, fused, f"predicted faster on {self.profile.name}")
        return replace(choice, candidates=_sorted(times))

    def _fastest(self, found: Match, text: str, times: Mapping[str, float], why: str) -> Choice:
        algorithm = min(times, key=times.__getitem__)
        match = found if algorithm == "fused" else None
        return Choice(algorithm, why, _sorted(times), match, text)


def _sorted(times: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(times.items(), key=lambda item: item[1]))
