"""Pictures of programs."""

from pathlib import Path
from typing import Any

from iris.graph import draw as pictures
from iris.graph.nodes import Graph
from iris.spmd.stages import Lowered, Traced


def draw(program: Graph | Traced | Lowered, path: str | Path | None = None) -> str:
    """A picture of a graph as SVG text; written to ``path`` too, as .svg or .png.

    Stages are boxes around the nodes that they replace, compute and communication have different
    colours, edges carry types. PNG needs matplotlib.

    >>> svg = iris.draw(mlp.trace(x, w_up, w_down).lower(), "mlp.svg")       # doctest: +SKIP
    """
    graph: Any = program if isinstance(program, Graph) else program.graph
    return pictures.draw(graph, path)
