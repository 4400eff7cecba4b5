"""When each rank did what: spans of time as a Chrome trace and as a picture."""

import gzip
import io
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from iris.errors import UnsupportedError

CALLER = -1  # the rank of a process that is none
HOST = "host"
_CALLER = "caller"
_COLORS = {
    "wait": "#d62728",
    "tile": "#1f77b4",
    "emit": "#17becf",
    "push": "#ff7f0e",
    "sum": "#98df8a",
    "collect": "#c5b0d5",
    "call": "#dddddd",
}
_MOST_LABELLED = 24
_SHORT = 10**7  # nanoseconds that are drawn in microseconds


@dataclass(frozen=True)
class Event:
    """One span of a track of a rank, or of ``CALLER``.

    Times are nanoseconds of the host's monotonic clock. ``kind`` is what it is drawn as; the name
    where there is none.
    """

    rank: int
    name: str
    start: int
    end: int
    track: str = HOST
    kind: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(repr=False)
class Timeline:
    """Events of ranks; ``about`` says how they were measured. A notebook shows it as a picture.

    Example::

        with iris.profile() as timeline:
            mlp(x, w_up, w_down)
        timeline.save("trace.json")        # for ui.perfetto.dev or chrome://tracing
        timeline.plot()                    # a matplotlib figure
    """

    events: list[Event] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        ranks = len({event.rank for event in self.events} - {CALLER})
        span = (self._end() - self._begin()) / 1e6
        return f"Timeline({len(self.events)} events of {ranks} ranks in {span:.3f} ms)"

    def _repr_png_(self) -> bytes | None:
        if find_spec("matplotlib") is None:
            return None
        picture = io.BytesIO()
        self.plot().savefig(picture, dpi=110)
        return picture.getvalue()

    def names(self, rank: int, track: str = HOST) -> list[str]:
        """What a track did, in order of the ends."""
        found = [e for e in self.events if (e.rank, e.track) == (rank, track)]
        return [event.name for event in sorted(found, key=lambda event: event.end)]

    def tracks(self) -> list[tuple[int, str]]:
        """Rank and name of every track, in order: the host's first, then by number."""
        return sorted({(e.rank, e.track) for e in self.events}, key=_place)

    def busy(self, kind: str) -> dict[int, float]:
        """Microseconds that each rank's tracks spent in events of a kind, on average over them."""
        tracks = [rank for rank, track in self.tracks() if track != HOST]
        spent = dict.fromkeys(tracks, 0)
        for event in self.events:
            if event.kind == kind and event.track != HOST:
                spent[event.rank] += event.end - event.start
        return {rank: time / tracks.count(rank) / 1e3 for rank, time in spent.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the Chrome trace format, which Perfetto reads too: one process a rank.

        A path that ends in ".gz" gets it compressed; viewers read that as well.
        """
        text = json.dumps(self._chrome(), separators=(",", ":")).encode()
        path = Path(path)
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Timeline":
        """Read what ``save`` wrote. Times begin at 0."""
        path = Path(path)
        text = path.read_bytes()
        found = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)
        rows = found["traceEvents"]
        titles = {r["pid"]: r["args"]["name"] for r in rows if r["name"] == "process_name"}
        ranks = {pid: _number(title) for pid, title in titles.items()}
        tracks = {
            (r["pid"], r["tid"]): r["args"]["name"] for r in rows if r["name"] == "thread_name"
        }
        events = [
            Event(
                ranks[row["pid"]],
                row["name"],
                round(row["ts"] * 1e3),
                round((row["ts"] + row["dur"]) * 1e3),
                tracks[row["pid"], row["tid"]],
                row["cat"],
                row["args"],
            )
            for row in rows
            if row["ph"] == "X"
        ]
        return cls(events, found["otherData"])

    def plot(self, width: float = 9.0) -> Any:
        """Draw the tracks, and return the matplotlib figure. Waits are hatched, or red if thin."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise UnsupportedError(
                "a picture of a timeline needs matplotlib", help="pip install matplotlib"
            ) from None
        tracks = self.tracks()
        few = len(tracks) <= _MOST_LABELLED
        height = (0.5 if few else 0.05) * len(tracks) + 1.2
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        scale = 1e3 if self._end() - self._begin() < _SHORT else 1e6
        rows = {track: row for row, track in enumerate(tracks)}
        shown = self._draw(axes, rows, scale, "////" if few else "")
        ranks = [rank for rank, _ in tracks]
        ticks = range(len(tracks)) if few else [ranks.index(r) for r in dict.fromkeys(ranks)]
        axes.set_yticks(ticks, [_title(*tracks[row], few) for row in ticks])
        for row in range(1, len(tracks)):
            if tracks[row][0] != tracks[row - 1][0] and not few:
                axes.axhline(row - 0.5, color="k", lw=0.5)
        axes.set_ylim(len(tracks) - 0.5, -0.5)
        axes.set_xlabel("µs" if scale == 1e3 else "ms")
        place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
        axes.legend(list(shown.values()), list(shown), fontsize="small", **place)
        return figure

    def _draw(
        self, axes: Any, rows: Mapping[tuple[int, str], int], scale: float, hatch: str
    ) -> dict[str, Any]:
        """Draw bars, long ones first, so that what happens within another is on top of it."""
        from matplotlib import colormaps

        begin = self._begin()
        bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for event in sorted(self.events, key=lambda event: event.start - event.end):
            bar = ((event.start - begin) / scale, (event.end - event.start) / scale)
            kind = event.kind or event.name
            bars.setdefault((rows[event.rank, event.track], kind), []).append(bar)
        kinds = list(dict.fromkeys(kind for _, kind in bars if kind not in _COLORS))
        palette = colormaps["Set3"]
        colors = {kind: palette(i % palette.N) for i, kind in enumerate(kinds)} | _COLORS
        shown = {}
        for (row, kind), spans in bars.items():
            style = {"facecolors": colors[kind], "lw": 0}
            if kind == "wait" and hatch:
                style |= {"facecolors": "w", "edgecolors": colors[kind], "hatch": hatch}
            shown[kind] = axes.broken_barh(spans, (row - 0.4, 0.8), **style)
        return shown

    def _begin(self) -> int:
        return min((event.start for event in self.events), default=0)

    def _end(self) -> int:
        return max((event.end for event in self.events), default=0)

    def _chrome(self) -> dict[str, Any]:
        begin, tracks = self._begin(), self.tracks()
        process = {rank: number for number, rank in enumerate(dict.fromkeys(r for r, _ in tracks))}
        process = {rank: number + 1 for rank, number in process.items()}  # 0 means the kernel
        rows: list[dict[str, Any]] = []
        for rank, number in process.items():
            names: dict[str, Any] = {"process_name": {"name": _rank(rank)}}
            names["process_sort_index"] = {"sort_index": number}
            rows += [{"ph": "M", "pid": number, "name": n, "args": a} for n, a in names.items()]
        thread = {track: number + 1 for number, track in enumerate(tracks)}
        for (rank, track), number in thread.items():
            names = {"thread_name": {"name": track}, "thread_sort_index": {"sort_index": number}}
            at = {"ph": "M", "pid": process[rank], "tid": number}
            rows += [at | {"name": n, "args": a} for n, a in names.items()]
        rows += [
            {
                "ph": "X",
                "name": event.name,
                "cat": event.kind,
                "pid": process[event.rank],
                "tid": thread[event.rank, event.track],
                "ts": (event.start - begin) / 1e3,
                "dur": (event.end - event.start) / 1e3,
                "args": event.args,
            }
            for event in self.events
        ]
        return {"traceEvents": rows, "displayTimeUnit": "ns", "otherData": self.about}


def lanes(spans: Iterable[tuple[int, int, int]]) -> list[int]:
    """A lane for each ``(start, end, owner)``, such that the spans of a lane nest.

    Spans of one owner nest. The input is in order of the starts, and of equal ones the longest is
    first.
    """
    stacks: list[list[tuple[int, int]]] = []
    owners: list[int] = []
    found = []
    for start, end, owner in spans:
        free = []
        for number, stack in enumerate(stacks):
            while stack and stack[-1][0] <= start:
                stack.pop()
            if not stack or (stack[-1][1] == owner and end <= stack[-1][0]):
                free.append(number)
        lane = next((n for n in free if owners[n] == owner), free[0] if free else len(stacks))
        if lane == len(stacks):
            stacks.append([])
            owners.append(owner)
        owners[lane] = owner
        stacks[lane].append((end, owner))
        found.append(lane)
    return found


def _rank(rank: int) -> str:
    return _CALLER if rank == CALLER else f"rank {rank}"


def _number(title: str) -> int:
    return CALLER if title == _CALLER else int(title.removeprefix("rank "))


def _title(rank: int, track: str, few: bool) -> str:
    return f"{_rank(rank)} {track}" if few and track != HOST else _rank(rank)


def _place(key: tuple[int, str]) -> tuple[Any, ...]:
    rank, track = key
    numbers = [int(number) for number in re.findall(r"\d+", track)]
    return rank, track != HOST, re.sub(r"\d+", "", track), numbers
