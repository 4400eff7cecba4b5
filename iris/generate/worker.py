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
from iris.hf import Summary, explain

HEAP = 1 << 28


@dataclass
class Streamer:
    """What ``generate`` puts tokens into: writes their text as soon as it is whole, and notes the
    time of each.
    """

    decode: Callable[[Sequence[int]], str]
    write: Callable[[str], object]
    stop: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    _shown: int = 0
    _prompt: bool = True

    def put(self, value: Tensor) -> None:
        """Take the prompt, which is not shown, then one token a call."""
        if self._prompt:
            self._prompt = False
            return
        self.times.append(time.perf_counter())
        self.tokens += [token for token in value.flatten().tolist() if token not in self.stop]
        text = self.decode(self.tokens)
        if not text.endswith("\ufffd"):  # a character may need more tokens
            self.write(text[self._shown :])
            self._shown = len(text)

    def end(self) -> None:
        """Write what is left."""
        self.write(self.decode(self.tokens)[self._shown :] + "\n")


@dataclass(frozen=True)
class Report:
    """What one rank said, and how long it took: to build, to the first token, and from there per
    token.
    """

    tokens: list[int]
    build_seconds: float
    first_seconds: float
    tokens_per_second: float
    summary: Summary


def run(model: Model, prompt: list[int], most: int, speak: bool = True) -> Report:
    """Continue ``prompt`` by at most ``most`` tokens, greedily; rank 0 writes the text. Every rank
    calls this.
    """
    with iris.iris(heap_size=HEAP) as ctx:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ctx.num_ranks))
        start = time.perf_counter()
        built = model.build().to(ctx.device)
        ends = built.generation_config.eos_token_id
        ends = tuple(ends) if isinstance(ends, list) else (ends,)
        aloud = speak and ctx.cur_rank == 0
        streamer = Streamer(model.decode, _write if aloud else _silent, ends)
        ids = torch.tensor([prompt], device=ctx.device)
        ready = time.perf_counter()
        built.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            do_sample=False,
            streamer=streamer,
        )
        times = streamer.times
        # The second token compiles the program of a step: the pace is that of the steps after it.
        steps = times[1:]
        pace = (len(steps) - 1) / (steps[-1] - steps[0]) if len(steps) > 1 else 0.0
        return Report(streamer.tokens, ready - start, times[0] - ready, pace, explain(built))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _silent(text: str) -> None:
    del text
