"""Which kernel computes a stage, and which of the stage's nodes are left to torch.

A stage's body is cut up: nodes that run before the kernel, the core (products, the collective, a
norm), the pointwise chains that become the kernel's epilogues, and what comes after. Where a kernel
cannot serve a body, `match` says why, and the body runs node by node.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from iris.graph.nodes import Node, Value
from iris.graph.ops.rules import axes_of, shard_sizes
from iris.graph.passes.norm import Norm, NormSearch
from iris.graph.types import Mesh, TensorType
from iris.lower.epilogue import is_row_view, obstacle
from iris.lower.products import expanded, is_fast

FLOATS = frozenset({"f32", "f16", "bf16"})
DTYPES = FLOATS | {"f8e4m3fn", "f8e5m2", "i8"}
MOST_WEIGHTS = 3
MOST_NORMED = 16384

Types = Mapping[str, TensorType]


@dataclass(frozen=True)
class Product:
    """``left @ right``, both 2-D, giving ``result``."""

    left: str
    right: str
    result: str


@dataclass(frozen=True)
class Chain:
    """Pointwise nodes from ``tiles`` to ``result``, one epilogue; no nodes where there is none."""

    tiles: tuple[str, ...]
    nodes: tuple[Node, ...]
    result: str


@dataclass(frozen=True)
class Match:
    """A stage's body, cut for its kernel.

    ``before`` and ``after`` run as torch ops. ``early`` are the epilogues of products (one for all
    of a ``zipped`` pair), ``late`` the one of a sum, ``norm`` what follows that. ``results`` are
    stored by the kernel as [rows, columns]; ``collective`` is the node that communicates.
    """

    stage: str
    collective: Node
    results: tuple[str, ...]
    before: tuple[Node, ...] = ()
    products: tuple[Product, ...] = ()
    early: tuple[Chain, ...] = ()
    late: Chain | None = None
    norm: Norm | None = None
    after: tuple[Node, ...] = ()
    gathered: str = ""  # the gathered value, where others read it too
    fast: bool = False  # fp8 products may be summed in less than fp32

    @property
    def zipped(self) -> bool:
        """Whether two products share an epilogue."""
        return len(self.early) == 1 < len(self.products)

    @property
    def chains(self) -> tuple[Chain, ...]:
        """All epilogues."""
        return self.early if self.late is None else (*self.early, self.late)

    @property
    def values(self) -> Iterator[Value]:
        """What the nodes of the body make, expanded products included."""
        parts = (self.before, *(part.nodes for part in self.chains), self.after)
        return (value for nodes in parts for node in nodes for value in node.outputs)


@dataclass(frozen=True)
class Limits:
    """What kernels do beside products and sums: up to how many rows two weights share tiles and an
    epilogue, and whether they compute the norm of a product's sum.
    """

    paired_rows: float = math.inf
    norms: bool = True


@dataclass(frozen=True)
class _Body:
    """What is asked about a stage's body."""

    stage: Node
    nodes: Sequence[Node]
    types: Types
    mesh: Mesh
    limits: Limits = Limits()

    @cached_property
    def kept(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.stage.outputs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.types[name].shape

    def first(self, *ops: str) -> Node | None:
        return next((node for node in self.nodes if node.op in ops), None)

    @property
    def products(self) -> list[Product]:
        return [
            Product(node.uses[0], node.uses[1], node.out.name)
            for node in self.nodes
            if node.op == "matmul"
        ]


def match(stage: Node, types: Types, mesh: Mesh, limits: Limits = Limits()) -> Match | str:
    """The cut of a stage's body, or why its kernel cannot serve."""
    body, fault = expanded(stage)
    if fault:
        return fault
    types = {**types, **{value.name: value.type for node in body for value in node.outputs}}
    found = MATCHERS[stage.op](_Body(stage, body, types, mesh, limits))
    if isinstance(found, str):
        return found
    widths = {types[name].dtype for p in found.products for name in (p.left, p.right)}
    if found.products and (len(widths) != 1 or not widths <= DTYPES):
        return f"operands are {' and '.join(sorted(widths))}"
    return replace(found, fast=is_fast(stage))


def match_norm(stage: Node, types: Types, mesh: Mesh) -> Match | str:
    """The cut of a stage for the ``all_reduce_norm`` kernel; torch computes products before it."""
    return _reduce_norm(_Body(stage, stage.body, types, mesh))


def _split(body: Sequence[Node], roots: Collection[str]) -> tuple[list[Node], list[Node]]:
    """Nodes that do not need any of ``roots``, and those that do."""
    tainted, before, after = set(roots), [], []
    for node in body:
        if tainted & set(node.uses):
            tainted.update(value.name for value in node.outputs)
            after.append(node)
        else:
            before.append(node)
    return before, after


def _chain(
    nodes: Sequence[Node],
    roots: Sequence[str],
    kept: Collection[str],
    types: Types,
    late: Collection[str] = (),
) -> Chain | None:
    """The longest start of ``nodes`` that an epilogue can compute to one value that leaves it.

    None where the values do not come together in one: then nothing can be part of the epilogue.
    """
    ready = set(roots)
    best: tuple[int, str] | None = (0, roots[0]) if len(roots) == 1 else None
    for count, node in enumerate(nodes, 1):
        if obstacle(node, types) is not None and not is_row_view(node, types):
            break
        if not set(late).isdisjoint(node.uses):
            break
        ready.add(node.out.name)
        needed = {name for later in nodes[count:] for name in later.uses} | set(kept)
        alive = ready & needed
        if len(alive) == 1:
            best = (count, next(iter(alive)))
    if best is None or (len(roots) == 1 and roots[0] in kept):
        return Chain(tuple(roots), (), roots[0]) if len(roots) == 1 else None
    return Chain(tuple(roots), tuple(nodes[: best[0]]), best[1])


def _own_chains(
    nodes: Sequence[Node], roots: Sequence[str], body: _Body, late: Collection[str]
) -> list[Chain]:
    """The epilogue of each of several products: of nodes that need it and no other."""
    needs = {name: {name} for name in (*roots, *late)}
    for node in nodes:
        found = set[str]().union(*(needs.get(name, ()) for name in node.uses))
        needs.update((value.name, found) for value in node.outputs)
    chains = []
    for root in roots:
        own = [node for node in nodes if needs[node.outputs[0].name] == {root}]
        foreign = {name for node in nodes if node not in own for name in node.uses}
        chain = _chain(own, [root], {*body.kept, *foreign}, body.types)
        assert chain is not None  # one root comes together
        chains.append(chain)
    return chains


def _gather_matmul(body: _Body) -> Match | str:
    gather = body.first("all_gather")
    assert gather is not None
    products, types = body.products, body.types
    rest = [node for node in body.nodes if node.op not in ("all_gather", "matmul")]
    views = {gather.out.name}
    for node in rest:
        if set(node.uses) <= views and is_row_view(node, types):
            views.add(node.out.name)
    again = [node for node in rest if node.out.name in views]
    rest = [node for node in rest if node.out.name not in views]
    if fault := _shards_fault(gather, gather.out.type, body.mesh):
        return fault
    if len(products) > MOST_WEIGHTS:
        return f"{len(products)} products share one gather, the kernel takes {MOST_WEIGHTS}"
    roots = [p.result for p in products]
    before, nodes = _split(rest, [*roots, *views])
    early = _early(nodes, roots, body, views)
    used = {id(node) for part in early for node in part.nodes}
    reread = not views.isdisjoint({name for n in rest for name in n.uses} | set(body.kept))
    return Match(
        body.stage.op,
        gather,
        tuple(part.result for part in early),
        tuple(before),
        tuple(products),
        tuple(early),
        after=(*(again if reread else ()), *(n for n in nodes if id(n) not in used)),
        gathered=gather.out.name if reread else "",
    )


def _shards_fault(collective: Node, whole: TensorType, mesh: Mesh) -> str | None:
    """Why members' shards are not the runs of rows, or columns, that kernels deal out."""
    shape, dim = whole.shape, _dim(collective)
    if len(shape) < 2 or (dim != len(shape) - 1 and any(n != 1 for n in shape[:dim])):
        return f"rows of dim {dim} do not lie together"
    size, inner = whole.local_shape(mesh, mesh.origin)[dim], math.prod(shape[dim + 1 : -1])
    shards = shard_sizes(size, mesh, axes_of(collective.kwargs["axis"]))  # type: ignore[arg-type]
    run = -(-size * inner // len(shards))
    dealt = [max(0, min(run, size * inner - member * run)) for member in range(len(shards))]
    if dealt != [shard * inner for shard in shards]:
        return f"dim {dim} has shards of {', '.join(map(str, shards))}, not runs of {run} rows"
    return None


def _early(
    nodes: Sequence[Node], roots: Sequence[str], body: _Body, views: Collection[str]
) -> list[Chain]:
    """One epilogue for two products that come together, else one for each."""
    shape, few = body.shape(roots[0]), body.limits.paired_rows
    if len(roots) == 2 and shape == body.shape(roots[1]) and math.prod(shape[:-1]) <= few:
        joined = _chain(nodes, roots, body.kept, body.types, views)
        if joined is not None:
            return [joined]
    return _own_chains(nodes, roots, body, views)


def _before_collective(body: _Body, last: Node) -> tuple[list[Node], Chain, list[Node]] | str:
    """What runs before the product, its epilogue up to ``last``, and what comes after that."""
    product = body.products[0]
    before, nodes = _split([n for n in body.nodes if n.op != "matmul"], [product.result])
    at = nodes.index(last)
    early = _chain(nodes[:at], [product.result], {*body.kept, *last.uses}, body.types)
    assert early is not None
    if (early.result,) != last.uses or len(early.nodes) < at:
        return f"what runs between the product and the {last.op} is no epilogue"
    return before, early, nodes[at + 1 :]


def _matmul_then(body: _Body) -> Match | str:
    """A product, an epilogue, then a reduce_scatter or an all_gather of rows or columns."""
    last = body.first("reduce_scatter", "all_gather")
    assert last is not None
    found = _before_collective(body, last)
    if isinstance(found, str):
        return found
    before, early, after = found
    whole = last.out.type if last.op == "all_gather" else body.types[last.uses[0]]
    if fault := _shards_fault(last, whole, body.mesh):
        return fault
    late = None
    if last.op == "reduce_scatter":
        late = _chain(after, [last.out.name], body.kept, body.types)
        assert late is not None
        after = after[len(late.nodes) :]
    return Match(
        body.stage.op,
        last,
        (last.out.name if late is None else late.result,),
        tuple(before),
        tuple(body.products),
        (early,),
        late,
        after=tuple(after),
    )


def _matmul_reduce(body: _Body) -> Match | str:
    total = body.first("all_reduce")
    assert total is not None
    found = _before_collective(body, total)
    if isinstance(found, str):
        return found
    before, early, after = found
    late, norm, rest = _after_sum(body, total, after, body.limits.norms)
    return Match(
        body.stage.op,
        total,
        (late.result, *([norm.result] if norm else [])),
        tuple(before),
        tuple(body.products),
        (early,),
        late,
        norm,
        tuple(rest),
    )


def _after_sum(
    body: _Body, total: Node, nodes: Sequence[Node], normed: bool = True
) -> tuple[Chain, Norm | None, list[Node]]:
    """The epilogue of a sum, the RMSNorm of what it gives, and the nodes that are left."""
    search = NormSearch(nodes, body.kept, body.shape)
    for end in range(len(nodes), -1, -1) if normed else ():
        needed = {*body.kept, *(name for node in nodes[end:] for name in node.uses)}
        late = _chain(nodes[:end], [total.out.name], needed, body.types)
        assert late is not None
        rest = [node for node in nodes if node not in late.nodes]
        norm = search.norm_of(late.result)
        if norm is not None and set(map(id, norm.nodes)) <= set(map(id, rest)):
            ours = set(map(id, norm.nodes))
            return late, norm, [node for node in rest if id(node) not in ours]
    late = _chain(nodes, [total.out.name], body.kept, body.types)
    assert late is not None
    return late, None, list(nodes[len(late.nodes) :])


def _reduce_norm(body: _Body) -> Match | str:
    total = body.first("all_reduce")
    assert total is not None
    before, nodes = _split([n for n in body.nodes if n is not total], [total.out.name])
    late, norm, rest = _after_sum(body, total, nodes)
    if norm is None:
        return "the norm is of another form"
    operand = body.types[total.uses[0]]
    if operand.dtype not in FLOATS:
        return f"operands are {operand.dtype}"
    if operand.shape[-1] > MOST_NORMED:
        return f"rows of {operand.shape[-1]} elements, the kernel takes {MOST_NORMED}"
    return Match(
        "all_reduce_norm",
        total,
        (late.result, norm.result),
        tuple(before),
        late=late,
        norm=norm,
        after=tuple(rest),
    )


def _dim(node: Node) -> int:
    return int(node.kwargs["dim"])  # type: ignore[arg-type]


MATCHERS = {
    "all_gather_matmul": _gather_matmul,
    "matmul_reduce_scatter": _matmul_then,
    "matmul_all_gather": _matmul_then,
    "matmul_all_reduce": _matmul_reduce,
    "all_reduce_norm": _reduce_norm,
}
