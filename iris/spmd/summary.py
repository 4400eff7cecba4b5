"""How many of a model's collectives were fused, and why the others were not."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from iris.errors import SpecError
from iris.graph.nodes import walk
from iris.graph.ops import COLLECTIVES
from iris.graph.passes import fusion_report
from iris.spmd.explain import Shown


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


@dataclass(frozen=True, repr=False)
class Summary(Shown):
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


def explain(model: Any) -> Summary:
    """What became of the collectives of every program that ``model`` has run so far.

    ``model``: a parallelized model, a decorated function or module, or what ``torch.compile(...,
    backend="iris")`` gave; for the last, all that this process compiled so far. SpecError where
    nothing ran.

    >>> print(iris.explain(model))                           # doctest: +SKIP
    """
    fused: list[Fused] = []
    alone: list[Alone] = []
    programs = _programs(model)
    if not programs:
        raise SpecError(
            f"no program of this {type(model).__name__} has run",
            help="call it first: a decorated function or module, a parallelized model, or a "
            'model compiled with backend="iris"',
        )
    for program in programs:
        name = _title(program)
        total = Counter(n.op for n in walk(program.fused.nodes) if n.op in COLLECTIVES)
        stages: dict[str, Counter[str]] = {op: Counter() for op in total}
        for node in program.fused.nodes:
            for inner in walk(node.body):
                if inner.op in COLLECTIVES:
                    stages[inner.op][node.op] += 1
        fused += [Fused(name, op, n, tuple(stages[op].most_common())) for op, n in total.items()]
        reasons = Counter((e.op, e.loc, e.reason) for e in fusion_report(program.graph))
        alone += [Alone(name, op, n, loc, why) for (op, loc, why), n in reasons.items()]
    return Summary(tuple(fused), tuple(alone))


def _programs(model: Any) -> Sequence[Any]:
    """The programs behind ``model``, wherever they are kept."""
    for holder in (model, getattr(model, "spmd", None), getattr(model, "forward", None)):
        if holder is not None and isinstance(getattr(type(holder), "programs", None), property):
            return holder.programs  # type: ignore[no-any-return]
    backend = sys.modules.get("iris.spmd.backend")
    compiled = sorted(backend.COMPILED, key=lambda one: one.number) if backend else []
    return [program for one in compiled for program in one.program.programs]


def _title(program: Any) -> str:
    """``prefill 1x64`` for a language model, else the program's name and its largest operand."""
    shapes = {leaf.path: leaf.value.shape for leaf in program.leaves}
    if "ids" not in shapes:
        largest = max(shapes.values(), key=len, default=())
        return f"{program.options.name} {'x'.join(map(str, largest))}".strip()
    past = [shape[-2] for path, shape in shapes.items() if path.startswith("past")]
    rows = "x".join(map(str, shapes["ids"]))
    return f"decode {rows}, cache of {past[0]}" if past else f"prefill {rows}"
