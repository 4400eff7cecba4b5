"""Tokens a second of SmolLM2-135M on CPU ranks: iris beside transformers' own tensor parallelism.

``python benchmarks/generate.py --ranks 2 3 4``: transformers on one process, transformers with
``tp_plan="auto"`` over gloo, and iris, one thread a rank, greedy, in one run. Each generates twice;
the second time counts, and the pace is that of the median step. All must say the same.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import iris
from iris.errors import LaunchError
from iris.generate import models
from iris.generate.worker import HEAP, Streamer

PROMPT = "Tell me a story about four ranks and one matrix."
TIMEOUT = 150


def measure(model: Any, prompt: list[int], tokens: int) -> tuple[list[int], float, float]:
    """Tokens, seconds to the first, and steps a second, of the second of two greedy runs."""
    ids = torch.tensor([prompt])
    for _ in range(2):
        streamer = Streamer(lambda _: "", lambda _: None)
        start = time.perf_counter()
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            streamer=streamer,
        )
    times = streamer.times
    steps = [after - before for before, after in pairwise(times)]
    return streamer.tokens, times[0] - start, 1 / statistics.median(steps)


def with_iris(model: models.Model, prompt: list[int], tokens: int) -> Any:
    """Run on every rank."""
    with iris.iris(HEAP):
        torch.set_num_threads(1)
        return measure(model.build(), prompt, tokens)


def with_transformers(folder: Path, prompt: list[int], tokens: int) -> Any:
    """Run on every rank, or on one process."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    size, plan = int(os.environ["WORLD_SIZE"]), {}
    if size > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting{size}",
            rank=int(os.environ["RANK"]),
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT),
        )
        plan = {"tp_plan": "auto"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plan)
    result = measure(model.eval(), prompt, tokens)
    if size > 1:
        torch.distributed.destroy_process_group()
    return result


def save(model: models.Model, folder: Path) -> None:
    """The whole model as a folder that transformers reads."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    for name, value in whole.named_parameters():
        if name in model.weights:
            value.data.copy_(model.weights[name][:])
    whole.save_pretrained(folder)


def reason_of(error: LaunchError) -> str:
    """The first rank's error that is not gloo's about another rank being gone."""
    heads = [line for line in str(error).splitlines() if line.startswith("--- rank")]
    return next((line for line in heads if "gloo" not in line), heads[0]).partition(": ")[2]


def main() -> int:
    """Measure and show. Return 0 if all say the same tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[3])
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    console, said = Console(), []
    model, encode = models.load("smollm2")
    prompt = encode(PROMPT)
    table = Table("what", "ranks", "first token, ms", "tokens/s")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(model, folder)
        runs: list[tuple[str, int, Callable[..., Any], Any]] = [
            ("transformers", 1, with_transformers, folder),
        ]
        for ranks in options.ranks:
            runs += [
                ('transformers, tp_plan="auto", gloo', ranks, with_transformers, folder),
                ("iris", ranks, with_iris, model),
            ]
        for what, ranks, run, source in runs:
            try:
                results = iris.launch(run, ranks, source, prompt, options.tokens, timeout=TIMEOUT)
            except LaunchError as error:
                table.add_row(what, str(ranks), "", escape(f"fails: {reason_of(error)}"))
                continue
            _, first, pace = results[0]
            said += [result[0] for result in results]
            table.add_row(what, str(ranks), f"{first * 1e3:.0f}", f"{pace:.1f}")
    console.print(table)
    same = all(tokens == said[0] for tokens in said)
    console.print("all say the same" if same else "they say different things")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
