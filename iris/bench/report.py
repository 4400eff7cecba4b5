"""Tables, files and plots of measurements."""

import datetime
import json
import math
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

from iris.bench.timing import Row, Time

# Not peers: what none can be faster (or smaller) than, and what one rank does alone.
FLOORS = (
    "gemm", "gemm in step", "empty kernel", "copy", "bare replay", "shard and plan", "even share",
    "one rank, compiled",
)  # fmt: skip


def conditions(ranks: int, percent: int) -> dict[str, Any]:
    """Hardware and versions, to be kept with the figures."""
    gpu = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": gpu.name,
        "multiprocessors": gpu.multi_processor_count,
        "clock_mhz": _clock(),
        "ranks": ranks,
        "gpus": torch.cuda.device_count(),
        "percent_of_a_gpu_each": percent,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def _clock() -> int | None:
    """The multiprocessors' clock just now; torch reads it with nvidia-ml-py."""
    try:
        return torch.cuda.clock_rate()
    except (ImportError, RuntimeError):
        return None


def is_ours(name: str) -> bool:
    """Whether a contestant is this library."""
    return name.startswith("iris")


def points(rows: Iterable[Row]) -> list[tuple[str, dict[str, Any], dict[str, Row]]]:
    """Rows by table and point, in the order in which they first came, and there by contestant."""
    found: dict[str, dict[Any, tuple[str, dict[str, Any], dict[str, Row]]]] = {}
    for row in rows:
        table, key = found.setdefault(row.table, {}), tuple(row.point.items())
        table.setdefault(key, (row.table, row.point, {}))[2][row.name] = row
    return [item for table in found.values() for item in table.values()]


def _fastest(point: dict[str, Row], ours: bool) -> float:
    times = (
        row.time.median
        for name, row in point.items()
        if row.right and is_ours(name) == ours and name not in FLOORS
    )
    return min(times, default=math.nan)


def ratios(point: dict[str, Row]) -> tuple[float, float]:
    """Our best time over the floor's, and the best peer's over ours; nan where there is none."""
    ours = _fastest(point, True)
    floor = min((point[name].time.median for name in FLOORS if name in point), default=math.nan)
    return ours / floor, _fastest(point, False) / ours


def regret(point: dict[str, Row]) -> tuple[str, float]:
    """The planner's choice, and its time over that of the fastest candidate; nan without one."""
    chosen = next((row for row in point.values() if row.chosen), None)
    if chosen is None:
        return "", math.nan
    return chosen.name, chosen.time.median / _fastest(point, True) if chosen.right else math.nan


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def show(rows: Sequence[Row], console: Console, spread: bool = True) -> None:
    """Print one table each; ``x`` marks results that were wrong, ``*`` the planner's choice; with
    ``spread`` in brackets 10% .. 90%. Steps of models are shown as tokens a second too.
    """
    cell = _cell if spread else _median
    for title, items in groupby(points(rows), lambda item: item[0]):
        found = list(items)
        unit = next(iter(found[0][2].values())).unit
        console.print(_table(f"{title}, {unit}" if unit else title, found, cell))
        if title.endswith(" step"):
            console.print(_table(f"{title}, tokens/s", found, _tokens))
        if gains := _known(ratios(point)[1] for _, _, point in found):
            mean, worst = statistics.geometric_mean(gains), min(gains)
            console.print(f"best peer / iris: geometric mean {mean:.3f}, worst {worst:.3f}\n")
    if any(row.chosen for row in rows):
        console.print(_summary(rows))


def _summary(rows: Sequence[Row]) -> str:
    known = _known(regret(point)[1] for _, _, point in points(rows))
    near = sum(value <= 1.05 for value in known) / max(1, len(known))
    worst = max(known, default=math.nan)
    return (
        f"the planner's choice is within 5% of the best candidate at {near:.0%} of "
        f"{len(known)} points, worst {worst:.3f}"
    )


def _table(
    title: str,
    found: Sequence[tuple[str, dict[str, Any], dict[str, Row]]],
    cell: Callable[[Row], str],
) -> Table:
    names = list(dict.fromkeys(name for _, _, point in found for name in sorted(point)))
    table, keys = Table(title=title), list(found[0][1])
    heads = ("iris / floor", "best peer / iris", "choice / best")
    figures = [(*ratios(point), regret(point)[1]) for _, _, point in found]
    shown = [i for i in range(len(heads)) if _known(row[i] for row in figures)]
    for head in (*keys, *names, *(heads[i] for i in shown)):
        table.add_column(head, justify="right")
    for (_, key, point), row in zip(found, figures, strict=True):
        cells = [cell(point[name]) if name in point else "" for name in names]
        table.add_row(*(str(key[k]) for k in keys), *cells, *(f"{row[i]:.3f}" for i in shown))
    return table


def _median(row: Row) -> str:
    mark = ("" if row.right else " x") + (" *" if row.chosen else "")
    return f"{row.time.median:.1f}{mark}"


def _cell(row: Row) -> str:
    return f"{_median(row)} [{row.time.low:.0f} {row.time.high:.0f}]"


def _tokens(row: Row) -> str:
    """Every row of a step is a token."""
    return f"{1e6 * row.point['M'] / row.time.median:.0f}{'' if row.right else ' x'}"


def save(rows: Sequence[Row], about: dict[str, Any], path: Path) -> None:
    """Write the figures as JSON, and what each choice of the planner costs."""
    content: dict[str, Any] = {"about": about, "rows": [asdict(row) for row in rows]}
    if any(row.chosen for row in rows):
        content["choices"] = [
            {
                "table": table,
                "point": key,
                "choice": name,
                "regret": None if math.isnan(cost) else cost,
            }
            for table, key, point in points(rows)
            for name, cost in [regret(point)]
        ]
        content["summary"] = _summary(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


def load(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """What ``save`` wrote."""
    found = json.loads(path.read_text())
    rows = [Row(**row | {"time": Time(**row["time"])}) for row in found["rows"]]
    return rows, found["about"]


def plot(rows: Sequence[Row], about: dict[str, Any], path: Path) -> None:
    """Draw time against M, one panel a table and model, as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    timed = (row for row in rows if row.unit == "µs")
    with_rows = [item for item in points(timed) if "M" in item[1]]
    panels: dict[str, list[tuple[int, dict[str, Row]]]] = {}
    for table, point, contestants in with_rows:
        panels.setdefault(f"{table} {point.get('model', '')}", []).append((point["M"], contestants))
    if not panels:
        return
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(down, across, figsize=(5 * across, 4 * down), squeeze=False)
    for axis, (title, found) in zip(axes.flat, panels.items(), strict=False):
        for name in dict.fromkeys(name for _, point in found for name in sorted(point)):
            times = sorted((M, p[name].time.median) for M, p in found if name in p)
            style = "k--" if name in FLOORS else "o-"
            axis.loglog(*zip(*times, strict=True), style, label=name, lw=2 if is_ours(name) else 1)
        axis.set(title=title, xlabel="rows M", ylabel="µs a call")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.suptitle(
        f"{about['ranks']} ranks on {about['gpus']} {about['gpu']}, {about['date'][:10]}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
