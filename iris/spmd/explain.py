"""Why a program is as it is: its stages, how each is computed and why, and what was not fused."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from iris.graph.nodes import Graph, Node, walk
from iris.graph.passes import fusion_report
from iris.lower.choices import Choice
from iris.lower.program import Step

WIDTH = 120
# No style sheet: in a notebook it would hold for the whole page.
STYLE = "white-space:pre; overflow-x:auto; line-height:normal; font-family:monospace"
HTML = f'<pre style="{STYLE}">{{code}}</pre>'


@dataclass(frozen=True)
class Row:
    """One stage or collective of a program; ``heap`` are the bytes that its kernels have there."""

    stage: str
    result: str
    loc: str
    choice: Choice
    heap: int = 0


class Shown:
    """Tables that are text in a terminal and HTML in a notebook."""

    def __repr__(self) -> str:
        console = self._printed(color_system=None)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def _repr_html_(self) -> str:
        return self._printed(record=True).export_html(inline_styles=True, code_format=HTML)

    def _printed(self, **options: Any) -> Console:
        """A console after it has printed this; in a notebook others show that in the cell."""
        console = Console(file=io.StringIO(), width=WIDTH, force_jupyter=False, **options)
        console.print(self)
        return console


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """What ``f.explain(...)`` returns: text in a terminal, a table in a notebook."""

    name: str
    mesh: str
    rows: tuple[Row, ...]
    unfused: tuple[tuple[str, str, str], ...]  # what, where, why not
    outside: tuple[tuple[str, str, str], ...] = ()  # of the CUDA graph: step, where, why

    def table(self) -> Table:
        """The stages, as a rich table."""
        table = Table(title=f"{self.name} on {self.mesh}", title_justify="left")
        predicted = any(row.choice.candidates for row in self.rows)
        built = any(row.heap for row in self.rows)
        headings = ["stage", "result", "line", "algorithm", "why"]
        for heading in headings + ["predicted us"] * predicted + ["heap bytes"] * built:
            table.add_column(heading, no_wrap=heading not in ("result", "line", "why"))
        for row in self.rows:
            times = "\n".join(f"{name} {time:.0f}" for name, time in row.choice.candidates)
            cells = [row.stage, row.result, row.loc, row.choice.algorithm, row.choice.why]
            table.add_row(*cells, *[times] * predicted, *[f"{row.heap:,}"] * built)
        return table

    def _list(self, title: str, what: str, entries: Sequence[tuple[str, str, str]]) -> Table:
        table = Table(title=title, title_justify="left")
        for heading in (what, "line", "reason"):
            table.add_column(heading)
        for entry in entries:
            table.add_row(*entry)
        return table

    def __rich_console__(self, console: Console, options: object) -> object:
        del console, options
        yield self.table()
        if self.unfused:
            yield self._list("not fused", "collective", self.unfused)
        if self.outside:
            yield self._list("outside the CUDA graph", "step", self.outside)


def explain(
    graph: Graph,
    fused: Graph,
    choices: Mapping[str, Choice],
    outside: Sequence[tuple[str, str, str]] = (),
    steps: Sequence[Step] = (),
) -> Explanation:
    """Describe ``fused``, the graph in stages; ``graph`` is what the user wrote.

    ``choices`` is by the name of a node's first output. ``outside`` are the steps that a CUDA graph
    cannot hold, which is known once the program has run, and ``steps`` all of its plan, once it is
    compiled.
    """
    heap = {name: step.workspace for step in steps for name in step.makes[:1]}

    def names(node: Node, choice: Choice) -> set[str]:
        made = {value.name for inner in walk((node,)) for value in inner.outputs}
        return made | set(choice.match.results if choice.match else ())

    plain = Choice("torch", "compute that is not part of a stage")
    rows = []
    for node in fused.nodes:
        first = node.outputs[0]
        if node.body or first.name in choices:
            choice = choices.get(first.name, plain)
            nbytes = sum(heap.get(name, 0) for name in names(node, choice))
            rows.append(Row(node.op, f"%{first.name}: {first.type}", node.loc, choice, nbytes))
    unfused = tuple((entry.op, entry.loc, entry.reason) for entry in fusion_report(graph))
    return Explanation(fused.name, str(fused.mesh), tuple(rows), unfused, tuple(outside))
