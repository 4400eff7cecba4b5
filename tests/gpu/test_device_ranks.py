"""Tests of tests/ranks again, where ranks are on GPUs."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def load(path):
    """Import a test file under a name of its own, so that its functions can travel to ranks."""
    spec = importlib.util.spec_from_file_location(f"on_gpu.{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RANKS = Path(__file__).parents[1] / "ranks"
FILES = *RANKS.glob("test_device_*.py"), RANKS / "test_recovery.py", RANKS / "test_check_guards.py"
# The first two need the interpreter: one replaces a function that kernels call, one observes polls.
# The other kills a rank that shares a GPU: see test_runtime_gpu.py.
ONLY_CPU = {
    "test_a_flag_that_comes_as_its_wait_runs_out_is_late",
    "test_a_signal_that_is_never_sent_is_a_timeout",
    "test_a_kernel_that_waits_for_a_dead_rank_ends_before_its_time",
}

for file in sorted(FILES):
    for name, value in vars(load(file)).items():
        if name.startswith("test_") and name not in ONLY_CPU:
            globals()[name] = value
