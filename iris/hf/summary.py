"""How many of a model's collectives were fused, and why the others were not."""

import io
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from iris.graph.nodes import walk
from iris.graph.ops import COLLECTIVES
from iris.graph.passes import fusion_report

WIDTH = 120


@dataclass(frozen=True)
class Fused:
    """Collectives of one kind in one program."""

    program: str
    collective: str
    total: int
    stages: tuple[tuple[str, int], ...]  # the stages that hold them, most frequent first

    @property
    def fused(self) -> int:
        """How many are in stages."""
        return sum(count for _, count in self.stages)


@dataclass(frozen=True)
class Alone:
    """Collectives that stand alone for one reason at one line."""

    program: str
    collective: str
    count: int
    loc: str
    reason: str


@dataclass(frozen=True)
class Summary:
    """What :func:`explain` returns: text in a terminal, tables in a notebook."""

    fused: tuple[Fused, ...]
    alone: tuple[Alone, ...]

    def __rich_console__(self, console: Console, options: object) -> object:
        del console, options
        table = Table("program", "collective", "fused", "in stages", title="collectives")
        for row in self.fused:
            stages = ", ".join(f"{count} {stage}" for stage, count in row.stages)
            table.add_row(row.program, row.collective, f"{row.fused} of {row.total}", stages)
        yield table
        if self.alone:
            table = Table("program", "collective", "line", "reason", title="not fused")
            for entry in self.alone:
                what = f"{entry.count} {entry.collective}"
                table.add_row(entry.program, what, entry.loc, entry.reason)
            yield table

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()


def explain(model: Any) -> Summary:
    """What became of the collectives of every program that a parallelized ``model`` has run so far.

    >>> print(iris.hf.explain(model))                        # doctest: +SKIP
    """
    fused: list[Fused] = []
    alone: list[Alone] = []
    for program in model.spmd.programs:
        ids = next(leaf.value for leaf in program.leaves if leaf.path == "ids")
        past = [leaf.value.shape[-2] for leaf in program.leaves if leaf.path.startswith("past")]
        rows = "x".join(map(str, ids.shape))
        name = f"decode {rows}, cache of {past[0]}" if past else f"prefill {rows}"
        total = Counter(n.op for n in walk(program.graph.nodes) if n.op in COLLECTIVES)
        stages: dict[str, Counter[str]] = {op: Counter() for op in total}
        for node in program.fused.nodes:
            for inner in walk(node.body):
                if inner.op in COLLECTIVES:
                    stages[inner.op][node.op] += 1
        fused += [Fused(name, op, n, tuple(stages[op].most_common())) for op, n in total.items()]
        reasons = Counter((e.op, e.loc, e.reason) for e in fusion_report(program.graph))
        alone += [Alone(name, op, n, loc, why) for (op, loc, why), n in reasons.items()]
    return Summary(tuple(fused), tuple(alone))
