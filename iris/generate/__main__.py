"""``python -m iris.generate``: stream text from a model whose weights are spread over ranks."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

import iris
from iris.errors import IrisError, UnsupportedError
from iris.generate import models, worker

PROMPT = "What is the capital of France?"
INTERRUPTED = 130
WIDTH = 100  # of what is shown where there is no terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Generate. Return 0, or 1 if that failed."""
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    try:
        with console.status(f"read {options.model} …"):
            model, encode = models.load(options.model)
            prompt = encode(options.prompt)
        if not prompt:
            raise UnsupportedError("the prompt has no tokens", help="give at least one word")
        console.print(f"[dim]{options.ranks} ranks, {len(prompt)} prompt tokens[/]")
        reports = iris.launch(worker.run, options.ranks, model, prompt, options.tokens)
    except IrisError as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}")
        return 1
    except KeyboardInterrupt:  # launch has ended the ranks
        return INTERRUPTED
    report = reports[0]
    console.print(
        f"[dim]{len(report.tokens)} tokens, {report.tokens_per_second:.1f} a second; "
        f"model in {report.build_seconds:.1f} s, "
        f"first token (trace and compile) in {report.first_seconds:.1f} s[/]"
    )
    console.print(report.summary)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m iris.generate",
        description="Stream a model's answer to a prompt; its weights are spread over local ranks.",
    )
    parser.add_argument("--model", default="smollm2", help='"smollm2", or a folder of safetensors')
    parser.add_argument("--ranks", type=_count, default=3, help="rank processes")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=_count, default=64, help="at most so many new tokens")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
