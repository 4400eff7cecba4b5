"""What the benchmark makes of times: a device profile, and how good the planner's choices are."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from iris.bench.profile import ELEMENTS, SIZE, STEP, profile_from
from iris.bench.report import load, save, show
from iris.bench.timing import Row, Time
from iris.lower.cost import profile_of, wave

pytestmark = pytest.mark.cpu


def test_times_of_a_known_machine_give_its_profile():
    known = replace(
        profile_of("H200").shared(4, 26),
        rates={1: 3e14, 2: 1.6e14, 4: 1e13},
        bandwidth=1e12,
        link=3e11,
        moves=2e10,
        launch=1.5e-6,
        latency=2e-6,
        meet=7e-6,
        straggle=1.5,
    )
    work = 2.0 * SIZE[0] * SIZE[1] * SIZE[2]
    step = 1e-4
    seconds = {
        "fp8": work / 3e14,
        "bf16": work / 1.6e14,
        "fp32": work / 8 / 1e13,
        "copy": 8 * ELEMENTS / 1e12,
        "store": 8 * ELEMENTS / (26 * 2e10),
        "put": 4 * ELEMENTS / 3e11,
        "nothing": 1.5e-6,
        "barrier": 3.5e-6,
        "one row": 7e-6,
        "step": step,
        "in step": step + 3.5e-6 + 1.5 * wave(*STEP[:2], 2, known),
    }
    times = {name: Time(*3 * (1e6 * second,)) for name, second in seconds.items()}
    shipped = profile_of("H200").shared(4, 26)

    def numbers(profile):
        rest = (profile.link, profile.latency, profile.meet, profile.straggle)
        return [*profile.rates.values(), profile.bandwidth, profile.moves, profile.launch, *rest]

    assert numbers(profile_from(times, shipped, 4)) == pytest.approx(numbers(known))
    alone = profile_from(times, shipped, 1)
    assert numbers(alone)[-4:] == numbers(shipped)[-4:]
    assert numbers(alone)[:-4] == pytest.approx(numbers(known)[:-4])
    wrong = {name: time for name, time in times.items() if name not in ("bf16", "step", "in step")}
    found = profile_from(wrong, shipped, 4)
    assert (found.rates[2], found.straggle) == (shipped.rates[2], shipped.straggle)
    assert found.rates[1] == pytest.approx(known.rates[1])
    faster = times | {"in step": times["step"], "barrier": times["nothing"]}
    found = profile_from(faster, shipped, 4)
    assert (found.straggle, found.latency) == (0.0, 1e-7)


def row(M, name, us, right=True, chosen=False):
    return Row("stage", {"M": M}, name, Time(us, us, us), right, chosen=chosen)


def test_the_planners_choices_are_compared_with_the_best_candidate(tmp_path):
    rows = [
        row(1, "gemm", 5.0), row(1, "iris", 10.0), row(1, "iris unfused", 12.0, chosen=True),
        row(2, "peer", 1.0), row(2, "iris", 10.4, chosen=True), row(2, "iris unfused", 10.0),
        row(3, "iris", 20.0, chosen=True), row(3, "iris unfused", 1.0, right=False),
        row(4, "iris", 20.0), row(4, "iris unfused", 1.0, right=False, chosen=True),
    ]  # fmt: skip
    summary = (
        "the planner's choice is within 5% of the best candidate at 67% of 3 points, worst 1.200"
    )
    console = Console(file=io.StringIO(), width=160)
    show(rows, console)
    text = console.file.getvalue()
    assert summary in text
    assert "choice / best" in text
    assert "12.0 * [12 12]" in text
    show(rows, console, spread=False)
    assert "12.0 * │" in console.file.getvalue()
    save(rows, {}, tmp_path / "rows.json")
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["summary"] == summary
    assert [(c["point"]["M"], c["choice"], c["regret"]) for c in content["choices"]] == [
        (1, "iris unfused", 1.2),
        (2, "iris", pytest.approx(1.04)),
        (3, "iris", 1.0),
        (4, "iris unfused", None),  # its result was wrong
    ]
    assert load(tmp_path / "rows.json")[0] == rows


def test_tables_without_peers_or_choices_have_no_such_columns():
    console = Console(file=io.StringIO(), width=160)
    show([Row("device profile", {"what": "units"}, "shipped", Time(9, 9, 9), unit="")], console)
    text = console.file.getvalue()
    assert "shipped" in text
    assert " / " not in text
    assert "planner" not in text
