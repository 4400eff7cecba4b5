"""Every message that docs/errors.md shows is what a user gets."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import iris
from iris import P

pytestmark = pytest.mark.ranks

CATALOGUE = Path(__file__).parents[2] / "docs" / "errors.md"
# What differs from run to run: the user's line, how long a wait really took, how many were before.
PLACE, SECONDS = re.compile(r"\w+\.py:\d+"), re.compile(r"waited \d+\.\d s")
EPOCH = re.compile(r"epoch: expected \d+, seen \d+")


@iris.spmd(in_specs=(P("tp", None), P(None, "tp")), out_specs=P(None, "tp"))
def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return iris.all_gather(x, "tp", dim=0) @ w


@iris.spmd(in_specs=(P(None, "tp"), P("tp", None), P()), out_specs=P())
def early_bias(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return iris.all_reduce(x @ w + bias, "tp")


@iris.spmd(in_specs=(P(None, "tp"), P("tp", None)), out_specs=P())
def no_sum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


@iris.spmd
def branch(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def message(call: Callable[[], object]) -> str:
    try:
        call()
    except iris.IrisError as error:
        return str(error)
    return "no error"


def bad_calls(ctx: iris.Iris) -> dict[str, Callable[[], object]]:
    """Calls that fail on every rank, by the name of what they raise."""
    rank, x = ctx.get_rank(), torch.ones(4, 4)
    return {
        "SpecError, dims": lambda: project(torch.ones(3), x),
        "SpecError, sizes": lambda: project(torch.ones(3 + rank, 4), x),
        "TypeRuleError, bias": lambda: early_bias(x, x, torch.ones(4)),
        "TypeRuleError, sum": lambda: no_sum(x, x),
        "TraceError": lambda: branch(x),
        "HeapExhaustedError": lambda: ctx.zeros(1 << 20),
        "CollectiveMismatchError, operands": lambda: iris.all_reduce(torch.ones(3 + rank)),
        "CollectiveMismatchError, calls": lambda: (
            iris.all_gather(x, dim=0) if rank else ctx.barrier()
        ),
        "UnsupportedError": lambda: iris.all_reduce(torch.ones(4, dtype=torch.bool)),
    }


def messages() -> dict[str, str]:
    with iris.iris(heap_size=1 << 20) as ctx:
        texts = {name: message(call) for name, call in bad_calls(ctx).items()}
        os.environ["IRIS_LOWERING"] = "cuda"
        texts["ConfigError"] = message(lambda: branch(torch.ones(4, 4)))
        os.environ["IRIS_TIMEOUT"] = "1"
        late = ctx.get_rank() == 1
        texts["TimeoutError"] = message(lambda: time.sleep(2) if late else ctx.barrier())
    texts["IrisError"] = message(iris.current)
    return texts


def stray() -> str:
    os.environ["IRIS_CHECK"] = "1"
    with iris.iris(heap_size=1 << 20) as ctx:
        x = ctx.zeros(4)
        if ctx.get_rank() == 1:
            x.as_strided((5,), (1,))[4] = 7.0
        return message(ctx.check)


def dies() -> None:
    ctx = iris.iris(heap_size=1 << 20)
    if ctx.get_rank() == 1:
        raise ValueError("no data")
    ctx.barrier()


def steady(text: str) -> str:
    text = EPOCH.sub("epoch: expected 2, seen 1", PLACE.sub("model.py:7", text))
    return SECONDS.sub("waited 1.0 s", text)


def test_messages_are_those_of_the_catalogue() -> None:
    catalogue = steady(CATALOGUE.read_text())
    texts = iris.launch(messages, 2)[0]
    texts["CheckError"] = iris.launch(stray, 2)[0]
    launch = message(lambda: iris.launch(dies, 2))
    texts["LaunchError"] = launch.partition("\nTraceback")[0]
    texts["PeerError"] = launch.rpartition("PeerError: ")[2]
    wrong = {name: text for name, text in texts.items() if steady(text) not in catalogue}
    assert not wrong, "\n\n".join(f"{name}\n{text}" for name, text in wrong.items())
