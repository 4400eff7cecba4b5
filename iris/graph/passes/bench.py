"""A graph on the bench: nodes become stages in place, each at the cost of what is around it."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from iris.graph.nodes import Graph, Node, Ref
from iris.graph.ops import effects
from iris.graph.verify import external_uses

# Nodes further apart than this are not brought together: it keeps fusing linear in the size of
# the graph.
REACH = 1000


@dataclass(frozen=True)
class Obstacle:
    """Why nodes cannot run as one: ``node`` needs ``between``, which needs another of them."""

    node: int
    between: Node


class Bench:
    """The nodes of a graph by number, with makers and readers of every value.

    Numbers do not change; ``slot`` gives the place of a node in the order. A contracted node takes
    a new number.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = dict(enumerate(graph.nodes))
        self.order: list[int | None] = list(self.nodes)
        self.slot = {number: number for number in self.nodes}
        self.uses = {number: frozenset(node.uses) for number, node in self.nodes.items()}
        self.maker: dict[str, int] = {}
        self.readers: dict[str, set[int]] = {}
        self.live = set(graph.live_out)
        self.effectful = {number for number, node in self.nodes.items() if effects(node)}
        self.types = graph.types
        self._shapes: dict[str, tuple[int, ...]] = {}
        for number, node in self.nodes.items():
            self.maker.update((value.name, number) for value in node.outputs)
            for name in self.uses[number]:
                self.readers.setdefault(name, set()).add(number)

    def readers_of(self, name: str) -> list[int]:
        """Numbers of the nodes that read ``name``, in order."""
        return sorted(self.readers.get(name, ()), key=self.slot.__getitem__)

    def is_private(self, name: str, group: Collection[int]) -> bool:
        """Whether only nodes of ``group`` read ``name``."""
        return name not in self.live and self.readers.get(name, set()) <= set(group)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a value on the first rank."""
        if name not in self._shapes:
            mesh = self.graph.mesh
            self._shapes[name] = self.types[name].local_shape(mesh, mesh.origin)
        return self._shapes[name]

    def local(self, name: str) -> tuple[int, ...]:
        """Shape of a value on the rank that traced the graph."""
        return self.types[name].local_shape(self.graph.mesh, self.graph.place)

    def obstacle(self, group: Collection[int]) -> Obstacle | None:
        """What keeps the nodes of ``group`` from running as one, or None."""
        return self._around(group)[2]

    def contract(self, group: Collection[int], op: str, loc: str) -> int:
        """Make the nodes of ``group``, which have no obstacle, one stage. Returns its number."""
        window = self._window(group)
        first, last, _ = self._around(group)
        stage = self._replace([n for n in window if n in group], op, loc)
        start, stop = self.slot[window[0]], self.slot[window[-1]] + 1
        order = [*first, stage, *last]
        self.order[start:stop] = order + [None] * (stop - start - len(order))
        self.slot.update((number, place) for place, number in enumerate(order, start))
        return stage

    def _around(self, group: Collection[int]) -> tuple[list[int], list[int], Obstacle | None]:
        """Nodes amid ``group``: which run before it, which after it, and what is in the way.

        What comes after a node of the group, by its data or by the order of effects, has to run
        after all of it, so none of the group may need that.
        """
        made = {value.name for number in group for value in self.nodes[number].outputs}
        late: dict[
            str, Node
        ] = {}  # values that come after the group, and the node that makes it so
        effect: Node | None = None  # an effect that has to come after the group
        begun = False  # an effect of the group is behind us
        first: list[int] = []
        last: list[int] = []
        for number in self._window(group):
            node, uses = self.nodes[number], self.uses[number]
            if number in group:
                between = next((late[name] for name in uses if name in late), None)
                if number in self.effectful:
                    between, begun = between or effect, True
                if between is not None:
                    return first, last, Obstacle(number, between)
            elif (
                not uses.isdisjoint(made)
                or not uses.isdisjoint(late)
                or (number in self.effectful and (begun or effect is not None))
            ):
                cause = next((late[name] for name in uses if name in late), node)
                late.update((value.name, cause) for value in node.outputs)
                effect = node if number in self.effectful else effect
                last.append(number)
            else:
                first.append(number)
        return first, last, None

    def _replace(self, body: list[int], op: str, loc: str) -> int:
        """Put a stage with this body in the tables, in place of its nodes."""
        nodes = tuple(self.nodes[number] for number in body)
        group = set(body)
        outputs = tuple(
            value
            for node in nodes
            for value in node.outputs
            if not self.is_private(value.name, group)
        )
        uses = external_uses(nodes)
        stage = len(self.nodes)
        self.nodes[stage] = Node(op, tuple(map(Ref, uses)), (), outputs, loc, nodes)
        self.uses[stage] = frozenset(uses)
        self.effectful.add(stage)
        self.slot[stage] = -1
        for number in body:
            for name in self.uses[number]:
                self.readers[name].discard(number)
        for name in uses:
            self.readers[name].add(stage)
        self.maker.update((value.name, stage) for node in nodes for value in node.outputs)
        return stage

    def _window(self, group: Iterable[int]) -> list[int]:
        """Numbers from the first to the last node of ``group``, in order."""
        slots = [self.slot[number] for number in group]
        return [n for n in self.order[min(slots) : max(slots) + 1] if n is not None]

    def reach(self, group: Iterable[int]) -> int:
        """How many places apart the first and the last of ``group`` are."""
        slots = [self.slot[number] for number in group]
        return max(slots) - min(slots)

    def result(self) -> Graph:
        """The graph as it stands."""
        return self.graph.with_nodes(tuple(self.nodes[n] for n in self.order if n is not None))
