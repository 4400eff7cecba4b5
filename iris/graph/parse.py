"""Reads back the text of a graph: ``parse(str(graph)) == graph``."""

import ast
import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from iris.errors import GraphError
from iris.graph.nodes import Arg, Graph, Node, Ref, Token, Value
from iris.graph.types import DTYPES, Mesh, TensorType

T = TypeVar("T")

TOKEN = re.compile(
    r"""\s*(?:
      (?P<ref>%[^\s:,()=\[\]]+)
    | (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<type>[a-z]\w*\[[^\]]*\](?:[+~][\w.]+)*)
    | (?P<complex>\(-?[\d.e+-]+j\)|-?\d[\d.e+-]*j)
    | (?P<number>-?(?:\d[\w.]*(?:(?<=e)[+-]\d+)?|inf\b|nan\b))
    | (?P<token>:[\w.]+)
    | (?P<word>[^\W\d][\w.]*(?:::[\w.]+)*)
    | (?P<mark>[(),=:])
    )""",
    re.VERBOSE,
)
COMMENT = re.compile(r"\s*#\s")
HEADER = re.compile(r"graph (?P<name>.+?)\[(?P<mesh>[^\]]*)\]\((?P<inputs>.*)\):$")
CONSTANTS: dict[str, Arg] = {"None": None, "True": True, "False": False}


def parse(text: str) -> Graph:
    """The graph whose text is ``text``. GraphError names the line that does not parse.

    >>> str(parse("graph f[](%x: f32[2]):\\n  return %x\\n"))
    'graph f[](%x: f32[2]):\\n  return %x\\n'
    """
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    header = HEADER.match(lines[0][1]) if lines else None
    if header is None:
        raise GraphError("line 1: expected `graph name[axis=size](%input: type, ...):`")
    axes = [part.split("=") for part in header["mesh"].split(", ") if part]
    inputs = _at_line(lines[0][0], header["inputs"], lambda p: p.values(""))
    nodes: list[Node] = []
    bodies: dict[int, list[Node]] = {2: nodes}
    outputs: tuple[Arg, ...] = ()
    writes = []
    for number, line in reversed(
        lines[1:]
    ):  # from the last line, so that bodies are there when their stage comes
        indent = len(line) - len(line.lstrip())
        if line.startswith("  return"):
            outputs = _at_line(number, line[len("  return") :], lambda p: p.args(""))
        elif line.startswith("  write "):
            target, _, value = line.removeprefix("  write ").partition(" <- ")
            writes.append((target.strip()[1:], value.strip()[1:]))
        else:
            body = tuple(reversed(bodies.pop(indent + 4, [])))
            node = _at_line(number, line, partial(_Reader.node, body=body))
            bodies.setdefault(indent, []).append(node)
    if len(bodies) > 1:
        raise GraphError(f"line {lines[-1][0]}: a body without its stage")
    return Graph(
        header["name"],
        Mesh(tuple((axis, int(size)) for axis, size in axes)),
        inputs,
        tuple(reversed(nodes)),
        outputs,
        tuple(reversed(writes)),
    )


def parse_type(text: str) -> TensorType:
    """The type whose text is ``text``: ``bf16[4096/tp, 8192]+dp``."""
    found = re.fullmatch(r"(\w+)\[([^\]]*)\]((?:[+~][\w.]+)*)", text)
    if found is None or found[1] not in DTYPES:
        raise GraphError(f"not a type: {text!r}")
    dims = [dim.split("/") for dim in found[2].split(", ") if dim]
    marks = re.findall(r"([+~])([\w.]+)", found[3])
    return TensorType(
        found[1],
        tuple(int(n) for n, *_ in dims),
        tuple(tuple(axes) for _, *axes in dims),
        tuple(axis for mark, axis in marks if mark == "+"),
        tuple(axis for mark, axis in marks if mark == "~"),
    )


def _at_line(number: int, text: str, read: Callable[["_Reader"], T]) -> T:
    """``read`` applied to ``text``, its errors naming the line."""
    try:
        return read(_Reader(text))
    except GraphError as error:
        raise GraphError(f"line {number}: {error.message}") from None
    except ValueError as error:
        raise GraphError(f"line {number}: {error}") from None


class _Reader:
    """Tokens of one line, read from the left."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        self.loc, place, text = "", 0, text.rstrip()
        while place < len(text):
            found = COMMENT.match(text, place)
            if found:
                self.loc = text[found.end() :]
                break
            found = TOKEN.match(text, place)
            if found is None or found.lastgroup is None:
                raise GraphError(f"cannot read {text[place:].strip()!r}")
            self.tokens.append((found.lastgroup, found[found.lastgroup]))
            place = found.end()
        self.tokens.append(("end", ""))
        self.next = 0

    def peek(self, ahead: int = 0) -> tuple[str, str]:
        return self.tokens[min(self.next + ahead, len(self.tokens) - 1)]

    def take(self, *wanted: str) -> str:
        """The next token; error unless its text or kind is one of ``wanted``."""
        kind, text = self.peek()
        if text not in wanted and kind not in wanted:
            raise GraphError(f"expected {' or '.join(wanted)}, found {text or 'the end'!r}")
        self.next += 1
        return text

    def node(self, body: tuple[Node, ...]) -> Node:
        outputs: tuple[Value, ...] = ()
        if self.peek()[0] == "ref":
            outputs = self.values("=")
            self.take("=")
        op = self.take("word", "type")
        self.take("(")
        args: list[Arg] = []
        attrs: list[tuple[str, Arg]] = []

        def argument() -> None:
            if self.peek()[0] == "word" and self.peek(1)[1] == "=":
                key = self.take("word")
                self.take("=")
                attrs.append((key, self.arg()))
            else:
                args.append(self.arg())

        self._listed(")", argument)
        self.take(")")
        if body:
            self.take(":")
        self.take("end")
        return Node(op, tuple(args), tuple(attrs), outputs, self.loc, body)

    def values(self, stop: str) -> tuple[Value, ...]:
        """``%x: type, %y: type`` up to ``stop``."""
        return self._listed(stop, self._value)

    def args(self, stop: str) -> tuple[Arg, ...]:
        """Arguments up to ``stop``."""
        return self._listed(stop, self.arg)

    def _value(self) -> Value:
        name = self.take("ref")[1:]
        self.take(":")
        return Value(name, parse_type(self.take("type")))

    def _listed(self, stop: str, read: Callable[[], T]) -> tuple[T, ...]:
        found = []
        while self.peek()[1] != stop:
            found.append(read())
            if self.peek()[1] != stop:
                self.take(",")
        return tuple(found)

    def arg(self) -> Arg:
        kind, text = self.peek()
        self.next += 1
        if kind == "ref":
            return Ref(text[1:])
        if kind == "token":
            return Token(text[1:])
        if kind == "string":
            return str(ast.literal_eval(text))
        if kind == "word":
            return CONSTANTS.get(text, text)
        if kind == "complex":
            return complex(text)
        if kind == "number":
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        if text == "(":
            items = self.args(")")
            self.take(")")
            return items
        raise GraphError(f"expected an argument, found {text or 'the end'!r}")
