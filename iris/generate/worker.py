"""What each rank does: build its part of the model, then speak."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import iris
from iris.generate.models import Model
from iris.spmd.summary import Summary, explain

HEAP = 1 << 28


@dataclass(frozen=True)
class Settings:
    """How to speak: at most ``tokens`` new tokens, up to a text of ``stop``; greedy at temperature
    0, else drawn by ``seed``, the same on every rank.
    """

    tokens: int = 64
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    aloud: bool = True


@dataclass
class Streamer:
    """What ``generate`` puts tokens into: notes the time of each, and where there is one prompt,
    writes its text as soon as it is whole.
    """

    decode: Callable[[Sequence[int]], str]
    write: Callable[[str], object]
    ends: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    tokens: list[list[int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    _ended: set[int] = field(default_factory=set)
    _shown: int = 0

    def put(self, value: Tensor) -> None:
        """Take the prompts ``[batch, rows]``, which are not shown, then a token of each a call."""
        if value.dim() == 2 and not self.tokens:
            self.tokens = [[] for _ in value]
            return
        self.times.append(time.perf_counter())
        for index, token in enumerate(value.flatten().tolist()):
            self._take(index, token)
        if len(self.tokens) == 1 and not self.text(0).endswith("\ufffd"):  # half a character
            self._show()

    def text(self, index: int) -> str:
        """What was said to one prompt, up to where it was to stop."""
        text = self.decode(self.tokens[index])
        places = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def ended(self, index: int) -> bool:
        """Whether one answer is whole."""
        text = self.decode(self.tokens[index])
        return index in self._ended or any(stop in text for stop in self.stop)

    def end(self) -> None:
        """Write what is left."""
        if len(self.tokens) == 1:
            self._show()
            self.write("\n")

    def _take(self, index: int, token: int) -> None:
        if token in self.ends:
            self._ended.add(index)
        if not self.ended(index):
            self.tokens[index].append(token)

    def _show(self) -> None:
        text = self.text(0)
        self.write(text[self._shown :])
        self._shown = len(text)


@dataclass(frozen=True)
class Report:
    """What one rank said to each prompt, and how long it took: to build, to the first token, and
    from there per step.
    """

    tokens: list[list[int]]
    texts: list[str]
    build_seconds: float
    first_seconds: float
    steps_per_second: float
    summary: Summary


def run(model: Model, prompts: Sequence[Sequence[int]], settings: Settings) -> Report:
    """Continue ``prompts``, of any lengths; rank 0 writes the text. Every rank calls this."""
    with iris.iris(heap_size=HEAP) as ctx:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ctx.num_ranks))
        start = time.perf_counter()
        built = model.build().to(ctx.device)
        ends = built.generation_config.eos_token_id
        ends = tuple(ends) if isinstance(ends, list) else (ends,)
        aloud = settings.aloud and ctx.cur_rank == 0
        write: Callable[[str], object] = _write if aloud else lambda text: None
        streamer = Streamer(model.decode, write, ends, settings.stop)
        ready = time.perf_counter()
        generate(built, prompts, settings, streamer)
        times = streamer.times
        # The second token compiles the program of a step: the pace is that of the steps after it.
        steps = times[1:]
        pace = (len(steps) - 1) / (steps[-1] - steps[0]) if len(steps) > 1 else 0.0
        texts = [streamer.text(index) for index in range(len(prompts))]
        waited = times[0] - ready
        return Report(streamer.tokens, texts, ready - start, waited, pace, explain(built))


def generate(
    built: torch.nn.Module, prompts: Sequence[Sequence[int]], settings: Settings, streamer: Streamer
) -> None:
    """``model.generate`` on a batch padded on the left, with a cache that holds all of it."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Ended(StoppingCriteria):
        """Ends each answer where the streamer says so."""

        def __call__(self, input_ids: Tensor, scores: Tensor, **others: object) -> Tensor:
            del scores, others
            answers = [streamer.ended(index) for index in range(len(input_ids))]
            return torch.tensor(answers, device=input_ids.device)

    model, longest = built, max(map(len, prompts))
    pad = model.config.pad_token_id or 0  # type: ignore[union-attr]
    ids = torch.tensor([[pad] * (longest - len(one)) + list(one) for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    if settings.temperature > 0:
        torch.manual_seed(settings.seed)
        how = {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p}
        how["top_k"] = 0
    else:
        how = {"do_sample": False}
    device = next(model.parameters()).device
    model.generate(  # type: ignore[operator]
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=settings.tokens,
        streamer=streamer,
        stopping_criteria=StoppingCriteriaList([Ended()]),
        cache_implementation="static",
        **how,
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
