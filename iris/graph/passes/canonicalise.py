"""Removes what has no use: dead nodes, chains of views, casts and copies that change nothing,
batches of one matrix.
"""

from dataclasses import replace

from iris.graph.nodes import Arg, Graph, Node, Ref, Value, map_refs, rename
from iris.graph.ops import effects
from iris.graph.ops.views import permutation
from iris.graph.passes.memory import RENAMES, base, exposed, is_view
from iris.graph.types import TensorType
from iris.graph.verify import infer_types

RESHAPES = frozenset({"view", "_unsafe_view"})
PERMUTES = frozenset({"t", "transpose", "permute"})
COPIES = frozenset({"clone", "_to_copy"})


def canonicalise(graph: Graph) -> Graph:
    """``t(t(x)) => x``, ``view(view(x)) => view(x)``, ``clone(x) => x``; nodes nobody reads go.

    ``x @ expand(w) => view(view(x) @ w)`` where x is ``[1, M, K]`` or ``[B, 1, K]``: torch makes a
    batch of it where its strides are odd, as in a step of decoding.

    Nodes with effects stay, read or not. A copy stays where the caller could tell: its memory
    reaches an output, or its strides may not be those of what it copies.
    """
    return drop_dead(fold(graph))


def drop_dead(graph: Graph) -> Graph:
    """Without the nodes whose outputs nobody reads and that have no effects."""
    live, kept = set(graph.live_out), []
    for node in reversed(graph.nodes):
        if any(value.name in live for value in node.outputs) or effects(node):
            kept.append(node)
            live.update(node.uses)
    return graph.with_nodes(tuple(reversed(kept)))


def fold(graph: Graph) -> Graph:
    """Views of views made one, identities made nothing."""
    folding = _Folding(graph)
    nodes = tuple(folded for node in graph.nodes for folded in folding.visit(node))
    if nodes == graph.nodes:
        return graph
    outputs = tuple(map_refs(arg, folding.current) for arg in graph.outputs)
    writes = tuple((target, folding.names.get(value, value)) for target, value in graph.writes)
    return replace(graph, nodes=nodes, outputs=outputs, writes=writes)


class _Folding:
    """One walk over a graph: who made each value, and by which name it goes now."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.types = dict(graph.types)
        self.names: dict[str, str] = {}
        self.makers: dict[str, Node] = {}
        self.outputs = set(graph.live_out)
        self.exposed = exposed(graph)

    def current(self, name: str) -> Arg:
        return Ref(self.names.get(name, name))

    def visit(self, node: Node) -> tuple[Node, ...]:
        """``node`` with its views folded; nothing if it is an identity."""
        node = rename(node, self.names) if self.names else node
        kind = base(node.op)
        if kind in RESHAPES:
            node = self._merge_views(node)
        elif kind in PERMUTES:
            node = self._merge_permutes(node)
        if self._is_identity(node, kind):
            self.names[node.out.name] = node.uses[0]
            return ()
        found = self._flattened(node) if node.op == "matmul" else (node,)
        self.makers.update((value.name, one) for one in found for value in one.outputs)
        return found

    def _flattened(self, node: Node) -> tuple[Node, ...]:
        """A product of a matrix with odd strides and one weight, as a product of two matrices."""
        x, wide = node.uses[0], self.makers.get(node.uses[-1])
        shape = self._local(node.out.type)
        one_row = len(shape) == 3 and 1 in node.out.type.shape[:2]
        if not one_row or wide is None or base(wide.op) != "expand":
            return (node,)
        (weight,) = wide.uses
        if len(self.types[weight].shape) != 2:
            return (node,)
        rows = shape[0] * shape[1], self._local(self.types[x])[-1]
        flat = self._made(node, "view", (Ref(x), rows), rows)
        product = self._made(
            node, "matmul", (Ref(flat.out.name), Ref(weight)), (rows[0], shape[-1])
        )
        back = replace(node, op="view", args=(Ref(product.out.name), shape), attrs=())
        return (flat, product, back) if self._types_hold(back) else (node,)

    def _made(self, like: Node, op: str, args: tuple[Arg, ...], shape: tuple[int, ...]) -> Node:
        """A new node whose result has this local shape."""
        name = f"{op}_of_{like.out.name}"
        while name in self.types:
            name += "_"
        guess = Value(name, TensorType(like.out.type.dtype, shape))
        node = Node(op, args, (), (guess,), like.loc)
        (type_,) = infer_types(node, self.types, self.graph.mesh, self.graph.place)
        self.types[name] = type_
        return replace(node, outputs=(Value(name, type_),))

    def _local(self, type_: TensorType) -> tuple[int, ...]:
        return type_.local_shape(self.graph.mesh, self.graph.place)

    def _merge_views(self, node: Node) -> Node:
        inner = self.makers.get(node.uses[0])
        if inner is None or inner.op not in RESHAPES or node.op not in RESHAPES:
            return node
        merged = replace(node, args=(inner.args[0], *node.args[1:]))
        return merged if self._types_hold(merged) else node

    def _merge_permutes(self, node: Node) -> Node:
        inner = self.makers.get(node.uses[0])
        if inner is None or base(inner.op) not in PERMUTES:
            return node
        first, second = (permutation(len(n.out.type.shape), n.args[1:]) for n in (inner, node))
        order = tuple(first[d] for d in second)
        return replace(node, op="permute", args=(inner.args[0], order), attrs=())

    def _types_hold(self, node: Node) -> bool:
        """Whether the rule still gives the types that the rest of the graph was made for."""
        types = infer_types(node, self.types, self.graph.mesh, self.graph.place)
        return types == tuple(value.type for value in node.outputs)

    def _is_identity(self, node: Node, kind: str) -> bool:
        """Whether ``node`` gives back its operand, and nobody could tell the two apart."""
        if kind in RESHAPES | PERMUTES | RENAMES | {"slice", "expand"}:
            same = self.types[node.uses[0]] == node.out.type
            order = permutation(len(node.out.type.shape), node.args[1:]) if kind in PERMUTES else []
            plain = same and order == sorted(order) and len(node.uses) == 1
            return plain and self._may_return_source(node)
        return kind in COPIES and self._is_plain_copy(node)

    def _may_return_source(self, node: Node) -> bool:
        """Whether what ``node`` views may be returned in its place, if that is returned at all: a
        value of the program's own, and not returned itself.
        """
        source, name = node.uses[0], node.out.name
        if name not in self.outputs:
            return True
        if source not in self.makers or source in self.outputs:
            return False
        self.outputs.add(source)
        return True

    def _is_plain_copy(self, node: Node) -> bool:
        """A copy of a dense intermediate, in its dtype and strides, that stays in the program."""
        source = node.uses[0]
        maker = self.makers.get(source)
        dense = maker is not None and not is_view(maker)
        plain = all(key == "dtype" for key, _ in node.attrs) and len(node.args) == 1
        same = self.types[source] == node.out.type
        return dense and plain and same and node.out.name not in self.exposed
