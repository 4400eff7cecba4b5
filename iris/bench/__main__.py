"""Measure iris beside its peers, in the same processes and the same run.

python -m iris.bench stages barrier --ranks 4 --models 8B --rows 64 2048
"""

import argparse
import importlib
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import iris
from iris.bench.mps import private_daemon, share_of
from iris.errors import UnsupportedError

# What is measured, by the module that does it: ``measure(args)`` runs on every rank and yields
# the same rows there.
COMMANDS = {
    "profile": "what a rank has of its GPU, kept for the cost model",
    "stages": "fused stages beside cuBLAS and torch",
    "layer": "one whole layer beside plain torch over symmetric memory",
    "model": "decode and prefill of whole models, beside plain torch and one compiled rank",
    "barrier": "the device barrier beside torch's",
    "gemm": "the GEMM loop of the stages beside cuBLAS",
    "copies": "the copy engine's puts, by the host and by kernels, beside a kernel that stores",
    "replay": "the host's time for a call beside a bare graph launch and torch.compile",
}
MODELS = ("8B", "70B", "32B")
STAGES = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
HEAP = 4 << 30
# Torch warns of every operand of its operators that is not in symmetric memory.
ENV = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _worker(args: Namespace) -> tuple[list[Any], dict[str, Any], Path]:
    """One rank: all rows, the conditions they were measured under, and where they are saved.

    The first rank shows and saves each as it comes, so that a run that is cut short is not lost.
    """
    from rich.console import Console

    from iris.bench.report import conditions, save

    ctx = iris.iris(HEAP, engines=("sdma",) if "copies" in args.commands else ())
    about = conditions(ctx.num_ranks, share_of(ctx.num_ranks) if args.shared else 100)
    gpu = about["gpu"].replace(" ", "-")
    name = f"{about['date'][:10]}-{'-'.join(args.commands)}-{gpu}-W{ctx.num_ranks}.json"
    path = args.results.resolve() / name
    console = Console(stderr=True)
    rows: list[Any] = []
    began = time.perf_counter()
    for command in args.commands:
        for row in importlib.import_module(f"iris.bench.{command}").measure(args):
            rows.append(row)
            if ctx.cur_rank == 0:
                mark = "" if row.right else "  wrong"
                figure = f"{row.time.median:.1f} {row.unit}{mark}"
                at = f"{time.perf_counter() - began:4.0f} s "
                console.print(f"{at} {row.table} {row.point} {row.name}: {figure}")
                save(rows, about, path)
    return rows, about, path


def _arguments(argv: Sequence[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m iris.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name}: {what}" for name, what in COMMANDS.items()),
    )
    parser.add_argument("commands", nargs="+", choices=COMMANDS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["8B", "70B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 512, 2048, 4096])
    parser.add_argument("--timeout", type=float, default=600, help="seconds for all of it")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Start the ranks, under an MPS daemon of our own if they share a GPU; print and save."""
    args = _arguments(argv)
    import torch
    from rich.console import Console

    from iris.bench.report import plot, show

    console = Console()
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "iris.bench measures ranks on GPUs, and torch finds none",
            help="python -m iris.bench.timeline works on CPU ranks too",
        )
    args.shared = args.ranks > torch.cuda.device_count()
    os.environ.update(ENV)  # ranks are forked from a process that has imported torch
    env: dict[str, str] = {}
    if args.shared:
        env["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(share_of(args.ranks))
        console.print(f"{args.ranks} ranks share a GPU: {share_of(args.ranks)}% of it each (MPS)")
    with private_daemon(args.shared) as mps:
        results = iris.launch(_worker, args.ranks, args, timeout=args.timeout, env=env | mps)
    rows, about, path = results[0]
    show(rows, console)
    plot(rows, about, path.with_suffix(".png"))
    console.print(f"saved {path}")


if __name__ == "__main__":
    main()
