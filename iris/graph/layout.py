"""Places boxes in layers, top to bottom, and routes edges between them.

The usual four steps (Sugiyama, Tagawa and Toda, 1981): layers by longest path, a stand-in wherever
a long edge crosses a layer, order within layers by the mean place of neighbours, x by the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import networkx as nx

GAP_X, GAP_Y = 30.0, 34.0
SWEEPS = 12

Point = tuple[float, float]
Edge = tuple[str, str, str]  # from box, to box, name of what it carries
Slot = tuple[str, str, int]  # a box ("box", "", 0), or a stand-in for (box, name) on a layer


@dataclass(frozen=True)
class Layout:
    """Centres of the boxes, the points that each edge goes through, and the size of it all."""

    centres: dict[str, Point]
    routes: dict[Edge, list[Point]]
    width: float
    height: float


def layered(sizes: Mapping[str, Point], edges: Sequence[Edge]) -> Layout:
    """Lay out boxes of ``sizes`` (width, height) joined by ``edges``, which have no cycle."""
    layer = layers(sizes, edges)
    chains = {edge: _chain(edge, layer) for edge in edges}
    graph = nx.DiGraph()
    graph.add_nodes_from((box, "", 0) for box in sizes)
    for chain in chains.values():
        nx.add_path(graph, chain)
    rows: list[list[Slot]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    for slot in nx.topological_sort(graph):
        rows[slot[2] or layer[slot[0]]].append(slot)
    _order(graph, rows)
    widths = {slot: sizes[slot[0]][0] if not slot[2] else 0.0 for slot in graph}
    x = _place(graph, rows, widths)
    heights = [max(sizes[box][1] for box, _, via in row if not via) for row in rows]
    tops = list(accumulate((h + GAP_Y for h in heights), initial=0.0))
    centres = {box: (x[box, "", 0], tops[i] + heights[i] / 2) for box, i in layer.items()}
    routes = {
        edge: [(x[slot], at) for slot in chain for at in _crossing(slot, tops, heights)]
        for edge, chain in chains.items()
    }
    return Layout(
        centres,
        {(a, b, n): [centres[a], *route, centres[b]] for (a, b, n), route in routes.items()},
        max((x[slot] + widths[slot] / 2 for slot in graph), default=0.0),
        tops[-1] - GAP_Y if rows else 0.0,
    )


def layers(boxes: Mapping[str, Point], edges: Sequence[Edge]) -> dict[str, int]:
    """The layer of each box: below all it needs; what leads to one box only is right above it."""
    graph = nx.DiGraph()
    graph.add_nodes_from(boxes)
    graph.add_edges_from((start, stop) for start, stop, _ in edges)
    layer = {box: i for i, found in enumerate(nx.topological_generations(graph)) for box in found}
    order = list(nx.topological_sort(graph))
    loose: set[str] = set()  # all that it needs leads nowhere else
    for box in order:
        if all(n in loose and graph.out_degree(n) == 1 for n in graph.predecessors(box)):
            loose.add(box)
    for box in reversed(order):
        if box in loose and graph.out_degree(box):
            layer[box] = min(layer[reader] for reader in graph.successors(box)) - 1
    top = min(layer.values(), default=0)
    return {box: i - top for box, i in layer.items()}


def _chain(edge: Edge, layer: Mapping[str, int]) -> list[Slot]:
    """The edge's ends, and a stand-in on each layer between. Edges of one value share theirs."""
    start, stop, name = edge
    between = range(layer[start] + 1, layer[stop])
    return [(start, "", 0), *((start, name, i) for i in between), (stop, "", 0)]


def _crossing(slot: Slot, tops: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Where an edge enters and leaves the layer of a stand-in: straight through, past its boxes."""
    return [tops[slot[2]], tops[slot[2]] + heights[slot[2]]] if slot[2] else []


def _order(graph: nx.DiGraph, rows: list[list[Slot]]) -> None:
    """Sort each row by the mean place of its neighbours above, then below, and so on."""
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        neighbours = graph.predecessors if down else graph.successors
        place = {slot: i / len(row) for row in rows for i, slot in enumerate(row)}
        for row in rows if down else reversed(rows):
            pull = {slot: _mean([place[n] for n in neighbours(slot)], place[slot]) for slot in row}
            row.sort(key=pull.__getitem__)
            place.update((slot, i / len(row)) for i, slot in enumerate(row))


def _place(
    graph: nx.DiGraph, rows: list[list[Slot]], widths: Mapping[Slot, float]
) -> dict[Slot, float]:
    """x of every slot: near its neighbours, in its row's order, without overlap, from 0."""
    x: dict[Slot, float] = {}
    for row in rows:
        x.update(_spread(row, dict.fromkeys(row, 0.0), widths))
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        neighbours = graph.predecessors if down else graph.successors
        for row in rows if down else reversed(rows):
            wish = {slot: _mean([x[n] for n in neighbours(slot)], x[slot]) for slot in row}
            x.update(_spread(row, wish, widths))
    left = min((x[slot] - widths[slot] / 2 for slot in x), default=0.0)
    return {slot: at - left for slot, at in x.items()}


def _spread(
    row: Sequence[Slot], wish: Mapping[Slot, float], widths: Mapping[Slot, float]
) -> dict[Slot, float]:
    """The places nearest to ``wish`` (least squares) that keep the row's order and its gaps.

    Without the gaps that is isotonic regression: neighbours in the wrong order pool their wishes.
    """
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + (widths[left] + widths[right]) / 2 + GAP_X)
    pools: list[tuple[float, int]] = []  # sum of wishes, number of slots
    for slot, offset in zip(row, offsets, strict=True):
        total, count = wish[slot] - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            total, count = total + pools[-1][0], count + pools[-1][1]
            pools.pop()
        pools.append((total, count))
    places = [total / count for total, count in pools for _ in range(count)]
    return {slot: at + offset for slot, at, offset in zip(row, places, offsets, strict=True)}


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default
