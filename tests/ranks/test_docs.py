"""The code in the documents runs, from top to bottom of each page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = {page: BLOCK.findall(page.read_text()) for page in sorted(DOCS.glob("**/*.md"))}


@pytest.mark.parametrize(
    "page", [page for page, blocks in PAGES.items() if blocks], ids=lambda page: page.stem
)
def test_code_blocks_run(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(PAGES[page]))
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
