"""A plan cut at the steps that a CUDA graph cannot hold.

Those are steps in which ranks meet on the host, which read or make a tensor on the CPU, or which
wait for the GPU in some torch op: torch's own sync debug mode tells in the first call.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from types import FrameType
from typing import Any

import torch

from iris.lower.program import Executable, Part, Step

SYNCHRONIZING = "called a synchronizing CUDA operation"


@dataclass(frozen=True)
class Piece:
    """Steps in a row that are all on the host, or none."""

    part: Part
    on_host: bool


def cut(executable: Executable, on_host: Iterable[int]) -> list[Piece]:
    """The plan in as few pieces as there can be, if the steps ``on_host`` are apart."""
    host = set(on_host)
    pieces = []
    for apart, numbers in groupby(range(len(executable.steps)), host.__contains__):
        run = list(numbers)
        pieces.append(Piece(executable.part(run[0], run[-1] + 1), apart))
    return pieces


def host_steps(steps: Sequence[Step], on_cpu: Iterable[str]) -> dict[int, str]:
    """Steps that a graph cannot hold, and why, as far as the plan tells. ``on_cpu`` are inputs."""
    cpu, found = set(on_cpu), {}
    for number, step in enumerate(steps):
        reads = [name in cpu for name in step.uses]
        if step.device == "cpu" or (reads and all(reads) and not step.device):
            cpu.update(step.makes)
        if step.on_host:
            found[number] = step.on_host
        elif any(reads) or not cpu.isdisjoint(step.makes):
            found[number] = "reads or makes a tensor on the CPU"
    return found


@contextmanager
def waits_noticed(executable: Executable) -> Iterator[dict[int, str]]:
    """The steps that wait for the GPU while the plan runs in here, and why they are on the host."""
    found: dict[int, str] = {}
    filename = executable.run.__code__.co_filename
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{SYNCHRONIZING}")
        shown = warnings.showwarning

        def note(message: Any, *rest: Any, **named: Any) -> None:
            line = _line_in(filename, sys._getframe(1))
            if SYNCHRONIZING not in str(message):
                shown(message, *rest, **named)
            elif line is not None:
                found[line - 2] = "waits for the GPU on the host"

        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _line_in(filename: str, frame: FrameType | None) -> int | None:
    """The line of ``filename`` that is being run."""
    while frame is not None and frame.f_code.co_filename != filename:
        frame = frame.f_back
    return None if frame is None else frame.f_lineno


def run_pieces(
    executable: Executable,
    calls: Sequence[tuple[Part, Callable[[Sequence[Any]], Sequence[Any]]]],
    inputs: Sequence[Any],
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Run parts one after the other; the plan's result, and every value by name."""
    known = dict(zip(executable.inputs, inputs, strict=True))
    for part, call in calls:
        values = call([known[name] for name in part.uses])
        known.update(zip(part.makes, values, strict=True))
    result = executable.result
    return result.run(*(known[name] for name in result.uses)), known
