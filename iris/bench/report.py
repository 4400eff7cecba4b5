"""Tables and files of measurements."""

import datetime
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

from iris.bench.stages import Row


def conditions(ranks: int, percent: int) -> dict[str, Any]:
    """Hardware and versions, to be kept with the figures."""
    gpu = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": gpu.name,
        "multiprocessors": gpu.multi_processor_count,
        "ranks": ranks,
        "gpus": torch.cuda.device_count(),
        "percent_of_a_gpu_each": percent,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def points(rows: Sequence[Row]) -> list[tuple[tuple[Any, ...], dict[str, Row]]]:
    """Rows by point (stage, model, M, K, N), and there by contestant."""

    def key(row: Row) -> tuple[Any, ...]:
        return (row.stage, row.model, row.M, row.K, row.N)

    return [(point, {row.name: row for row in group}) for point, group in groupby(rows, key)]


def verdict(point: dict[str, Row]) -> tuple[float, float, float]:
    """Time of our best form, its ratio to the floor, and the best peer's time over it."""
    ours = min(r.time.median for n, r in point.items() if n.startswith("iris") and r.right)
    others = [
        r.time.median
        for n, r in point.items()
        if not n.startswith("iris") and n != "gemm" and r.right
    ]
    return ours, ours / point["gemm"].time.median, min(others, default=math.nan) / ours


def show(rows: Sequence[Row], console: Console) -> None:
    """Print one table a stage; ``x`` marks results that were wrong, in brackets 10% .. 90%."""
    by_stage = groupby(points(rows), lambda item: item[0][0])
    for stage, items in by_stage:
        found = list(items)
        names = list(dict.fromkeys(name for _, point in found for name in sorted(point)))
        table = Table(title=f"{stage}, µs a call")
        for title in ("model", "M, K, N a rank", *names, "iris / gemm", "best peer / iris"):
            table.add_column(title, justify="right")
        for (_, model, *size), point in found:
            _, floor, gain = verdict(point)
            cells = [_cell(point[name]) if name in point else "" for name in names]
            table.add_row(model, str(size)[1:-1], *cells, f"{floor:.3f}", f"{gain:.3f}")
        console.print(table)
    gains = [verdict(point)[2] for _, point in points(rows)]
    known = [gain for gain in gains if not math.isnan(gain)]
    if known:
        mean = math.exp(sum(map(math.log, known)) / len(known))
        worst = min(known)
        console.print(f"best peer / iris: geometric mean {mean:.3f}, worst {worst:.3f}")


def _cell(row: Row) -> str:
    mark = "" if row.right else " x"
    return f"{row.time.median:.1f}{mark} [{row.time.low:.0f} {row.time.high:.0f}]"


def save(rows: Sequence[Row], about: dict[str, Any], folder: Path) -> Path:
    """Write the figures as JSON; the name says date, GPU and ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    gpu = about["gpu"].replace(" ", "-")
    path = folder / f"{about['date'][:10]}-stages-{gpu}-W{about['ranks']}.json"
    path.write_text(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1))
    return path
