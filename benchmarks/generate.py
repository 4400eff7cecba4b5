"""Tokens a second of SmolLM2-135M on CPU ranks: iris beside transformers' own tensor parallelism.

``python benchmarks/generate.py --ranks 2 3 4``: transformers on one process, transformers with
``tp_plan="auto"`` over gloo, and iris, one thread a rank, greedy, in one run. They take turns, for
some rounds; each generates twice, and the second time counts. A pace is that of the median step,
and what is shown the median of the rounds. All must say the same. Transformers needs the package
accelerate for its tensor parallelism.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
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
        streamer = Streamer(lambda _: "", lambda _: None)  # writes nothing, notes the times
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
    return streamer.tokens[0], times[0] - start, 1 / statistics.median(steps)


def with_iris(model: models.Model, prompt: list[int], tokens: int) -> Any:
    """Run on every rank."""
    with iris.iris(HEAP):
        torch.set_num_threads(1)
        return measure(model.build(), prompt, tokens)


def with_transformers(source: tuple[Path, int], prompt: list[int], tokens: int) -> Any:
    """Run on every rank, or on one process. ``source``: a folder, and the number of this run."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder, number = source
    size, plan = int(os.environ["WORLD_SIZE"]), {}
    if size > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting{number}",
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
    """The first rank's error that is not about another rank being gone."""
    heads = [line for line in str(error).splitlines() if line.startswith("--- rank")]
    own = (line for line in heads if "gloo" not in line and "still running" not in line)
    return next(own, heads[0]).partition(": ")[2]


def main() -> int:
    """Measure and show. Return 0 if all say the same tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[3])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    console = Console()
    model, encode = models.load("smollm2")
    prompt = encode(PROMPT)
    paces: dict[tuple[str, int], list[tuple[float, float]]] = {}
    faults: dict[tuple[str, int], str] = {}
    said = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(model, folder)
        turns = contestants(options.ranks, model, folder)
        runs = enumerate(turns * options.rounds)
        for number, (what, ranks, run, source) in runs:
            if run is with_transformers:
                source = (source, number)
            if (what, ranks) in faults and (what, ranks) not in paces:
                continue  # it never works
            try:
                results = iris.launch(run, ranks, source, prompt, options.tokens, timeout=TIMEOUT)
            except LaunchError as error:
                faults[what, ranks] = reason_of(error)
                continue
            _, first, pace = results[0]
            said += [result[0] for result in results]
            paces.setdefault((what, ranks), []).append((first, pace))
            console.print(f"{what}, {ranks} ranks: {pace:.1f} tokens/s")
    faults = {who: fault for who, fault in faults.items() if who not in paces}
    show(console, paces, faults)
    if options.results:
        write(options.results, paces, faults)
    same = all(tokens == said[0] for tokens in said)
    console.print("all say the same" if same else "they say different things")
    return 0 if same else 1


Turn = tuple[str, int, Callable[..., Any], Any]


def contestants(worlds: list[int], model: models.Model, folder: Path) -> list[Turn]:
    """Who takes turns: a name, ranks, what runs there, and on which model."""
    turns: list[Turn] = [("transformers", 1, with_transformers, folder)]
    for ranks in worlds:
        turns += [
            ('transformers, tp_plan="auto", gloo', ranks, with_transformers, folder),
            ("iris", ranks, with_iris, model),
        ]
    return turns


def medians(found: list[tuple[float, float]]) -> tuple[float, float]:
    """Seconds to the first token and tokens a second, over rounds."""
    return statistics.median(first for first, _ in found), statistics.median(p for _, p in found)


def show(console: Console, paces: dict[Any, Any], faults: dict[Any, str]) -> None:
    """One table, in the order of the first round."""
    table = Table("what", "ranks", "first token, ms", "tokens/s", "of each round")
    for (what, ranks), found in paces.items():
        first, pace = medians(found)
        rounds = ", ".join(f"{pace:.1f}" for _, pace in found)
        table.add_row(what, str(ranks), f"{first * 1e3:.0f}", f"{pace:.1f}", rounds)
    for (what, ranks), reason in faults.items():
        table.add_row(what, str(ranks), "", "", escape(f"fails: {reason}"))
    console.print(table)


def write(path: Path, paces: dict[Any, Any], faults: dict[Any, str]) -> None:
    """The figures and their conditions, as JSON."""
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": f"{os.cpu_count()}-core {platform.machine().replace('_', '-')} CPU",
        "model": "SmolLM2-135M-Instruct, fp32, greedy, one thread a rank",
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    rows = [
        {"what": what, "ranks": ranks, "first_token_s": medians(found)[0]}
        | {"tokens_per_s": medians(found)[1], "rounds": [round(pace, 2) for _, pace in found]}
        for (what, ranks), found in paces.items()
    ]
    rows += [{"what": w, "ranks": ranks, "fails": why} for (w, ranks), why in faults.items()]
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
