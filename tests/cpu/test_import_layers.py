"""Imports point down only, and importing iris starts nothing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import iris

pytestmark = pytest.mark.cpu

PACKAGE = Path(iris.__file__).parent

# Who may import whom, from the bottom up. Every part may also import what the parts that it names
# may import; parts that are not listed (the public face, demo, benchmarks) may import everything.
BELOW = {
    "errors": (),
    "config": ("errors",),
    "logging": ("config",),
    "graph": ("logging",),
    "device": ("logging",),
    "check": ("device",),
    "runtime": ("check",),
    "gluon": ("runtime",),
    "lower": ("graph", "runtime"),
    "ops": ("lower",),
    "spmd": ("ops",),
}


def allowed(part: str) -> set[str]:
    """``part`` and all that it may import."""
    return {part}.union(*(allowed(below) for below in BELOW[part]))


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and all below it, but what only a type checker reads."""
    yield node
    if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        for child in ast.iter_child_nodes(node):
            yield from executed(child)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that ``path`` imports, wherever in the file."""
    for node in executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write absolute imports"
            names = (f".{alias.name}" if node.module == "iris" else "" for alias in node.names)
            yield from ((node.lineno, f"{node.module}{name}") for name in names)


def violations(part: str, path: Path) -> Iterator[str]:
    for line, name in imported(path):
        root, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if root == "iris" and target not in allowed(part):
            yield f"{path.relative_to(PACKAGE)}:{line}: {part} imports {name}"


def sources(part: str) -> list[Path]:
    return [*PACKAGE.glob(f"{part}.py"), *PACKAGE.glob(f"{part}/**/*.py")]


@pytest.mark.parametrize("part", BELOW)
def test_imports_point_down(part: str) -> None:
    found = [text for path in sources(part) for text in violations(part, path)]
    assert not found, "\n".join(found)


def test_a_violation_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    source = tmp_path / "graph" / "bad.py"
    source.parent.mkdir()
    source.write_text("""
from typing import TYPE_CHECKING
from iris.errors import IrisError
if TYPE_CHECKING:
    from iris.spmd import program
def f():
    from iris import lower
""")
    assert list(violations("graph", source)) == ["graph/bad.py:7: graph imports iris.lower"]


def python(code: str) -> str:
    """Run ``code`` in a fresh interpreter, warnings as errors, and return what it printed."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_graph_needs_neither_torch_nor_triton() -> None:
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sources("graph")
        if path.name != "__init__.py"
    ]
    assert names
    # A bare package stands in for iris/__init__.py, which imports everything.
    python(f"""
import importlib, sys, types
sys.modules["torch"] = sys.modules["triton"] = None  # importing them now fails
package = sys.modules["iris"] = types.ModuleType("iris")
package.__path__ = [{str(PACKAGE)!r}]
for name in {names!r}:
    importlib.import_module(name)
""")


def test_import_starts_nothing() -> None:
    """No driver, process group, thread, child process or shared memory."""
    python("""
import os, threading
descriptors = set(os.listdir("/proc/self/fd"))
import torch  # what torch itself starts is not ours
threads = set(os.listdir("/proc/self/task"))
import iris
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
assert threading.active_count() == 1, threading.enumerate()
assert set(os.listdir("/proc/self/task")) == threads
assert not open("/proc/self/task/%d/children" % os.getpid()).read()
maps = open("/proc/self/maps").read()
assert "libcuda.so" not in maps, "the driver is loaded"
assert "memfd:" not in maps and "/dev/shm" not in maps, "shared memory is mapped"
assert set(os.listdir("/proc/self/fd")) == descriptors
""")
