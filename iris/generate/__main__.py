"""``python -m iris.generate``: stream text from a model whose weights are spread over ranks."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape

import iris
from iris.errors import IrisError, UnsupportedError
from iris.generate import models, worker

PROMPT = "What is the capital of France?"
INTERRUPTED = 130
WIDTH = 100  # of what is shown where there is no terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Generate. Return 0, 1 if that failed, or 130 if it was interrupted."""
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    settings = worker.Settings(
        options.tokens, tuple(options.stop), options.temperature, options.top_p, options.seed
    )
    prompts = options.prompt or [PROMPT]
    try:
        speak(console, options.model, options.ranks, prompts, settings, chat=not options.raw)
    except IrisError as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}")
        return 1
    except KeyboardInterrupt:  # launch has ended the ranks
        return INTERRUPTED
    return 0


def speak(
    console: Console,
    name: str,
    ranks: int,
    prompts: Sequence[str],
    settings: worker.Settings,
    chat: bool = True,
    env: Mapping[str, str] | None = None,
) -> worker.Report:
    """Answer ``prompts`` by a model over ``ranks`` local ranks; show how, and what was fused.

    One answer is shown as it comes, several at the end.
    """
    with console.status(f"read {name} …"):
        model, encode = models.load(name)
        tokens = [encode(prompt, chat) for prompt in prompts]
    if not all(tokens):
        raise UnsupportedError("the prompt has no tokens", help="give at least one word")
    lengths = ", ".join(str(len(one)) for one in tokens)
    console.print(f"[dim]{ranks} ranks, {lengths} prompt tokens[/]")
    report: worker.Report = iris.launch(worker.run, ranks, model, tokens, settings, env=env)[0]
    if len(prompts) > 1:
        for prompt, text in zip(prompts, report.texts, strict=True):
            console.print(f"[dim]{escape(prompt)}[/]\n{escape(text)}\n", soft_wrap=True)
    count = sum(map(len, report.tokens))
    console.print(
        f"[dim]{count} tokens, {report.steps_per_second:.1f} steps a second; "
        f"model in {report.build_seconds:.1f} s, "
        f"first token (trace and compile) in {report.first_seconds:.1f} s[/]"
    )
    console.print(report.summary)
    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m iris.generate",
        description="Stream a model's answer to a prompt; its weights are spread over local ranks.",
    )
    add = parser.add_argument
    add("--model", default="smollm2", help='"smollm2", or a folder of safetensors')
    add("--ranks", type=_count, default=3, help="rank processes")
    add("--prompt", action="append", help="repeat it for a batch, of any lengths")
    add("--raw", action="store_true", help="continue the prompt, without the chat template")
    add("--tokens", type=_count, default=64, help="at most so many new tokens for each prompt")
    add("--stop", action="append", default=[], help="end an answer before this text")
    add("--temperature", type=_number(None), default=0.0, help="0, the default, is greedy")
    add("--top-p", type=_number(1.0), default=1.0, help="draw from the likeliest words only")
    add("--seed", type=int, default=0, help="of the draws, which are the same on all ranks")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _number(most: float | None) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= (most or 100.0):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {most or 100}")
        return value

    return convert


if __name__ == "__main__":
    sys.exit(main())
