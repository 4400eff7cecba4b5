"""The passes, in order, and the one way to run them."""

from collections.abc import Callable

from iris.graph.nodes import Graph
from iris.graph.passes.canonicalise import canonicalise as canonicalise
from iris.graph.passes.dedupe import dedupe as dedupe
from iris.graph.passes.fuse import fuse, fusion_report as fusion_report
from iris.graph.verify import verify

Pass = Callable[[Graph], Graph]

PASSES: tuple[Pass, ...] = (canonicalise, dedupe, fuse)
"""Every pass that needs no machine, in order; `iris.lower.choices` has the last one."""


def run_passes(
    graph: Graph,
    passes: tuple[Pass, ...] = PASSES,
    seen: Callable[[str, Graph], None] | None = None,
) -> Graph:
    """``graph`` after ``passes``, verified before the first and after each.

    ``seen`` is called with ``"import"`` and the graph, then with the name of each pass and what it
    gave. GraphError if a pass breaks the graph.
    """
    verify(graph)
    if seen is not None:
        seen("import", graph)
    for step in passes:
        graph, before = step(graph), graph
        verify(graph, before)
        if seen is not None:
            seen(step.__name__, graph)
    return graph
