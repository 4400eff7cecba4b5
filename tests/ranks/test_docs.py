"""The code in the README and in the documents runs, page by page, and prints what they say.

``python tests/ranks/test_docs.py FOLDER PAGE...`` runs pages in FOLDER, all in this process: ranks
then start from one zygote. A block runs as a file of its title, or of the page's name. Where a page
does not say what is printed now, FOLDER has the page as it should be: copy it, if it is right.
"""

import contextlib
import io
import json
import linecache
import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
# A block, and the text block right after it: what it prints, its lines in any order.
BLOCK = re.compile(
    r'^```(?P<kind>python|sh)(?: title="(?P<title>[^"]+)")?\n(?P<source>.*?)^```$'
    r"(?:\n+^```text\n(?P<shown>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


def blocks(page: Path) -> Iterator[tuple[int, re.Match[str]]]:
    """The blocks of a page that run, each with its first line. Commands only if they print."""
    text = page.read_text()
    for block in BLOCK.finditer(text):
        if block["kind"] == "python" or block["shown"] is not None:
            yield text.count("\n", 0, block.start("source")), block


def run_page(page: Path) -> str:
    """Run a page's blocks in order. Return what is wrong, with the line; empty if all is well."""
    space: dict[str, Any] = {"__name__": "__main__"}
    text, wrong = page.read_text(), ""
    for line, block in blocks(page):
        try:
            printed = run_block(block, f"{page.stem.replace('-', '_')}_{line}.py", space)
        except BaseException:
            return f"{page.name}:{line}\n{traceback.format_exc()}"
        if block["shown"] is not None and lines(printed) != lines(block["shown"]):
            wrong += f"{page.name}:{line} prints\n{printed}\n"
            fence = f"```text\n{block['shown']}```"
            text = text.replace(fence, f"```text\n{printed.strip()}\n```", 1)
    if wrong:
        Path(page.name).write_text(text)
    return wrong


def run_block(block: re.Match[str], name: str, space: dict[str, Any]) -> str:
    """Run one block. Return what it printed."""
    if block["kind"] == "sh":
        command = shlex.split(block["source"])
        command[0] = str(Path(sys.executable).with_name(command[0]))
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr
    file = Path(block["title"] or name)
    file.write_text(block["source"])
    linecache.checkcache()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block["source"], str(file.resolve()), "exec"), space)
    return printed.getvalue()


def lines(text: str) -> list[str]:
    return sorted(line.rstrip() for line in text.splitlines() if line.strip())


def run_pages(folder: str, *pages: str) -> None:
    """Run pages and write what is wrong with each to a file in ``folder``."""
    from iris.runtime.context import current_or_none

    os.chdir(folder)
    environment = dict(os.environ)
    wrong = {}
    for page in pages:
        wrong[page] = run_page(Path(page))
        if (ctx := current_or_none()) is not None:
            ctx.close()
        os.environ.clear()
        os.environ.update(environment)
    Path("wrong.json").write_text(json.dumps(wrong))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What is wrong with each page."""
    folder = tmp_path_factory.mktemp("docs")
    pages = [str(page) for page in PAGES if any(blocks(page))]
    command = [sys.executable, __file__, str(folder), *pages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found: Mapping[str, str] = json.loads((folder / "wrong.json").read_text())
    return found


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(blocks(page))], ids=lambda page: page.stem
)
def test_blocks_run_and_print_what_the_page_says(page: Path, wrong: Mapping[str, str]) -> None:
    assert not wrong[str(page)], wrong[str(page)]


if __name__ == "__main__":
    run_pages(*sys.argv[1:])
