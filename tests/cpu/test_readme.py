"""The README is short, and the documents list what there is; `make docs` builds them."""

import importlib.util
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import iris
from iris import errors

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python.*?\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_example_is_short() -> None:  # tests/ranks/test_docs.py runs it
    (example,) = FENCE.findall((ROOT / "README.md").read_text())
    assert len([line for line in example.splitlines() if line]) <= 20


def test_every_error_is_in_the_catalogue() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    classes = inspect.getmembers(errors, inspect.isclass)
    own = [name for name, kind in classes if kind.__module__ == errors.__name__]
    missing = [name for name in own if f"## {name}\n" not in text]
    assert not missing


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
    found = set(re.findall(r"^::: iris\.([\w.]+)", pages, re.MULTILINE))
    assert found >= {f"nn.{name}" for name, value in vars(iris.nn).items() if callable(value)}
    names = {name for name in (*vars(iris), *iris._LAZY) if not name.startswith("_")}
    own = {
        name
        for name in names
        if str(getattr(getattr(iris, name), "__module__", "")).startswith("iris.")
    }
    listed_elsewhere = {"Ccl", "Ops", *vars(errors)}
    assert not own - found - listed_elsewhere


def test_reference_is_made_from_docstrings() -> None:
    spec = importlib.util.spec_from_file_location("_hooks", ROOT / "docs" / "_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    made = {
        page.stem: hooks.on_page_markdown(
            page.read_text(),
            SimpleNamespace(file=SimpleNamespace(src_uri=f"reference/{page.name}")),
        )
        for page in ROOT.glob("docs/reference/*.md")
    }
    assert not any("\n::: " in text for text in made.values())
    assert "all_gather(\n    x: Tensor," in made["programs"]
    assert "[SpecError](../errors.md#specerror)" in made["programs"]
    assert all(f"| `{knob.name}` | " in made["knobs"] for knob in iris.knobs())


def test_links_lead_to_files() -> None:
    pages = [ROOT / "README.md", ROOT / "tutorials" / "README.md", *ROOT.glob("docs/**/*.md")]
    link = re.compile(r"\]\((?!https?:)([\w./-]+)(?:#[\w-]+)?\)")
    lost = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in link.findall(FENCE.sub("", page.read_text()))
        if not (page.parent / target).exists()
    ]
    assert not lost
