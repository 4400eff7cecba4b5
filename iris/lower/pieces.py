"""A plan cut at the steps that a CUDA graph cannot hold.

Those are steps in which ranks meet on the host, which read or make a tensor on the CPU, or which
wait for the GPU in some torch op: torch's own sync debug mode tells in the first call.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
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


def run_noticing(
    executable: Executable, inputs: Sequence[Any], on_host: Iterable[int]
) -> tuple[tuple[Any, ...], dict[int, str]]:
    """Run the plan on a GPU: its result, and the steps not ``on_host`` that wait for the GPU."""
    known: set[int] = {i for i, step in enumerate(executable.steps) if step.once}.union(on_host)
    found: dict[int, str] = {}
    mode = torch.cuda.get_sync_debug_mode()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]

    def step(number: int, run: Callable[[], None]) -> None:
        torch.cuda.set_sync_debug_mode(mode if number in known else "error")
        drawn = generator.get_offset()
        try:
            run()
        except RuntimeError as error:
            if SYNCHRONIZING not in str(error):
                raise
            found[number] = "waits for the GPU on the host"
            torch.cuda.set_sync_debug_mode(mode)
            generator.set_offset(drawn)  # the numbers that it drew before it waited
            run()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        try:
            return executable.run_steps(inputs, step), found
        finally:
            torch.cuda.set_sync_debug_mode(mode)


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
