"""What the site is made of beside its pages: the API reference, from docstrings, and the knobs.

In a page a line ``::: iris.load`` becomes that name's signature and docstring, with the public
methods of a class. A class that users do not construct has a title of its own, as in ``:::
iris.spmd.namespaces:Ops as ctx.ops``. ``<!-- knobs -->`` becomes the table of all knobs.
"""

import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import iris
from iris import errors

DIRECTIVE = re.compile(r"^::: (?P<path>\S+)(?: as (?P<title>\S+))?$", re.MULTILINE)
REMOTE = re.compile(r'<(?:script|img|iframe)[^>]* src="?(?:https?:)?//|<link[^>]* href="?https?:')
ERRORS = "|".join(name for name, _ in inspect.getmembers(errors, inspect.isclass))
WIDTH = 80  # of signatures in one line


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill a page in."""
    up = "../" * page.file.src_uri.count("/")

    def fill(found: re.Match[str]) -> str:
        return "\n\n".join(entry(found["path"], found["title"] or found["path"], up))

    return DIRECTIVE.sub(fill, markdown).replace("<!-- knobs -->", "\n".join(knobs(up)))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that would fetch anything from another host."""
    if found := REMOTE.search(output):
        raise ValueError(f"{page.file.src_uri} fetches: {found[0]}")
    return output


def entry(path: str, title: str, up: str) -> Iterator[str]:
    """What ``path`` names, as markdown, and the public methods if it is a class."""
    names = path.split(".")[1:]
    found = pkgutil.resolve_name(path) if ":" in path else reduce(getattr, names, iris)
    yield f"### `{title}` {{ #{title} }}"
    if title == path:
        yield fenced("python", signature(plain(found), names[-1]))
    yield docstring(inspect.getdoc(plain(found)) or "", up)
    for name, member in methods(found):
        yield f"#### `{name}` {{ #{title}.{name} }}"
        if not isinstance(member, property):
            yield fenced("python", signature(plain(member), name))
        yield docstring(inspect.getdoc(plain(member)) or "", up)


def methods(kind: Any) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class, its own first."""
    for base in kind.__mro__ if inspect.isclass(kind) else ():
        for name, member in vars(base).items():
            public = base.__module__.startswith("iris.") and not name.startswith("_")
            known = callable(plain(member)) and plain(member).__doc__
            if public and known and inspect.getattr_static(kind, name) is member:
                yield name, member


def plain(member: Any) -> Any:
    """The function behind a method, a property, or a function of Triton's."""
    for name in ("__func__", "fget", "_function", "fn"):
        member = getattr(member, name, member)
    return member


class Bare(str):
    """An annotation, or the name of a default, that shows without quotes."""

    __repr__ = str.__str__


def bare(annotation: Any) -> Any:
    """An annotation without the modules of names."""
    if annotation is inspect.Signature.empty:
        return annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return Bare(re.sub(r"\b(?:\w+\.)+(?=\w)", "", text.replace("'", "").replace('"', "")))


def named(default: Any) -> Any:
    """A function as its name: its own text has an address in it."""
    return Bare(default.__name__) if inspect.isfunction(default) else default


def signature(function: Any, name: str) -> str:
    """The signature in one line, or where that is too long a line for each parameter."""
    found = inspect.signature(function)
    own = [
        part.replace(annotation=bare(part.annotation), default=named(part.default))
        for part in found.parameters.values()
        if part.name not in ("self", "cls")
    ]
    result = found.empty if inspect.isclass(function) else bare(found.return_annotation)
    text = str(found.replace(parameters=own, return_annotation=result))
    if len(name + text) <= WIDTH:
        return name + text
    inside, _, after = text[1:].rpartition(")")
    listed = ",\n    ".join(parameters(inside))
    return f"{name}(\n    {listed},\n){after}"


def parameters(text: str) -> Iterator[str]:
    """The text of each parameter: commas in brackets do not part them."""
    depth, start = 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            yield text[start:at].strip()
            start = at + 1
    yield text[start:].strip()


def docstring(text: str, up: str) -> str:
    """A docstring as markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    text = re.sub(r"\s*\(see NOTE [^)]*\)", "", text)
    text = text.replace("Example::\n", "For example:\n").replace("::\n", ":\n")
    return "\n\n".join(joined(re.split(r"\n{2,}", text), up))


def joined(blocks: list[str], up: str) -> Iterator[str]:
    """Paragraphs, arguments as lists, and code: indented paragraphs in a row are one piece."""
    code: list[str] = []
    for block in [*blocks, ""]:
        if block.startswith("    "):
            code.append(block)
            continue
        if code:
            yield fenced("python", textwrap.dedent("\n\n".join(code)))
            code = []
        if block.startswith("Args:\n"):
            yield linked(arguments(block), up)
        elif block.startswith(">>> "):
            yield fenced("pycon", re.sub(r"\s+# doctest: .*", "", block))
        else:
            yield linked(block, up)


def arguments(block: str) -> str:
    """``Args:`` as a list."""
    body = textwrap.dedent(block.partition("\n")[2])
    pairs = (line.partition(": ") for line in re.sub(r"\n\s+", " ", body).splitlines())
    return "\n".join(f"- **{name}**: {text.strip()}" for name, _, text in pairs)


def linked(block: str, up: str) -> str:
    """``block`` with links: to the catalogue for each error, and to pages that it names."""
    block = re.sub(r"docs/([\w/-]+)\.md", rf"[\1]({up}\1.md)", block)
    return re.sub(
        rf"`?\b(?:iris\.)?({ERRORS})\b`?",
        lambda found: f"[{found[1]}]({up}errors.md#{found[1].lower()})",
        block,
    )


def fenced(kind: str, code: str) -> str:
    return f"```{kind}\n{code}\n```"


def knobs(up: str) -> Iterator[str]:
    """All knobs, as a table."""
    yield "| variable | meaning | value | if not set |"
    yield "| --- | --- | --- | --- |"
    for knob in iris.knobs():
        default: Any = knob.default()
        if isinstance(default, Path):
            default = str(default).replace(str(Path.home()), "~")
        shown = f"`{default}`" if default and default is not True else ""
        yield f"| `{knob.name}` | {linked(knob.doc, up)} | {knob.allowed} | {shown} |"
