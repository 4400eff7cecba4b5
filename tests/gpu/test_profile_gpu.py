"""The device profile: what is measured on GPUs is kept, and programs choose by it."""

import os
from argparse import Namespace

import pytest
import torch

import iris
from iris.bench.profile import FIGURES, measure
from iris.bench.stages import planned
from iris.lower import tuned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(120),
]


def profiled(folder):
    ctx = iris.iris(1 << 29)
    x, w = (torch.ones(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    os.environ["IRIS_CACHE_DIR"] = folder
    try:
        rows = list(measure(Namespace()))
        profile = tuned.of_group(ctx, ctx.world).profile
        choice = planned("matmul_all_reduce", [x, w])
    finally:
        del os.environ["IRIS_CACHE_DIR"]
    return [(row.point["what"], row.name, row.time.median) for row in rows], profile, choice


@pytest.mark.parametrize("world", [1, 2])
def test_a_profile_is_measured_kept_and_used(run, world, tmp_path):
    answers = run(profiled, world, str(tmp_path))
    assert answers == answers[:1] * world
    figures, profile, choice = answers[0]
    assert len(figures) == 2 * len(FIGURES)
    assert {what for what, _, value in figures if not value > 0} <= {FIGURES[-1].name}
    assert profile.name.endswith(", measured")
    (file,) = tmp_path.glob("profile/*.json")
    assert tuned._read(file, tuned._profile, None) == profile
    assert choice in {"iris", "iris one-shot", "iris two-shot", "iris unfused"}
