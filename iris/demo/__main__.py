"""``python -m iris.demo``: the feed-forward block of SmolLM2-135M, run tensor-parallel; then the
whole model answers a question.
"""

import argparse
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from itertools import cycle, islice

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import iris
from iris.demo import block
from iris.demo.model import SmolLM2
from iris.demo.progress import duration, step
from iris.errors import IrisError

PROMPT = "Four ranks walk into a matrix product. Each of them holds a quarter of the answer."
QUESTION = "What is the capital of France?"
LAYER = 0
CALLS = 3
MAX_RANKS = 16
MODEL_RANKS = 3  # its nine heads divide by three
MAX_TOKENS = 8192
WIDTH = 120  # of what is shown where there is no terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Return 0 if the ranks agree with one rank, 1 if not or if they failed."""
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    try:
        arguments = _read(console, options.prompt, options.tokens)
        console.print(f"start {options.ranks} ranks")
        reports = iris.launch(
            block.run,
            options.ranks,
            arguments,
            heap_size=_heap_size(arguments),
            calls=CALLS,
            env=_environment(options),
        )
    except IrisError as error:
        name, text = type(error).__name__, escape(str(error))
        console.print(f"[bold red]{name}[/]: {text}", soft_wrap=True)
        return 1
    _show(console, reports)
    good = _compare(console, arguments, reports)
    return 0 if good and _answer(console, options) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m iris.demo",
        description="Run the feed-forward block of SmolLM2-135M tensor-parallel over local ranks, "
        "then ask the whole model a question.",
    )
    add = parser.add_argument
    add("--ranks", type=_count(MAX_RANKS), default=4, help=f"1 to {MAX_RANKS}, default 4")
    add("--tokens", type=_count(MAX_TOKENS), default=128, help=f"1 to {MAX_TOKENS}, default 128")
    add("--prompt", type=_text, default=PROMPT, help="repeated or cut to fill the tokens")
    add("--question", default=QUESTION, help="what the model answers at the end; may be empty")
    add("--lowering", choices=("torch", "triton"), help="default: torch on CPUs, triton on GPUs")
    add("--device", type=_device, default="auto", help="cpu, cuda or auto, the default")
    return parser


def _count(most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not (text.isdecimal() and 1 <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most}")
        return int(text)

    return convert


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the prompt is empty: give at least one character")
    return text


def _device(text: str) -> str:
    allowed = ("cpu", "auto") if not torch.cuda.is_available() else ("cpu", "cuda", "auto")
    if text not in allowed:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(allowed)} here")
    return text


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """What the ranks' environment adds to this one's."""
    environment = {"IRIS_DEVICE": options.device}
    if options.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"  # the default only where there is no GPU
    if options.lowering is not None:
        environment["IRIS_LOWERING"] = options.lowering
    return environment


def _read(console: Console, prompt: str, tokens: int) -> dict[str, torch.Tensor]:
    """Return the global arguments of the block: the normalised prompt and three weights."""
    with step(console, "read SmolLM2-135M"):
        model = SmolLM2.open()
        words = model.tokenizer.encode(prompt)
        ids = list(islice(cycle(words), tokens))
        weights = model.feed_forward(LAYER)
        x = model.normalise(model.embed(ids), weights.norm)
    pieces = "·".join(model.tokenizer.decode([index]) for index in words)
    console.print(f"  prompt: {escape(pieces)}", soft_wrap=True)
    console.print(f"  {len(words)} tokens, repeated or cut to {tokens}; x is {tokens}x{x.shape[1]}")
    return {"x": x, "w_gate": weights.gate, "w_up": weights.up, "w_down": weights.down}


def _heap_size(arguments: dict[str, torch.Tensor]) -> int:
    """Room for the gathered x and the summed output of every rank, several times over."""
    return max(1 << 24, 16 * arguments["x"].nbytes)


def _show(console: Console, reports: list[block.RankReport]) -> None:
    """Print the program, its graph, its stages, and what each rank holds."""
    source, graph = inspect.getsource(block.ffn), reports[0].graph
    for title, text in (("program", source), ("graph", graph)):
        console.rule(title, align="left")
        console.print(text.rstrip(), markup=False, soft_wrap=True)
    console.rule("stages", align="left")
    console.print(reports[0].stages)
    console.rule("ranks", align="left")
    headings = ("rank", "device", *block.SPLIT_DIMS, "heap", "local", "first call", "last call")
    table = Table(*headings, box=box.SIMPLE_HEAD)
    for rank, report in enumerate(reports):
        table.add_row(
            str(rank),
            report.device,
            *("x".join(map(str, shape)) for shape in report.shards.values()),
            *(f"{size / 2**10:.0f} KiB" for size in (report.memory.heap, report.memory.local)),
            *(duration(report.seconds[call]) for call in (0, -1)),
        )
    console.print(table)


def _compare(
    console: Console, arguments: dict[str, torch.Tensor], reports: list[block.RankReport]
) -> bool:
    """Print the largest difference from the block on one rank; return whether it is small."""
    expected = block.one_rank(**arguments)
    output = torch.cat([report.output for report in reports])
    difference = (output - expected).abs().max().item()
    # Ranks sum in another order: rounding errors of as many terms, at the size of the largest sum.
    terms = len(arguments["w_down"])
    allowed = torch.finfo(output.dtype).eps * math.sqrt(terms) * expected.abs().max().item()
    good = difference <= allowed  # false for NaN
    verdict = "[bold green]agrees with" if good else "[bold red]differs from"
    numbers = f"largest difference {difference:.1e}, allowed {allowed:.1e}"
    console.print(f"{verdict} one rank[/]: {numbers}")
    return good


def _answer(console: Console, options: argparse.Namespace) -> bool:
    """Let the whole model answer, over as many ranks, at most `MODEL_RANKS`; return whether it
    could.
    """
    if not options.question:
        return True
    from iris.generate.__main__ import speak
    from iris.generate.worker import Settings

    console.rule("the whole model", align="left")
    console.print(escape(options.question), soft_wrap=True)
    ranks, settings = min(options.ranks, MODEL_RANKS), Settings(tokens=24)
    env = {"IRIS_DEVICE": options.device}
    try:
        report = speak(console, "smollm2", ranks, [options.question], settings, env=env)
    except IrisError as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", soft_wrap=True)
        return False
    fused = sum(row.fused for row in report.summary.fused)
    total = sum(row.total for row in report.summary.fused)
    console.print(f"[bold green]{fused} of {total} collectives are in fused stages[/]")
    return True


if __name__ == "__main__":
    sys.exit(main())
