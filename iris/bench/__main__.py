"""``python -m iris.bench stages --ranks 4``: measure the fused stages beside their peers."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import iris
from iris.bench.mps import private_daemon, share_of
from iris.bench.stages import HEAP, MODELS, STAGES

TORCH_ENV = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def _worker(
    stages: Sequence[str], models: Sequence[str], rows: Sequence[int]
) -> tuple[list[Any], dict[str, Any]]:
    """One rank: all rows, and the conditions they were measured under."""
    from iris.bench.report import conditions
    from iris.bench.stages import measure

    ctx = iris.iris(HEAP)
    percent = int(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
    return list(measure(stages, models, rows)), conditions(ctx.num_ranks, percent)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m iris.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    stages = commands.add_parser("stages", help="fused stages beside cuBLAS and torch")
    stages.add_argument("--ranks", type=int, default=4)
    stages.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    stages.add_argument("--models", nargs="+", choices=MODELS, default=["8B", "70B"])
    stages.add_argument("--rows", nargs="+", type=int, default=[64, 512, 2048, 4096])
    stages.add_argument("--timeout", type=float, default=600)
    stages.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Start the ranks, under an MPS daemon of our own if they share a GPU; print and save."""
    args = _arguments(argv)
    import torch
    from rich.console import Console

    from iris.bench.report import save, show

    console = Console()
    shared = args.ranks > torch.cuda.device_count()
    env = dict(TORCH_ENV)
    if shared:
        env["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(share_of(args.ranks))
        console.print(f"{args.ranks} ranks share a GPU: {share_of(args.ranks)}% of it each (MPS)")
    with private_daemon(shared) as mps:
        work = (args.stages, args.models, args.rows)
        results = iris.launch(_worker, args.ranks, *work, timeout=args.timeout, env=env | mps)
    rows, about = results[0]
    show(rows, console)
    console.print(f"saved {save(rows, about, args.results)}")


if __name__ == "__main__":
    main()
