"""Whole models: decode and prefill by iris, by torch's symmetric memory, and by one rank alone.

Times are microseconds a step: tokens a second are the rows M over it. Every rank's weights are made
where they are. The peers are cuBLAS and torch's one-shot and two-shot all-reduce, its products
fused with collectives, and cuBLAS with its collectives by copies, each in one CUDA graph a step.
The reference is torch.compile on one rank with all the weights and the same share of the GPU,
which has nobody to wait for: ranks compile it for different models at once, and are timed in turn.
"""

import gc
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import iris
from iris.bench.decoder import SHAPES, Decoder, Inputs, Place, Shape, nbytes, program
from iris.bench.peers import symmetric
from iris.bench.timing import Row, Time, agreed, capture, every, paced, shuffled
from iris.bench.torch_decoder import Peer, is_close, ways
from iris.lower.memory import memory_of

BATCHES = (1, 16, 64)
PREFILLS = (512, 2048, 4096)
HELD = 512  # rows in the cache of a decode step, which has room for twice as many
REFERENCE = "one rank, compiled"
REFERENCE_SECONDS = 60  # then no rank compiles one more point for the reference

Step = Callable[[], Any]


@dataclass(frozen=True)
class Point:
    """What one step works on."""

    model: str
    batch: int
    rows: int
    held: int

    @property
    def kind(self) -> str:
        """A word of titles."""
        return "decode" if self.held else "prefill"

    @property
    def label(self) -> dict[str, Any]:
        """The point of a row: M is how many rows there are in all."""
        return {"model": self.model, "batch": self.batch, "M": self.batch * self.rows}

    def inputs(self, place: Place) -> Inputs:
        """Random ones, on this rank."""
        shape = SHAPES[self.model]
        return Inputs.of(shape, place, self.batch, self.rows, self.held, shape.layers)

    @classmethod
    def of(cls, model: str) -> "list[Point]":
        """All of a model."""
        decode = [cls(model, batch, 1, HELD) for batch in BATCHES]
        return decode + [cls(model, 1, rows, 0) for rows in PREFILLS]


def measure(args: Namespace) -> Iterator[Row]:
    """All points of all models; runs on every rank."""
    align = symmetric(64)[1].barrier
    for name in args.models:
        place = Place.here()
        model = Decoder(SHAPES[name], place)
        yield from _weights(name, model, SHAPES[name], place)
        for point in Point.of(name):
            with torch.no_grad():
                yield from _point(point, model, place, align)
        del model
        torch.cuda.empty_cache()
    yield from _reference(args.models, time.perf_counter() + REFERENCE_SECONDS)


def _weights(name: str, model: Decoder, shape: Shape, place: Place) -> Iterator[Row]:
    """This rank's weights beside an even share of the model's; both in MB."""
    part = shape.heads * shape.width * 2 + shape.kv_heads * shape.width * 2
    layer = shape.hidden * (part + 3 * shape.inner)
    whole = shape.layers * layer + 2 * shape.words * shape.hidden
    yield _size("weights", {"model": name}, "iris", nbytes(model))
    yield _size("weights", {"model": name}, "even share", whole * 2 / place.size)


def _size(table: str, point: dict[str, Any], name: str, size: float) -> Row:
    """A number of bytes on the rank that has most."""
    return Row(table, point, name, agreed([size / 1e6] * 2), unit="MB")


def _point(
    point: Point, model: Decoder, place: Place, align: Callable[[], object]
) -> Iterator[Row]:
    inputs, label = point.inputs(place), point.label
    rows, hidden = label["M"], SHAPES[point.model].hidden
    want = Peer(model, place, "exact", rows, hidden)(*inputs.args)[0]
    ready: dict[str, Ready] = {}
    before, started = _allocated(), time.perf_counter()
    made: list[Any] = []

    def ours() -> Step:
        made[:] = [program(model, inputs)]
        return served(made[0], inputs.x, inputs)

    ready["iris"] = Ready.by("iris", ours, want)
    yield _first(point, "iris", started)
    taken = torch.cuda.max_memory_allocated() - before
    yield from _memory(point, model, inputs, made[0], taken)
    for how in ways(rows, place.size):
        started, peer = time.perf_counter(), Peer(model, place, how, rows, hidden)
        name = f"torch {how}"
        ready[name] = Ready.by(name, partial(captured, peer, inputs), want)
        yield _first(point, name, started)
    yield from timed(f"{point.kind} step", label, ready, align)


def _allocated() -> int:
    """Bytes beside the heap; the most of them is counted from now on."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _first(point: Point, name: str, started: float) -> Row:
    """The time from nothing to the first result: tracing, compiling, capturing."""
    spent = agreed([(time.perf_counter() - started) * 1e6] * 2)
    return Row(f"time to first {point.kind}", point.label, name, spent)


def _memory(point: Point, model: Decoder, inputs: Inputs, step: Any, taken: int) -> Iterator[Row]:
    """The most that a rank used for the program, with its weights, its cache and its workspace on
    the heap, beside what was planned.
    """
    plan = memory_of(step.programs[-1].executable)
    held = nbytes(model) + (0 if inputs.past is None else inputs.past.nbytes) + plan.heap
    table = f"memory, {point.kind}"
    yield _size(table, point.label, "iris", held + taken)
    yield _size(table, point.label, "shard and plan", held + plan.local)


@dataclass(frozen=True)
class Ready:
    """A contestant at one point: its captured step, and whether its result was right."""

    step: Step
    right: bool

    @classmethod
    def by(cls, name: str, make: Callable[[], Step], want: Tensor) -> "Ready":
        """The step that ``make`` gives, made again with cublasLt where it is not ``want`` with
        cuBLAS, which is wrong in some shares of a GPU. Collective.
        """
        prefer = torch.backends.cuda.preferred_blas_library
        for library in ("cublas", "cublaslt"):
            prefer(library)
            step = make()
            ready = cls(step, all(every(is_close(step()[0], want))))
            if ready.right:
                break
            warnings.warn(f"{name} is wrong by {library}", stacklevel=2)
        prefer("cublas")
        return ready


def timed(
    table: str, label: dict[str, Any], ready: dict[str, Ready], align: Callable[[], object]
) -> Iterator[Row]:
    """The times of contestants in shuffled turns."""
    steps = {name: one.step for name, one in shuffled(ready, label["M"]).items()}
    for name, spent in paced(steps, align).items():
        yield Row(table, label, name, spent, ready[name].right)


def served(step: Callable[..., Any], x: Tensor, inputs: Inputs) -> Callable[[], Any]:
    """A program's step as a server runs it: traced, captured, its cache written outside."""
    rest = inputs.args[1:]
    for _ in range(3):
        step(x, *rest)

    def run() -> Any:
        y, new = step(x, *rest)
        if inputs.past is not None:
            inputs.past[..., HELD : HELD + 1, :] = new
        return y, new

    return run


def captured(peer: Peer, inputs: Inputs) -> Callable[[], Any]:
    """A peer's step, its cache written too, in one CUDA graph."""
    kept: list[tuple[Tensor, Tensor]] = []

    def step(_: int) -> None:
        logits, new = peer(*inputs.args)
        if inputs.past is not None:
            inputs.past[..., HELD : HELD + 1, :] = new
        kept[:] = [(logits, new)]

    graph = capture(step, 1)

    def run() -> Any:
        graph.replay()
        return kept[0]

    return run


def _reference(models: list[str], until: float) -> Iterator[Row]:
    """The whole models on one rank each, compiled by torch."""
    tasks = [point for name in models for point in Point.of(name)]
    kinds = list(dict.fromkeys((point.model, point.kind) for point in tasks))
    owners = {kind: number % dist.get_world_size() for number, kind in enumerate(kinds)}
    mine = [p for p in tasks if owners[p.model, p.kind] == dist.get_rank()]
    steps = _compiled(mine, until)
    dist.barrier()
    for point in tasks:
        box = [_alone(point, *steps[point]) if point in steps else []]
        dist.broadcast_object_list(box, owners[point.model, point.kind])
        yield from box[0]


def _compiled(points: list[Point], until: float) -> dict[Point, tuple[Step, float]]:
    """Each point's captured step, and the seconds that it took to make."""
    made = {}
    place = Place(0, 1, iris.current().device, torch.bfloat16)
    for name in dict.fromkeys(point.model for point in points):
        peer = Peer(Decoder(SHAPES[name], place), place, "alone", 0, 0)
        step = torch.compile(peer.__call__, dynamic=True)
        for point in points:
            if point.model == name and time.perf_counter() < until:
                inputs, started = point.inputs(place), time.perf_counter()
                made[point] = _captured_alone(step, inputs), time.perf_counter() - started
    return made


@torch.no_grad()
def _captured_alone(step: Callable[..., Any], inputs: Inputs) -> Step:
    """A step that waits for nobody; it keeps what its graph reads."""
    for _ in range(2):
        step(*inputs.args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step(*inputs.args)

    def run() -> tuple[Any, Inputs]:
        graph.replay()
        return step, inputs

    run()
    torch.cuda.synchronize()
    return run


def _alone(point: Point, step: Step, seconds: float) -> list[Row]:
    """How long one rank took to make the step, and takes for it."""
    times = []
    for _ in range(9):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * float(start.elapsed_time(stop)))
    times.sort()
    first, spent = Time(*3 * (seconds * 1e6,)), Time(times[4], times[1], times[7])
    return [
        Row(f"time to first {point.kind}", point.label, REFERENCE, first),
        Row(f"{point.kind} step", point.label, REFERENCE, spent),
    ]
