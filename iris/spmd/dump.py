"""``IRIS_DUMP=folder``: each step of each program as text, and a script that runs its graph."""

from collections.abc import Callable
from pathlib import Path

from iris import config
from iris.graph.nodes import Graph
from iris.graph.passes import Pass, run_passes
from iris.runtime.context import current_or_none

REPRO = '''"""Runs the graph of program {name} alone: all ranks in this process, in numpy, on
small integers."""

import numpy as np

from iris.graph.parse import parse
from iris.graph.reference import random_inputs, run

TEXT = """\\
{text}"""

graph = parse(TEXT)
for number, ranks in enumerate(run(graph, random_inputs(graph)).outputs):
    for rank, array in enumerate(ranks):
        total = np.sum(array, dtype=float)
        print(f"output {{number}}, rank {{rank}}: shape {{np.shape(array)}}, sum {{total:.6g}}")
'''


class Dump:
    """Numbered files of one program, in ``<folder>/rank<r>/<program>``; none without a folder."""

    def __init__(self, name: str) -> None:
        self.folder: Path | None = None
        self.count = 0
        root = config.dump()
        if root is not None:
            ctx = current_or_none()
            parent = root / f"rank{ctx.cur_rank if ctx else 0}"
            number = len(list(parent.glob(f"{name}*"))) if parent.exists() else 0
            self.folder = parent / (f"{name}_{number}" if number else name)
            self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, what: str, text: str) -> None:
        """One numbered file."""
        if self.folder is not None:
            (self.folder / f"{self.count:02d}_{what}.txt").write_text(text)
            self.count += 1

    def passes(self, graph: Graph, passes: tuple[Pass, ...]) -> Graph:
        """``graph`` after the passes, each written, and the script that runs it alone."""
        seen: Callable[[str, Graph], None] | None = None
        if self.folder is not None:
            script = REPRO.format(name=graph.name, text=graph)
            (self.folder / "repro.py").write_text(script)

            def seen(step: str, after: Graph) -> None:
                self.write(step, str(after))

        return run_passes(graph, passes, seen)
