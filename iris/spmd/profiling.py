"""``iris.profile``: when each rank's host, GPU and kernels did what, as one timeline."""

import functools
import linecache
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch

from iris.runtime.context import Iris, current_or_none
from iris.runtime.groups import Group
from iris.runtime.timeline import Event, Timeline

KERNELS = "kernels"
_STEP = re.compile(r"v?(\w+),?.* = (\w+)\(.*?(?:\s+# (.*))?$")


@functools.cache
def _labels() -> Mapping[CodeType, Callable[[Mapping[str, Any]], str]]:
    """What the host does in a function, from its arguments."""
    from iris.lower.replay import Runner  # bring in the tracer, which is slow to import
    from iris.spmd.compiling import Compiler
    from iris.spmd.program import Program, prepare

    return {
        Group._sync.__code__: lambda local: f"wait in {local['what']}",
        Compiler.run.__code__: lambda local: f"trace {local['self'].name}",
        prepare.__code__: lambda local: f"plan {local['program'].options.name}",
        Runner._load.__code__: lambda local: f"load {local['self'].what}",
        Runner._capture.__code__: lambda local: f"capture {local['self'].what}",
        Program.__call__.__code__: lambda local: f"call {local['self'].options.name}",
    }


def _replay() -> CodeType:
    from iris.lower.replay import Capture

    return Capture.__call__.__code__


class Recorder:
    """Notes what programs do on the host of this thread: the steps of plans, and waits for peers.

    It uses Python's trace hook, so nothing is slower while no recorder runs. ``launched`` are the
    steps that sent a kernel to the GPU, in order, but those that only loaded one.
    """

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.events: list[Event] = []
        self._step: tuple[str, str, int] | None = None
        self._before: Any = None
        self._labels = _labels()
        self._replay = _replay()

    def start(self) -> None:
        """Begin, with the next function that is called."""
        self._before = sys.gettrace()
        sys.settrace(self._enter)

    def stop(self) -> None:
        """End."""
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        label = self._labels.get(frame.f_code)
        if label is not None:
            frame.f_trace_lines = False
            return self._span(label(frame.f_locals), time.perf_counter_ns())
        if frame.f_code.co_filename.startswith("<iris "):
            return self._steps
        if frame.f_code is self._replay:
            plan = frame.f_locals["self"].run.__code__
            self.launched += _kernels(linecache.getlines(plan.co_filename))
        return None

    def _span(self, name: str, start: int) -> Any:
        kind, launched = name.partition(" ")[0], len(self.launched)

        def leave(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "return":
                self._note(name, start, kind)
                if kind == "load":
                    del self.launched[launched:]
            return leave

        return leave

    def _note(self, name: str, start: int, kind: str = "", **args: str) -> None:
        self.events.append(Event(0, name, start, time.perf_counter_ns(), kind=kind, args=args))

    def _steps(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A line of a plan begins, or the plan returns: the step before it is over."""
        if self._step is not None:
            name, line, start = self._step
            self._note(name, start, line=line)
            self._step = None
        if event == "line":
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            found = _parsed(text)
            if found is not None:
                self._step = *found, time.perf_counter_ns()
                if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
                    self.launched += _kernels([text])
        return self._steps


def _parsed(text: str) -> tuple[str, str] | None:
    """Name of a line of a plan, as in the graph, and the user's line."""
    found = _STEP.match(text.strip())
    if found is None:
        return None
    result, op, line = found.groups()
    return f"{op.removesuffix(f'_{result}')} %{result}", line or ""


def _kernels(lines: Sequence[str]) -> list[str]:
    """Names of the lines of a plan that launch a kernel of ours."""
    from iris.lower.sites import MAKERS
    from iris.lower.stages import MATCHERS

    names = [found[0] for line in lines if (found := _parsed(line)) is not None]
    return [name for name in names if name.partition(" ")[0] in {*MAKERS, *MATCHERS}]


def named(kernels: Sequence[Event], launched: Sequence[str]) -> list[Event]:
    """Kernels with the names of the steps that launched them; both in order, the ends together.

    A kernel of iris is one stage, or a collective. Where the two lists do not fit, names stay.
    """
    from iris.lower.stages import MATCHERS

    events = list(kernels)
    ops = [event.name.removesuffix("_kernel") for event in events]
    ours = [place for place, op in enumerate(ops) if op in MATCHERS or op == "exchange"]
    for place, step in zip(reversed(ours), reversed(launched), strict=False):
        op = step.partition(" ")[0]
        if ops[place] not in (op, "exchange"):
            break
        args = {"kernel": events[place].name}
        events[place] = replace(events[place], name=step, kind=op, args=args)
    return events


class Profiler:
    """Records this rank: its host, and on a GPU its kernels; with ``tracing`` what they do inside.

    ``start`` is collective, ``stop`` too with ``tracing``.
    """

    def __init__(self, ctx: Iris | None, tracing: bool = False) -> None:
        self._ctx = ctx
        self._tracing = None if ctx is None or not tracing else ctx.tracing
        self._was_on = self._tracing is not None and self._tracing.enabled
        self._recorder = Recorder()
        self._torch: Any = None

    def start(self) -> None:
        """Begin."""
        if self._tracing is not None and not self._was_on:
            self._tracing.enable()
        if self._ctx is not None and self._ctx.device.type == "cuda":
            from torch.profiler import ProfilerActivity, profile as torch_profile

            with warnings.catch_warnings(action="ignore"):  # of features that are not used here
                self._torch = torch_profile(activities=[ProfilerActivity.CUDA])
                self._torch.start()
        if self._ctx is not None:  # starting torch's profiler can wait for a peer's kernel
            self._ctx.world.sync("iris.profile")
        self._recorder.start()

    def cancel(self) -> None:
        """End, whatever the other ranks do."""
        self._recorder.stop()
        if self._torch is not None:
            with warnings.catch_warnings(action="ignore"):
                self._torch.stop()
        if self._tracing is not None and not self._was_on:
            self._tracing.disable()

    def stop(self) -> Timeline:
        """End, and return this rank's events."""
        self.cancel()
        ctx = self._ctx or current_or_none()
        rank = 0 if ctx is None else ctx.cur_rank
        host = [replace(event, rank=rank) for event in self._recorder.events]
        timeline = Timeline(host + named(self._gpu(rank), self._recorder.launched))
        if self._tracing is not None:
            inside = self._tracing.timeline(merge=False)
            timeline.events += inside.events
            timeline.about |= inside.about
        return timeline

    def _gpu(self, rank: int) -> list[Event]:
        """What torch's profiler saw on the GPU. It gives the time of day."""
        if self._torch is None:
            return []
        shift = time.perf_counter_ns() - time.time_ns()
        rows = sorted(self._torch.profiler.kineto_results.events(), key=lambda row: row.start_ns())
        return [
            Event(rank, row.name(), row.start_ns() + shift, row.end_ns() + shift, KERNELS)
            for row in rows
            if row.device_type().name == "CUDA"
        ]


@contextmanager
def profile(
    path: str | os.PathLike[str] | None = None, *, tracing: bool = False
) -> Iterator[Timeline]:
    """Record what all ranks do until the ``with`` block ends; or a function, as its decorator.

    On the host of each rank: tracing, planning, capturing and calling programs, the steps of a plan
    that runs line by line, and every wait for peers; on a GPU its kernels. Names are those of the
    graph. With ``tracing`` also what kernels of programs do inside, on every SM, which compiles
    them once more (see ``ctx.tracing``). Collective. The result is the same on all ranks; rank 0
    writes it to ``path``, if that is given. Where the block fails, it holds nothing.

    The record itself takes time: a Python function that is called takes 0.3 us longer.

    Example::

        with iris.profile("trace.json") as timeline:     # for ui.perfetto.dev
            y = mlp(x, w_up, w_down)
        timeline.plot()                                  # for a notebook

        @iris.profile("step.json")
        def step(x): ...
    """
    timeline = Timeline()
    profiler = Profiler(current_or_none(), tracing)
    profiler.start()
    try:
        yield timeline
    except BaseException:
        profiler.cancel()
        raise
    mine, ctx = profiler.stop(), current_or_none()
    parts = [mine] if ctx is None else ctx.world.exchange_object("iris.profile", mine)
    timeline.events += [event for part in parts for event in part.events]
    timeline.about |= mine.about
    if path is not None and (ctx is None or ctx.cur_rank == 0):
        timeline.save(path)
