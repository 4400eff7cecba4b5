"""How each stage of a program is computed, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from iris.errors import ConfigError
from iris.graph.nodes import Graph, Node
from iris.graph.ops import COLLECTIVES
from iris.lower.cost import Profile, predict
from iris.lower.kernels.schedule import FEW_ROWS
from iris.lower.stages import Limits, Match, match, match_norm
from iris.lower.tuned import Times, text_of

if TYPE_CHECKING:
    from iris.lower.kernels.config import GemmConfig

MARGIN = (
    0.9  # unfused must be predicted this much faster: the model is coarse, and fused is the rule
)
# From profiles of a layer of Llama 3 8B, four ranks on an H200: of 2048 rows, two weights that
# share tiles took about 1300 us, where one alone takes 430; of 64 rows, a sum and its norm in one
# kernel took far longer than a sum alone. How the layer does without them is not measured yet.
ON_GPUS = Limits(paired_rows=FEW_ROWS, norms=False)
ALGORITHMS = ("fused", "one-shot", "two-shot", "copy engine", "unfused")


@dataclass(frozen=True)
class StageConfig:
    """How stages are computed, in place of what the cost model would choose.

    ``algorithm`` is "fused", "one-shot" or "two-shot" (fused forms of ``matmul_all_reduce``),
    "copy engine" (one of ``all_gather_matmul``, see docs/copy-engine.md) or "unfused"; where a
    stage has no such form, the model chooses. ``gemm`` is the tile and launch
    shape of the kernels. ``communication`` is how many programs of a stage, one runs on each
    multiprocessor, send, sum and collect (0: all); the others only compute. Every rank must give
    the same.

    Example::

        ctx.ops.matmul_all_reduce(output, A, B, config=StageConfig("two-shot"))
    """

    algorithm: str | None = None
    gemm: "GemmConfig | None" = None
    communication: int = 0

    def __post_init__(self) -> None:
        crew: object = self.communication
        if not isinstance(crew, int) or crew < 0:
            raise ConfigError(f"communication is {crew!r}, a number of programs or 0")
        if self.gemm is not None:
            from iris.lower.kernels.config import GemmConfig  # brings in triton

            if not isinstance(self.gemm, GemmConfig):
                raise ConfigError(f"gemm is {self.gemm!r}, a GemmConfig or None")
        if self.algorithm is not None and self.algorithm not in ALGORITHMS:
            raise ConfigError(f"algorithm {self.algorithm!r} is not one of {', '.join(ALGORITHMS)}")

    @staticmethod
    def of(given: "StageConfig | str | None") -> "StageConfig | None":
        """What ``config=`` was given as; the name of an algorithm stands for it."""
        if given is None or isinstance(given, StageConfig):
            return given
        if isinstance(given, str):
            return StageConfig(given)
        raise ConfigError(f"config is {given!r}, a StageConfig or the name of an algorithm")


@dataclass(frozen=True)
class Choice:
    """How a stage is computed, why, and what each candidate was predicted to take (microseconds).

    ``match`` is how the stage is cut for a kernel; None where it runs as torch ops. ``stage`` is
    what `iris.tune` knows it by, ``ways`` all its algorithms. ``communication``: see `StageConfig`.
    """

    algorithm: str
    why: str
    candidates: tuple[tuple[str, float], ...] = ()
    match: Match | None = None
    gemm: "GemmConfig | None" = None
    stage: str = ""
    ways: tuple[str, ...] = ()
    communication: int = 0

    def __str__(self) -> str:
        """What ranks must agree on."""
        text = self.algorithm if self.gemm is None else f"{self.algorithm} by {self.gemm}"
        return f"{text}, {self.communication} programs communicate" if self.communication else text


@dataclass
class Choose:
    """``all_gather_matmul(x, w) => all_gather_matmul(x, w, algorithm=fused)``, for every stage.

    ``lowering`` is "torch" or "triton"; ``profile`` describes the GPU, None on CPU ranks, where
    kernels are chosen wherever there are any. What was ``measured`` goes before what is predicted,
    and ``config`` before both. ``engine`` says that copies reach peers beside a kernel.
    ``choices`` then says why, also of collectives outside stages, by the name of a first output.
    Ranks compare what they chose before they run it. ``agreed`` are algorithms for all of those,
    in order, where ranks had chosen by shards of different sizes.
    """

    lowering: str
    profile: Profile | None
    measured: Times
    config: StageConfig | None = None
    engine: bool = False
    agreed: Sequence[str] = ()
    choices: Mapping[str, Choice] = field(default_factory=dict)
    __name__ = "choose"

    def __call__(self, graph: Graph) -> Graph:
        nodes = [node for node in graph.nodes if node.body or node.op in COLLECTIVES]
        agreed = self.agreed or [""] * len(nodes)
        self.choices = {
            node.outputs[0].name: self._choice(node, graph, way)
            for node, way in zip(nodes, agreed, strict=True)
        }
        return graph.with_nodes(tuple(map(self._noted, graph.nodes)))

    def _noted(self, node: Node) -> Node:
        if not node.body:
            return node
        algorithm = self.choices[node.outputs[0].name].algorithm
        return replace(node, attrs=(("algorithm", algorithm),))

    def _choice(self, node: Node, graph: Graph, agreed: str) -> Choice:
        if not node.body:
            if self.lowering == "triton":
                return Choice("kernel", "one launch over the shared heap")
            return Choice("torch", "torch ops over the shared heap")
        if self.lowering == "torch":
            return Choice(
                "torch", "lowering is torch: one op after the other, over the shared heap"
            )
        if agreed == "kernel":
            return Choice("kernel", "not fused: shards differ, and some rank cannot or would not")
        limits = Limits() if self.profile is None else ON_GPUS
        found = match(node, graph.types, graph.mesh, limits)
        if isinstance(found, str):
            return self._unfused(node, graph, f"no kernel: {found}")
        text = text_of(node, graph.types, graph.mesh)
        ways = self._ways(found, graph)
        times: Mapping[str, float] = self.measured.get(text, {})
        if not times and self.profile is not None:
            times = predict(found, graph.types, graph.mesh, self.profile)
        times = {way: time for way, time in times.items() if way in (*ways, "unfused")}
        way, why = "unfused" if agreed == "norm" else agreed, "agreed by ranks whose shards differ"
        if not agreed:
            way, why = self._best(ways, times, text in self.measured)
        candidates = tuple(sorted(times.items(), key=lambda item: item[1]))
        if way == "unfused":
            choice = self._unfused(node, graph, why, candidates)
        else:
            config = self.config or StageConfig()
            crew = config.communication
            why = f"{why}; {crew} programs communicate" if crew else why
            choice = Choice(way, why, candidates, found, config.gemm, communication=crew)
        return replace(choice, stage=text, ways=(*ways, "unfused"))

    def _ways(self, found: Match, graph: Graph) -> tuple[str, ...]:
        """The fused algorithms of a stage, the likely one first."""
        if found.stage == "all_gather_matmul" and self.engine:
            return ("fused", "copy engine")
        if found.stage != "matmul_all_reduce":
            return ("fused",)
        rows = graph.types[found.products[0].left].local_shape(graph.mesh, graph.mesh.origin)[0]
        return ("one-shot", "two-shot") if rows <= FEW_ROWS else ("two-shot", "one-shot")

    def _best(
        self, ways: tuple[str, ...], times: Mapping[str, float], measured: bool
    ) -> tuple[str, str]:
        """The algorithm for a stage, and why."""
        best = min(ways, key=lambda way: times.get(way, 0.0))
        forced = self.config and self.config.algorithm
        if forced == "fused" or forced in (*ways, "unfused"):
            return best if forced == "fused" else str(forced), "forced by config"
        if measured:
            return min(times, key=times.__getitem__), "measured"
        if self.profile is None:
            return best, "one kernel computes and communicates"
        if times["unfused"] < MARGIN * times[best]:
            best = "unfused"
        return best, f"predicted faster on {self.profile.name}"

    def _unfused(
        self, node: Node, graph: Graph, why: str, candidates: tuple[tuple[str, float], ...] = ()
    ) -> Choice:
        """Torch's products, and kernels that communicate: with the norm in one if there is one."""
        if node.op == "matmul_all_reduce":
            found = match_norm(node, graph.types, graph.mesh)
            if isinstance(found, Match):
                return Choice("unfused", f"{why}; sum and norm in one kernel", candidates, found)
        return Choice("unfused", why, candidates)
