"""Whole models: decode and prefill by iris, by torch's symmetric memory, and by one rank alone.

Times are microseconds a step: tokens a second are the batch (or the rows) over it. Every rank's
weights are made where they are; sums of the peers are torch's one-shot and two-shot all-reduce, and
their products cuBLAS, in one CUDA graph a step. The reference is torch.compile on one rank with all
the weights and the same share of the GPU, which has nobody to wait for.
"""

import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import iris
from iris.bench.decoder import (
    SHAPES,
    Decoder,
    Inputs,
    Peer,
    Place,
    Shape,
    is_close,
    nbytes,
    program,
)
from iris.bench.peers import symmetric
from iris.bench.timing import Row, Time, agreed, capture, paced

BATCHES = (1, 16, 64)
PREFILLS = (512, 2048, 4096)
HELD = 512  # rows in the cache of a decode step, which has room for twice as many
REFERENCE_SECONDS = 100  # of a model; the reference starts no more points after that


def measure(args: Namespace) -> Iterator[Row]:
    """All points of all models; runs on every rank."""
    began, align = time.perf_counter(), symmetric(64)[1].barrier
    for number, name in enumerate(args.models):
        shape, place = SHAPES[name], Place.here()
        model = Decoder(shape, place)
        yield from _memory(name, model, shape, place)
        points = [(batch, 1, HELD) for batch in BATCHES] + [(1, rows, 0) for rows in PREFILLS]
        for batch, rows, held in points:
            inputs = Inputs.of(shape, place, batch, rows, held, shape.layers)
            kind = "decode" if held else "prefill"
            point = {"model": name, "batch": batch, "M": batch * rows}
            yield from _point(kind, point, model, place, inputs, shape, align)
        del model
        yield from _reference(name, shape, points, began + (number + 1) * REFERENCE_SECONDS)
        torch.cuda.empty_cache()


def _memory(name: str, model: Decoder, shape: Shape, place: Place) -> Iterator[Row]:
    """This rank's weights beside an even share of the model's; both in MB."""
    part = shape.heads * shape.width * 2 + shape.kv_heads * shape.width * 2
    layer = shape.hidden * (part + 3 * shape.inner)
    whole = shape.layers * layer + 2 * shape.words * shape.hidden
    for label, size in (("iris", nbytes(model)), ("even share", whole * 2 / place.size)):
        figure = size / 1e6
        yield Row("weights", {"model": name}, label, Time(*3 * (figure,)), unit="MB")


def _peak(kind: str, point: dict[str, Any], model: Decoder, inputs: Inputs) -> Iterator[Row]:
    """The most that was allocated beside the heap on any rank, and what of it was there before."""
    held = nbytes(model) + (0 if inputs.past is None else inputs.past.nbytes)
    for label, size in (
        ("iris", torch.cuda.max_memory_allocated()),
        ("weights and cache", held),
    ):
        figure = agreed([size / 1e6] * 2)
        yield Row(f"memory beside the heap, {kind}", point, label, figure, unit="MB")


def _point(
    kind: str,
    point: dict[str, Any],
    model: Decoder,
    place: Place,
    inputs: Inputs,
    shape: Shape,
    align: Callable[[], object],
) -> Iterator[Row]:
    rows = inputs.x.numel()
    with torch.no_grad():
        want = Peer(model, place, "exact", rows, shape.hidden)(*inputs.args)[0]
        steps: dict[str, Callable[[], Any]] = {}
        right: dict[str, bool] = {}
        for name in ("iris", "torch one-shot", "torch two-shot"):
            if name == "torch one-shot" and rows > 512:  # W times the traffic: not for many rows
                continue
            started = time.perf_counter()
            if name == "iris":
                torch.cuda.reset_peak_memory_stats()
                steps[name] = served(program(model, inputs), inputs.x, inputs)
                yield from _peak(kind, point, model, inputs)
            else:
                peer = Peer(model, place, name.partition(" ")[2], rows, shape.hidden)
                steps[name] = captured(peer, inputs)
            first = steps[name]()[0]
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            ready = agreed([seconds * 1e6] * 2)
            yield Row(f"time to first {kind}", point, name, ready, unit="µs")
            right[name] = agree(is_close(first, want))
        names = list(steps)
        random.Random(rows).shuffle(names)
        for name, spent in paced({n: steps[n] for n in names}, align).items():
            yield Row(f"{kind} step", point, name, spent, right[name])


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


def _reference(
    name: str, shape: Shape, points: list[tuple[int, int, int]], until: float
) -> Iterator[Row]:
    """The whole model on one rank, compiled by torch; the other ranks wait for each figure."""
    rows = _compiled(name, shape, points, until) if dist.get_rank() == 0 else None
    while True:
        box = [next(rows, None) if rows is not None else None]
        dist.broadcast_object_list(box, 0)
        if box[0] is None:
            return
        yield box[0]


def _compiled(
    name: str, shape: Shape, points: list[tuple[int, int, int]], until: float
) -> Iterator[Row]:
    place = Place(0, 1, iris.current().device, torch.bfloat16)
    model = Decoder(shape, place)
    peer = torch.compile(Peer(model, place, "alone", 0, 0).__call__, dynamic=True)
    for batch, count, held in points:
        if time.perf_counter() > until:
            return
        inputs = Inputs.of(shape, place, batch, count, held, shape.layers)
        point = {"model": name, "batch": batch, "M": batch * count}
        kind = "decode step" if held else "prefill step"
        with torch.no_grad():
            yield Row(kind, point, "one rank, compiled", _alone(peer, inputs))


def _alone(step: Callable[..., Any], inputs: Inputs) -> Time:
    """The time of a step that waits for nobody."""
    for _ in range(2):
        step(*inputs.args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        step(*inputs.args)
    times = []
    for _ in range(9):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * float(start.elapsed_time(stop)))
    times.sort()
    return Time(times[4], times[1], times[7])


def agree(answer: bool) -> bool:
    """Whether every rank says yes. Collective."""
    answers = [answer] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return all(answers)
