"""A picture of a graph: stages as boxes, compute blue, communication orange, types on edges."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from iris.errors import UnsupportedError
from iris.graph.layout import Edge, Layout, Point, layered
from iris.graph.nodes import Graph, Node, Value, refs
from iris.graph.ops import COLLECTIVES, effects
from iris.graph.ops.views import VIEWS
from iris.graph.printing import format_arg

CHAR, LINE, SMALL, PAD = 6.7, 17.0, 13.0, 9.0  # of text in 11 px monospace
FONT = 11
MARGIN = 24.0
WIDEST = 44  # characters on one line
HIDDEN = frozenset({"layout", "device", "pin_memory", "memory_format"})

EDGE, FAINT = "#7d7d77", "#6a6a64"

# What a box or line of text is about: fill, border.
COLOURS = {
    "compute": ("#dbe9fb", "#2f6db3"),
    "communicates": ("#ffe3c2", "#cc6a00"),
    "random": ("#e8dcf7", "#7a45b5"),
    "view": ("#f4f4f2", "#a5a59d"),
    "stage": ("#ffffff", "#3a3a38"),
    "value": ("#e3f1df", "#4d8a3c"),
}


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    kind: str


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    text: str
    colour: str = "#1c1c1a"
    bold: bool = False


@dataclass(frozen=True)
class Curve:
    """A smooth line through points, with an arrow head at the last."""

    points: tuple[Point, ...]


Shape = Rect | Text | Curve


@dataclass(frozen=True)
class Card:
    """A box with its lines of text, each of a kind, and below it the types of what it makes."""

    lines: list[tuple[str, str]]
    types: list[str] = field(default_factory=list)

    @property
    def width(self) -> float:
        """Of the box."""
        return max(len(text) for text, _ in self.lines) * CHAR + 2 * PAD

    @property
    def height(self) -> float:
        """Of the box."""
        return len(self.lines) * LINE + PAD

    @property
    def size(self) -> Point:
        """Of the box and the types below it."""
        widest = max((len(text) * CHAR for text in self.types), default=0.0)
        return max(self.width, widest), self.height + len(self.types) * SMALL + bool(self.types) * 4


def draw(program: Any, path: str | Path | None = None) -> str:
    """A picture of a graph, or of a traced or lowered program, as SVG text; written to ``path``
    too, as .svg or .png.

    Stages are boxes around the nodes that they replace, compute and communication have different
    colours, edges carry types. UnsupportedError for another ending, or for .png where matplotlib
    is not installed.

    >>> svg = iris.draw(mlp.trace(x, w_up, w_down).lower(), "mlp.svg")       # doctest: +SKIP
    >>> from iris.graph.parse import parse
    >>> draw(parse("graph f[](%x: f32[2]):\\n  return %x\\n"))[:4]
    '<svg'
    """
    shapes, width, height = picture(getattr(program, "graph", program))
    svg = to_svg(shapes, width, height)
    ending = Path(path).suffix if path is not None else ".svg"
    if ending not in (".svg", ".png"):
        raise UnsupportedError(f"cannot draw to {path}", help="use a name ending in .svg or .png")
    if path is not None and ending == ".svg":
        Path(path).write_text(svg)
    elif path is not None:
        save_png(shapes, width, height, Path(path))
    return svg


def picture(graph: Graph) -> tuple[list[Shape], float, float]:
    """All shapes of the picture, and its width and height."""
    cards = {f"%{value.name}": Card([(_typed(value), "value")]) for value in graph.inputs}
    makers = {value.name: f"%{value.name}" for value in graph.inputs}
    edges: list[Edge] = []
    chains = _chains(graph)
    for node, card in zip(graph.nodes, chains, strict=True):
        lines = [*(cards[card].lines if card in cards else ()), *_lines(node)]
        cards[card] = Card(lines, [_typed(value) for value in node.outputs])
        edges += [(makers[name], card, name) for name in node.uses if makers[name] != card]
        makers.update((value.name, card) for value in node.outputs)
    edges = [*dict.fromkeys(edges)]
    ends = [(f"return {format_arg(arg)}", tuple(refs((arg,)))) for arg in graph.outputs]
    ends += [(f"write %{target}", (name,)) for target, name in graph.writes]
    for number, (text, names) in enumerate(ends):
        cards[f"end {number}"] = Card([(text, "value")])
        edges += [(makers[name], f"end {number}", name) for name in names]
    sizes = {name: card.size for name, card in cards.items()}
    layout = layered(sizes, edges)
    shapes = [*_edges(layout, sizes), *_boxes(layout, cards), *_legend(graph, layout)]
    return shapes, layout.width + 2 * MARGIN, layout.height + 2 * MARGIN + 2 * LINE


def _chains(graph: Graph) -> list[str]:
    """The box of every node. One that alone reads what a box ends with goes into that box, unless
    it waits for yet another.
    """
    readers, live = graph.users(), set(graph.live_out)
    boxes: list[str] = []
    maker: dict[str, str] = {value.name: "" for value in graph.inputs}
    sources: dict[str, set[str]] = {}  # of each box that may grow
    end: dict[str, str] = {}  # by the value it ends with
    for number, node in enumerate(graph.nodes):
        ends = [name for name in node.uses if name in end and not node.body]
        box = end[ends[0]] if ends else ""
        if not box or {maker[name] for name in node.uses} - sources[box] - {box, ""}:
            box = f"node {number}"
        boxes.append(box)
        maker.update((value.name, box) for value in node.outputs)
        if not node.body:
            sources.setdefault(box, set()).update(maker[name] for name in node.uses)
            names = [value.name for value in node.outputs]
            if len(names) == 1 and len(readers.get(names[0], ())) == 1 and names[0] not in live:
                end[names[0]] = box
    return boxes


def _lines(node: Node) -> list[tuple[str, str]]:
    """Text and kind of every line of a node's box: of a stage, its name and its body."""
    if not node.body:
        return [(_call(node), _kind(node))]
    title = f"{node.op}  {node.loc}" if node.loc else node.op
    return [(title, "stage"), *((_call(inner), _kind(inner)) for inner in node.body)]


def _call(node: Node) -> str:
    args = [format_arg(arg) for arg in node.args]
    args += [f"{key}={format_arg(arg)}" for key, arg in node.attrs if key not in HIDDEN]
    text = f"{node.op.partition('.')[0]}({', '.join(args)})"
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _kind(node: Node) -> str:
    if node.op in COLLECTIVES:
        return "communicates"
    if effects(node):
        return "random"
    return "view" if node.op.partition(".")[0] in VIEWS else "compute"


def _typed(value: Value) -> str:
    return f"%{value.name}: {value.type}"


def _boxes(layout: Layout, cards: dict[str, Card]) -> Iterable[Shape]:
    for name, card in cards.items():
        left, top = (
            at - n / 2 + MARGIN for at, n in zip(layout.centres[name], card.size, strict=True)
        )
        left += (card.size[0] - card.width) / 2
        many = len(card.lines) > 1
        yield Rect(left, top, card.width, card.height, "stage" if many else card.lines[0][1])
        for i, (text, kind) in enumerate(card.lines):
            row = top + PAD / 2 + i * LINE
            if many and kind != "stage":
                yield Rect(left + 4, row + 1, card.width - 8, LINE - 2, kind)
            yield Text(left + PAD, row + LINE - 5, text, bold=kind == "stage")
        for i, text in enumerate(card.types, 1):
            width = len(text) * CHAR
            at = left + (card.width - width) / 2
            yield Text(at, top + card.height + i * SMALL, text, FAINT)


def _edges(layout: Layout, sizes: dict[str, Point]) -> Iterable[Shape]:
    starts = _ports(layout, sizes, end=0)
    stops = _ports(layout, sizes, end=1)
    for (start, stop, name), route in layout.routes.items():
        first = (starts[start, name], layout.centres[start][1] + sizes[start][1] / 2)
        last = (stops[stop, name], layout.centres[stop][1] - sizes[stop][1] / 2)
        yield Curve(tuple((x + MARGIN, y + MARGIN) for x, y in (first, *route[1:-1], last)))


def _ports(layout: Layout, sizes: dict[str, Point], end: int) -> dict[tuple[str, str], float]:
    """x at which each value leaves (end 0) or enters (end 1) each box, in order of its edges."""
    pulls: dict[str, dict[str, float]] = {}
    for edge, route in layout.routes.items():
        near = route[1] if end == 0 else route[-2]
        pulls.setdefault(edge[end], {}).setdefault(edge[2], near[0])
    ports = {}
    for box, pull in pulls.items():
        left, width = layout.centres[box][0] - sizes[box][0] / 2, sizes[box][0]
        for i, name in enumerate(sorted(pull, key=pull.__getitem__), 1):
            ports[box, name] = left + width * i / (len(pull) + 1)
    return ports


def _legend(graph: Graph, layout: Layout) -> Iterable[Shape]:
    """The graph's name and mesh, and what the colours mean, below the picture."""
    row, x = layout.height + MARGIN + LINE, MARGIN
    title = f"{graph.name}  [{graph.mesh}]"
    yield Text(x, row + LINE - 5, title, bold=True)
    x += len(title) * CHAR + 3 * PAD
    for kind in ("compute", "communicates", "view", "random"):
        yield Rect(x, row, len(kind) * CHAR + 2 * PAD, LINE, kind)
        yield Text(x + PAD, row + LINE - 5, kind)
        x += len(kind) * CHAR + 3 * PAD


def to_svg(shapes: Iterable[Shape], width: float, height: float) -> str:
    """The shapes as SVG text."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="monospace" font-size="{FONT}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for shape in shapes:
        if isinstance(shape, Rect):
            fill, stroke = COLOURS[shape.kind]
            lines.append(
                f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" '
                f'height="{shape.height:.1f}" rx="4" fill="{fill}" stroke="{stroke}"/>'
            )
        elif isinstance(shape, Text):
            weight = ' font-weight="bold"' if shape.bold else ""
            lines.append(
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" fill="{shape.colour}"{weight} '
                f'xml:space="preserve">{escape(shape.text)}</text>'
            )
        else:
            path = " ".join(
                f"{letter}" + " ".join(f"{x:.1f} {y:.1f}" for x, y in points)
                for letter, points in _bends(shape)
            )
            x, y = shape.points[-1]
            lines.append(f'<path d="{path}" fill="none" stroke="{EDGE}"/>')
            lines.append(f'<path d="M{x:.1f} {y:.1f} l-3 -6 h6 z" fill="{EDGE}"/>')
    return "\n".join([*lines, "</svg>", ""])


def _bends(curve: Curve) -> list[tuple[str, list[Point]]]:
    """Path commands of a curve: it leaves and enters every point straight down."""
    commands = [("M", [curve.points[0]])]
    for (x, y), (nx, ny) in zip(curve.points, curve.points[1:], strict=False):
        middle = (y + ny) / 2
        commands.append(("C", [(x, middle), (nx, middle), (nx, ny)]))
    return commands


def save_png(shapes: Iterable[Shape], width: float, height: float, path: Path) -> None:
    """Draw the shapes with matplotlib, two pixels to each unit."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch, PathPatch, Polygon
        from matplotlib.path import Path as Outline
    except ImportError:
        raise UnsupportedError(
            "drawing a .png needs matplotlib", help="pip install matplotlib, or draw to .svg"
        ) from None
    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for shape in shapes:
        if isinstance(shape, Rect):
            fill, stroke = COLOURS[shape.kind]
            corner, size = (shape.x, shape.y), (shape.width, shape.height)
            style = "round,pad=0,rounding_size=4"
            axes.add_patch(
                FancyBboxPatch(corner, *size, boxstyle=style, facecolor=fill, edgecolor=stroke)
            )
        elif isinstance(shape, Text):
            weight = "bold" if shape.bold else "normal"
            axes.text(
                *(shape.x, shape.y, shape.text),
                color=shape.colour,
                family="monospace",
                size=FONT,
                weight=weight,
                parse_math=False,
            )
        else:
            codes, points = [], []
            for letter, at in _bends(shape):
                codes += [Outline.MOVETO if letter == "M" else Outline.CURVE4] * len(at)
                points += at
            axes.add_patch(PathPatch(Outline(points, codes), facecolor="none", edgecolor=EDGE))
            x, y = shape.points[-1]
            axes.add_patch(Polygon([(x, y), (x - 3, y - 6), (x + 3, y - 6)], color=EDGE))
    FigureCanvasAgg(figure).print_figure(path, dpi=144)
