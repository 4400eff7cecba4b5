"""A plan cut at steps that a CUDA graph cannot hold does what the whole plan does."""

import random

import pytest
import torch

import iris
from iris.lower.pieces import cut, host_steps, run_pieces
from iris.lower.program import Step

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def ctx():
    with iris.iris(1 << 20) as context:
        yield context


GAIN = torch.tensor([2.0, 3.0])


def mixed(x, unused, y):
    """Views, several results of one op, values read long after, constants, a returned input."""
    a, b = (x @ y).split(2, 1)
    c = (a * GAIN).t()
    d = torch.relu(b).sum(0)
    return {"c": c, "none": None, "twice": (d, d), "x": x}, c.sum() + b.mean(), a.contiguous()


def writing(x, unused, y):
    x.mul_(2)
    y[0].add_(x.sum())
    return x + y.sum()


@pytest.mark.parametrize("function", [mixed, writing])
def test_pieces_of_any_cut_give_what_the_plan_gives(function):
    draw = random.Random(5)
    example = torch.ones(4, 4), torch.ones(1), torch.ones(4, 4)
    compiled = iris.spmd(function).trace(*example).lower().compile()
    plan = compiled.program.executable
    assert len(plan.steps) >= 4
    for _ in range(20):
        host = draw.sample(range(len(plan.steps)), draw.randrange(len(plan.steps) + 1))
        pieces = cut(plan, host)
        assert len(pieces) == 1 + sum(
            (i in host) != (i + 1 in host) for i in range(len(plan.steps) - 1)
        )
        inputs = [torch.rand(4, 4), torch.rand(1), torch.rand(4, 4), *compiled.program.captured]
        calls = [(piece.part, lambda v, run=piece.part.run: run(*v)) for piece in pieces]
        seen = []
        apart = plan.run_steps(
            inputs, lambda number, step, seen=seen: seen.append((number, step()))
        )
        assert [number for number, _ in seen] == list(range(len(plan.steps)))
        expected = plan.run(*inputs)
        for values in (run_pieces(plan, calls, inputs)[0], apart):
            for value, right in zip(values, expected, strict=True):
                assert value is right is None or torch.equal(value, right)


def test_a_piece_returns_only_what_is_read_later():
    compiled = iris.spmd(mixed).trace(torch.ones(4, 4), torch.ones(1), torch.ones(4, 4))
    plan = compiled.lower().compile().program.executable
    for stop in range(1, len(plan.steps)):
        part = plan.part(0, stop)
        read = {name for step in plan.steps[stop:] for name in step.uses} | {*plan.result.uses}
        assert set(part.makes) <= read


def test_steps_that_touch_the_cpu_or_meet_are_on_the_host():
    steps = [
        Step("", ("x",), ("a",), ""),
        Step("", ("a",), ("b",), "", device="cpu"),
        Step("", ("b",), ("c",), ""),
        Step("", ("c",), ("d",), "", device="device"),
        Step("", ("d", "s"), ("e",), ""),
        Step("", ("e",), ("f",), "", on_host="ranks meet on the host"),
        Step("", ("e", "f"), ("g",), ""),
        Step("", (), ("h",), "", device="cpu"),
        Step("", ("g",), ("i",), ""),
    ]
    cpu = "reads or makes a tensor on the CPU"
    assert host_steps(steps, ["s"]) == {
        1: cpu, 2: cpu, 3: cpu, 4: cpu, 5: "ranks meet on the host", 7: cpu,
    }  # fmt: skip
