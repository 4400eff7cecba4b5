"""When each rank did what: the steps of programs and their waits, as a trace and as a picture."""

import json
import linecache
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from iris.errors import UnsupportedError
from iris.runtime.groups import Group

CALLER = -1
_STEP = re.compile(r"v?(\w+),?.* = (\w+)\(.*?(?:\s+# (.*))?$")


@dataclass(frozen=True)
class Event:
    """One span of one track: a rank, or ``CALLER``. Times are nanoseconds of the host's clock."""

    track: int
    name: str
    line: str
    start: int
    end: int


class Recorder:
    """Notes each step of the plans that run in this thread, and each wait for peers.

    It uses Python's trace hook, so nothing is slower while no recorder runs.
    """

    def __init__(self, track: int) -> None:
        self._track = track
        self._events: list[Event] = []
        self._step: tuple[str, str, int] | None = None

    def start(self) -> None:
        """Begin, with the next function that is called."""
        sys.settrace(self._enter)

    def stop(self) -> list[Event]:
        """End, and return what was noted."""
        sys.settrace(None)
        return self._events

    def _note(self, name: str, line: str, start: int) -> None:
        event = Event(self._track, name, line, start, time.perf_counter_ns())
        self._events.append(event)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is Group.sync.__code__:
            frame.f_trace_lines = False
            return self._waiting(f"wait in {frame.f_locals['what']}", time.perf_counter_ns())
        return self._steps if frame.f_code.co_filename.startswith("<iris ") else None

    def _waiting(self, name: str, start: int) -> Any:
        def leave(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "return":
                self._note(name, "", start)
            return leave

        return leave

    def _steps(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A line of a plan begins, or the plan returns: the step before it is over."""
        if self._step is not None:
            self._note(*self._step)
            self._step = None
        if event == "line":
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            found = _STEP.match(text)
            if found is not None:
                result, op, line = found.groups()
                name = f"{op.removesuffix(f'_{result}')} %{result}"
                self._step = name, line or "", time.perf_counter_ns()
        return self._steps


@dataclass
class Timeline:
    """What ``mesh.profile()`` gives: one track a rank, and one for the caller.

    Example::

        with mesh.profile() as timeline:
            mlp(x, w_up, w_down)
        timeline.save("trace.json")        # for chrome://tracing or ui.perfetto.dev
    """

    ranks: int
    events: list[Event] = field(default_factory=list)

    def names(self, track: int) -> list[str]:
        """What a track did, in order of the ends."""
        return [event.name for event in self.events if event.track == track]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the Chrome trace format, which Perfetto reads too. Times are microseconds."""
        begin = min((event.start for event in self.events), default=0)
        rows: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": {"name": title}}
            for track, title in self._titles()
        ]
        rows += [
            {
                "ph": "X",
                "name": event.name,
                "pid": 0,
                "tid": event.track,
                "ts": (event.start - begin) / 1e3,
                "dur": (event.end - event.start) / 1e3,
                "args": {"line": event.line},
            }
            for event in self.events
        ]
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": rows, "displayTimeUnit": "ms"}, file)

    def plot(self) -> Any:
        """Draw the tracks, and return the matplotlib figure. Waits are hatched."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise UnsupportedError(
                "a picture of a timeline needs matplotlib", help="pip install matplotlib"
            ) from None
        figure = Figure(figsize=(9, 0.5 * self.ranks + 1.2), layout="constrained")
        axes = figure.subplots()
        begin = min((event.start for event in self.events), default=0)
        steps = dict.fromkeys(e.name for e in self.events if not e.name.startswith("wait"))
        colors = {name: f"C{number % 10}" for number, name in enumerate(steps)}
        for event in sorted(self.events, key=lambda event: event.start - event.end):
            bar = [((event.start - begin) / 1e6, (event.end - event.start) / 1e6)]
            at = (event.track - 0.4, 0.8)
            if event.name in colors:
                axes.broken_barh(bar, at, facecolors=colors[event.name], label=event.name)
            else:
                axes.broken_barh(bar, at, facecolors="none", edgecolors="k", hatch="////", lw=0)
        axes.set_yticks(*zip(*self._titles(), strict=True))
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        handles, labels = axes.get_legend_handles_labels()
        shown = dict(zip(labels, handles, strict=True))
        axes.legend(
            shown.values(), shown, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5)
        )
        return figure

    def _titles(self) -> Sequence[tuple[int, str]]:
        return [(CALLER, "caller"), *((rank, f"rank {rank}") for rank in range(self.ranks))]
