"""What a stage does on every SM: waits, copies and tiles, as a trace, a picture and a table.

python -m iris.bench.timeline matmul_reduce_scatter --ranks 4 --model 8B --rows 512
"""

import argparse
import datetime
import platform
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import iris
from iris.bench.decoder import SHAPES
from iris.bench.mps import private_daemon, share_of
from iris.bench.timing import Call, rotated, time_graphs
from iris.errors import UnsupportedError
from iris.runtime.timeline import Timeline

MODELS = {name: (shape.hidden, shape.inner) for name, shape in SHAPES.items()} | {"tiny": (64, 256)}
STAGES = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather")
KINDS = ("push", "wait", "tile", "emit", "sum", "collect")
LAUNCHES = 2


def _calls(ctx: iris.Iris, name: str, M: int, hidden: int, inner: int) -> tuple[Any, Call, Call]:
    """A stage's ``warm``, launch number i of it, and of the product alone; random operands."""
    from iris.lower.kernels.all_gather_matmul import AllGatherMatmul
    from iris.lower.kernels.host import rows_of
    from iris.lower.kernels.matmul_all_gather import MatmulAllGather
    from iris.lower.kernels.matmul_all_reduce import MatmulAllReduce
    from iris.lower.kernels.matmul_reduce_scatter import MatmulReduceScatter

    makers = (AllGatherMatmul, MatmulReduceScatter, MatmulAllReduce, MatmulAllGather)
    gathers, by_rows = name == "all_gather_matmul", name in (STAGES[0], STAGES[3])
    world, on_gpu = ctx.num_ranks, ctx.device.type == "cuda"
    mine = rows_of(M, world, ctx.cur_rank)
    K, N = (hidden, inner // world) if by_rows else (inner // world, hidden)
    kind = {"device": ctx.device, "dtype": torch.bfloat16 if on_gpu else torch.float32}
    x, w = torch.randn(mine if by_rows else M, K, **kind), torch.randn(N, K, **kind)  # type: ignore[call-overload]
    copies = rotated(x, w) if on_gpu else [(x, w)]
    out = x.new_empty(mine if name == STAGES[1] else M, N)
    whole = torch.randn(M, K, **kind) if gathers else x  # type: ignore[call-overload]
    size: dict[str, Any] = {"columns": [N]} if gathers else {"N": N}
    maker: Any = dict(zip(STAGES, makers, strict=True))[name]
    stage = maker.create(ctx, ctx.world, M=M, K=K, dtype=x.dtype, **size)

    def operands(i: int) -> tuple[Tensor, Any]:
        x, w = copies[i % len(copies)]
        return x, [w.T] if gathers else w.T

    def launch(i: int) -> None:
        stage(*operands(i), out=[out] if gathers else out)

    def product(i: int) -> Any:
        return whole @ copies[i % len(copies)][1].T

    return lambda: stage.warm(*operands(0), out=[out] if gathers else out), launch, product


def measure(name: str, size: tuple[int, int, int]) -> Timeline:
    """One rank: a few launches of the stage, recorded; on a GPU also their times."""
    ctx = iris.iris(4 << 30 if torch.cuda.is_available() else 1 << 26)
    on_gpu = ctx.device.type == "cuda"
    warm, launch, product = _calls(ctx, name, *size)
    times: dict[str, Any] = {}

    def prepare() -> None:
        """Load the kernel on all ranks, then let it run twice."""
        warm()
        for _ in range(3):
            ctx.barrier()
            launch(0)

    def launch_all() -> None:
        for i in range(LAUNCHES):
            launch(i)

    prepare()
    if on_gpu:
        times |= _times(ctx, {"gemm": product, "iris": launch})
    ctx.tracing.enable()
    prepare()
    run: Callable[[], Any] = launch_all
    if on_gpu:
        times |= _times(ctx, {"iris recorded": launch})
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch_all()
        ctx.barrier()
        graph.replay()
        run = graph.replay
    ctx.tracing.reset()
    ctx.barrier()
    ctx.device_barrier()
    run()
    timeline = ctx.tracing.timeline()
    timeline.about |= {
        "stage": name,
        "M, hidden, inner": size,
        "launches": LAUNCHES,
        "times_us": times,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU, Triton's interpreter",
        "multiprocessors": ctx.get_cu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return timeline


def _times(ctx: iris.Iris, calls: dict[str, Call]) -> dict[str, float]:
    """Median microseconds of a call on the slowest rank, inside CUDA graphs."""
    return {name: time.median for name, time in time_graphs(calls, ctx.device_barrier).items()}


def table(timeline: Timeline) -> Table:
    """For each rank, microseconds a launch that an SM spends in each kind of event, on average."""
    about = timeline.about
    kinds = [kind for kind in KINDS if any(event.kind == kind for event in timeline.events)]
    found = Table(title=f"{about['stage']} {tuple(about['M, hidden, inner'])}, µs a launch")
    for head in ("rank", "from first to last", *kinds):
        found.add_column(head, justify="right")
    spent = {kind: timeline.busy(kind) for kind in kinds}
    for rank in dict.fromkeys(rank for rank, _ in timeline.tracks()):
        events = [event for event in timeline.events if event.rank == rank]
        whole = max(e.end for e in events) - min(e.start for e in events)
        cells = [whole / 1e3, *(spent[kind][rank] for kind in kinds)]
        found.add_row(str(rank), *(f"{cell / about['launches']:.1f}" for cell in cells))
    found.caption = "sum and collect include their waits; emit includes stores to peers"
    return found


def _draw(path: Path) -> str:
    """Draw a trace, in a file beside its own."""
    picture = path.with_name(f"{path.name.partition('.json')[0]}.png")
    try:
        Timeline.load(path).plot().savefig(picture, dpi=150)
    except UnsupportedError as error:
        return f"no picture: {error}"
    return f"saved {picture}"


def _arguments(argv: Sequence[str] | None) -> Namespace:
    first, _, example = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser("python -m iris.bench.timeline", None, first, example)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("stages", nargs="*", metavar="stage", help=", ".join(STAGES))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", choices=MODELS, default="8B" if on_gpu else "tiny")
    parser.add_argument("--rows", type=int, default=512 if on_gpu else 64)
    parser.add_argument("--results", type=Path, default=Path("."), help="folder for what is saved")
    parser.add_argument("--draw", type=Path, nargs="+", default=(), help="traces to draw instead")
    args = parser.parse_args(argv)
    wrong = [name for name in args.stages if name not in STAGES]
    if wrong or not (args.stages or args.draw):
        parser.error(f"stages are: {', '.join(STAGES)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Start the ranks, under an MPS daemon of our own if they share a GPU; print and save."""
    args, console = _arguments(argv), Console()
    for path in args.draw:
        console.print(_draw(path))
    shared = args.ranks > torch.cuda.device_count() > 0
    env = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share_of(args.ranks))} if shared else {}
    args.results.mkdir(parents=True, exist_ok=True)
    with private_daemon(shared) as mps:
        for name in args.stages:
            size = (args.rows, *MODELS[args.model])
            timeline = iris.launch(measure, args.ranks, name, size, timeout=300, env=env | mps)[0]
            device = timeline.about["device"].partition(",")[0].replace(" ", "-")
            stem = f"{timeline.about['date'][:10]}-timeline-{name}-M{args.rows}-{device}"
            path = args.results / f"{stem}-W{args.ranks}.json.gz"
            timeline.save(path)
            console.print(table(timeline))
            for contestant, time in timeline.about["times_us"].items():
                console.print(f"{contestant}: {time:.1f} µs")
            console.print(f"saved {path}, for ui.perfetto.dev\n{_draw(path)}", soft_wrap=True)


if __name__ == "__main__":
    main()
