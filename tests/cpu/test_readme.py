"""The README's example runs as it stands, and the documents list what there is."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from iris import errors

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


def test_example_runs(tmp_path: Path) -> None:
    source = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert source is not None
    assert len([line for line in source[1].splitlines() if line]) <= 20
    script = tmp_path / "example.py"
    script.write_text(source[1])
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert "all_gather" in done.stdout
    assert "largest difference" in done.stdout


def test_every_error_is_in_the_catalogue() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    classes = inspect.getmembers(errors, inspect.isclass)
    own = [name for name, kind in classes if kind.__module__ == errors.__name__]
    missing = [name for name in own if f"## {name}\n" not in text]
    assert not missing
