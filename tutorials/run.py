"""Run the tutorials: ``python tutorials/run.py [--check] [number ...]``.

Each tutorial is a pair: a ``.py`` file in the percent format, which is what people edit, and a
notebook with the outputs that it gave. Without ``--check`` the notebook is made from the script and
run; with it, the script is run and what comes out is compared with what the notebook holds.

Cells that are tagged ``varies`` (times, process ids) are run but not compared. Ranks write in any
order, so lines are compared in sorted order.
"""

import argparse
import difflib
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
SECONDS = 120  # for a whole tutorial


def scripts(numbers: list[str]) -> list[Path]:
    """The tutorials asked for, by number; all when none is named."""
    found = sorted(FOLDER.glob("[0-9]*.py"))
    return [path for path in found if not numbers or path.name.partition("_")[0] in numbers]


def executed(script: Path) -> NotebookNode:
    """The notebook of a script, with its outputs."""
    notebook = jupytext.read(script)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,
        kernel_name="python3",
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
    )
    client.execute()
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        if "outputs" in cell:  # warnings name paths of this machine
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    return notebook


def shown(cell: NotebookNode) -> list[str]:
    """Lines of text that a code cell gave, sorted; none where they vary."""
    if "varies" in cell.metadata.get("tags", ()):
        return []
    lines: list[str] = []
    for output in cell.get("outputs", ()):
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        lines += text.splitlines()
    return sorted(lines)


def difference(script: Path) -> str:
    """What a run gives that the stored notebook does not, as a diff; empty if they agree."""
    stored, now = nbformat.read(script.with_suffix(".ipynb"), 4), executed(script)
    if [cell.source for cell in stored.cells] != [cell.source for cell in now.cells]:
        return f"{script.name} and its notebook differ: run {Path(__file__).name} without --check"
    found: list[str] = []
    for old, new in zip(stored.cells, now.cells, strict=True):
        found += difflib.unified_diff(shown(old), shown(new), "stored", "now", lineterm="", n=0)
    return "\n".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of storing")
    parser.add_argument("numbers", nargs="*", metavar="number")
    options = parser.parse_args()
    wrong = 0
    for script in scripts(options.numbers):
        if options.check:
            text = difference(script)
            sys.stdout.write(f"{script.name}: {text or 'as stored'}\n")
            wrong += bool(text)
        else:
            nbformat.write(executed(script), script.with_suffix(".ipynb"))
            sys.stdout.write(f"{script.name}: stored\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
