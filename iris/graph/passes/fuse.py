"""Brings matmuls and the collectives beside them together into stages."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from iris.graph.nodes import Graph, Node, Ref
from iris.graph.ops import COLLECTIVES, STAGES
from iris.graph.passes.bench import REACH, Bench
from iris.graph.passes.canonicalise import canonicalise
from iris.graph.passes.dedupe import dedupe
from iris.graph.passes.epilogue import grow, is_epilogue, is_row_view, tile, trim
from iris.graph.passes.memory import base
from iris.graph.passes.norm import rms_norm

# Products that have fused kernels, and where their left operand stands.
PRODUCTS = {"matmul": 0, "addmm": 1, "_int_mm": 0, "_scaled_mm": 0}
# Element types of products that have fused kernels.
DTYPES = frozenset({"f16", "bf16", "f32", "f8e4m3fn", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz", "i8"})


@dataclass(frozen=True)
class Unfused:
    """A collective that stands alone, and why."""

    op: str
    value: str
    loc: str
    reason: str

    def __str__(self) -> str:
        at = f" ({self.loc})" if self.loc else ""
        return f"{self.op} %{self.value}{at}: {self.reason}"


def fuse(graph: Graph) -> Graph:
    """``f(all_gather(x) @ w)           => all_gather_matmul(x, w)``

    ``reduce_scatter(f(a @ b)) + r   => matmul_reduce_scatter(a, b, r)``
    ``norm(all_reduce(f(a @ b)) + r) => matmul_all_reduce(a, b, r)``
    ``all_gather(f(a @ b))           => matmul_all_gather(a, b)``
    ``norm(all_reduce(x) + r)        => all_reduce_norm(x, r)``

    A stage's body is the very nodes it stands for. Nodes come together only where that breaks
    neither a dependency nor the order of effects.
    """
    return fuse_and_report(graph)[0]


def fusion_report(graph: Graph) -> list[Unfused]:
    """Each collective of ``graph`` that the passes leave in no stage, in order."""
    return fuse_and_report(dedupe(canonicalise(graph)))[1]


def fuse_and_report(graph: Graph) -> tuple[Graph, list[Unfused]]:
    """The fused graph, and the collectives that stay alone."""
    bench, alone = Bench(graph), []
    for number, node in enumerate(graph.nodes):
        if node.op in COLLECTIVES:
            pattern = PATTERNS.get(node.op)
            reason = pattern(bench, number) if pattern else f"no stage has {node.op}"
            if reason is not None:
                alone.append(Unfused(node.op, node.out.name, node.loc, reason))
    return bench.result(), alone


def fuse_all_gather(bench: Bench, gather: int) -> str | None:
    """Try the matmuls that read the gathered value, then the one that makes what is gathered."""
    after = all_gather_matmul(bench, gather)
    if after is None:
        return None
    found = product_before(bench, gather)
    if isinstance(found, str):
        made_by = bench.maker.get(bench.nodes[gather].uses[0])
        matmul_there = made_by is not None and base(bench.nodes[made_by].op) in PRODUCTS
        return found if matmul_there else after
    bench.contract(found, "matmul_all_gather", bench.nodes[gather].loc)
    return None


def all_gather_matmul(bench: Bench, gather: int) -> str | None:
    """Fuse a gather with every matmul that reads its result as the left operand."""
    products: list[int] = []
    core, reason = {gather}, "nothing reads its result"
    for value, views, number in readers_through_views(bench, bench.nodes[gather].out.name):
        node, group = bench.nodes[number], core | views | {number}
        fault = (
            product_fault(bench, node, value)
            or chain_fault(bench, core, node)
            or distance_fault(bench, group, node)
        )
        if fault is None:
            core, products = group, [*products, number]
        reason = fault or reason
    if not products:
        return reason
    group = grow(bench, core, [bench.nodes[number].out.name for number in products])
    bench.contract(group, "all_gather_matmul", bench.nodes[gather].loc)
    return None


def readers_through_views(bench: Bench, name: str) -> Iterator[tuple[str, set[int], int]]:
    """Nodes that read ``name`` or a row view of it: what they read, the views between, the node."""
    waiting: list[tuple[str, set[int]]] = [(name, set())]
    while waiting:
        value, views = waiting.pop()
        for number in bench.readers_of(value):
            node = bench.nodes[number]
            if is_row_view(bench, node):
                waiting.append((node.out.name, views | {number}))
            else:
                yield value, views, number


def product_fault(bench: Bench, node: Node, value: str) -> str | None:
    """Why ``node`` is no product that can start from ``value`` as it arrives."""
    kind = base(node.op)
    if kind not in PRODUCTS:
        return f"its result is read by {title(node)}, not by a matmul"
    if node.args[PRODUCTS[kind]] != Ref(value) or node.uses.count(value) > 1:
        return f"its result is not the left operand of {title(node)}"
    return matmul_fault(bench, node)


def chain_fault(bench: Bench, core: set[int], node: Node) -> str | None:
    """Why a product cannot join those of ``core``: it needs one of them."""
    products = [bench.nodes[n] for n in core if base(bench.nodes[n].op) in PRODUCTS]
    needed = next((p for p in products if p.out.name in node.uses), None)
    return None if needed is None else f"{title(node)} needs {title(needed)}"


def matmul_fault(bench: Bench, node: Node) -> str | None:
    """Why there is no fused kernel for a product."""
    if len(node.out.type.shape) != 2:
        return f"{title(node)} is batched"
    dtypes = {bench.types[name].dtype for name in node.uses[-2:]}
    if not dtypes <= DTYPES and base(node.op) != "_scaled_mm":
        return f"{title(node)} is in {' and '.join(sorted(dtypes))}, which has no fused kernel"
    return None


def distance_fault(bench: Bench, group: set[int], node: Node) -> str | None:
    """Why the nodes of ``group`` cannot be brought together with ``node``, the last of them."""
    if bench.reach(group) > REACH:
        return f"{title(node)} is more than {REACH} nodes away"
    if obstacle := bench.obstacle(group):
        return f"{title(obstacle.between)} has to run between it and {title(node)}"
    return None


def fuse_reduce_scatter(bench: Bench, number: int) -> str | None:
    """Fuse a reduce_scatter with the matmul before it and the bias and residual after it."""
    found = reduction_fault(bench, number) or product_before(bench, number)
    if isinstance(found, str):
        return found
    group, _ = after_sum(bench, found, number, norm=False)
    bench.contract(group, "matmul_reduce_scatter", bench.nodes[number].loc)
    return None


def fuse_all_reduce(bench: Bench, number: int) -> str | None:
    """Fuse an all_reduce with the matmul before it and the bias, residual and norm after it."""
    fault = reduction_fault(bench, number)
    if fault is not None:
        return fault
    found = product_before(bench, number)
    if isinstance(found, str):
        group, normed = after_sum(bench, {number}, number)
        if not normed:
            return f"{found}, and no RMSNorm follows"
        bench.contract(group, "all_reduce_norm", bench.nodes[number].loc)
        return None
    group, _ = after_sum(bench, found, number)
    bench.contract(group, "matmul_all_reduce", bench.nodes[number].loc)
    return None


def reduction_fault(bench: Bench, number: int) -> str | None:
    how = bench.nodes[number].kwargs.get("op", "sum")
    return None if how == "sum" else f"its op is {how}, only sums are fused"


def after_sum(
    bench: Bench, core: set[int], number: int, norm: bool = True
) -> tuple[set[int], bool]:
    """``core`` with the pointwise chain after the sum and its RMSNorm; whether there is one."""
    group, values, value = set(core), set(), bench.nodes[number].out.name
    normed: set[int] | None = None
    while True:
        values.add(value)
        normed = rms_norm(bench, value) if norm and bench.shape(value) else None
        readers = bench.readers_of(value)
        if normed or value in bench.live or len(readers) != 1:
            break
        node = bench.nodes[readers[0]]
        if not is_epilogue(bench, node) or tile(bench.shape(node.out.name)) != tile(
            bench.shape(value)
        ):
            break
        group.add(readers[0])
        value = node.out.name
    if normed:
        whole = group | normed
        if bench.reach(whole) <= REACH and bench.obstacle(whole) is None:
            return whole, True
    return trim(bench, core, group, values), False


def product_before(bench: Bench, collective: int) -> set[int] | str:
    """The collective, the matmul behind it and the epilogue between; or why that cannot be."""
    search = _Search(bench, collective)
    product = search.run()
    if product is None:
        return min(search.faults)[-1]
    group, made = {product}, {bench.nodes[product].out.name}
    for number in sorted(search.group, key=bench.slot.__getitem__):
        if not bench.uses[number].isdisjoint(made):
            group.add(number)
            made.add(bench.nodes[number].out.name)
    return distance_fault(bench, group, bench.nodes[product]) or group


class _Search:
    """A walk from a collective back to matmuls, through pointwise nodes that nothing else reads."""

    def __init__(self, bench: Bench, collective: int) -> None:
        self.bench = bench
        self.group = {collective}
        self.faults: list[tuple[int, int, str]] = []  # weight, order, text: the least is told
        self.waiting: list[tuple[int, int]] = []  # last node first, so readers come before makers
        self._look_behind(bench.nodes[collective].uses[0])

    def run(self) -> int | None:
        """The last matmul found, or None. ``group`` then holds what is between, perhaps more."""
        products = []
        while self.waiting:
            number = heapq.heappop(self.waiting)[1]
            node = self.bench.nodes[number]
            fault = self._fault(node)
            if number in self.group or fault is not None:
                self._note(0, fault)
                continue
            self.group.add(number)
            if base(node.op) in PRODUCTS:
                products.append(number)
                continue
            shape = self.bench.shape(node.out.name)
            for name in node.uses:
                if tile(self.bench.shape(name)) == tile(shape):
                    self._look_behind(name)
        return products[0] if products else None

    def _look_behind(self, name: str) -> None:
        number = self.bench.maker.get(name)
        if number is None:
            self._note(1, f"%{name} is an input, no matmul makes it")
        else:
            heapq.heappush(self.waiting, (-self.bench.slot[number], number))

    def _fault(self, node: Node) -> str | None:
        """Why the walk cannot go through ``node``."""
        if node.op in STAGES:
            return f"what it needs is made in {title(node)}"
        for value in node.outputs:
            if value.name in self.bench.live:
                return f"{title(node)} is also returned"
            others = set(self.bench.readers_of(value.name)) - self.group
            if others:
                return f"{title(node)} is also read by {title(self.bench.nodes[min(others)])}"
        if base(node.op) in PRODUCTS:
            return matmul_fault(self.bench, node)
        if not is_epilogue(self.bench, node):
            return f"its operand comes from {title(node)}, not from a matmul"
        return None

    def _note(self, weight: int, fault: str | None) -> None:
        if fault is not None:
            self.faults.append((weight, len(self.faults), fault))


def title(node: Node) -> str:
    """How a reason calls a node: ``matmul %3 (mlp.py:9)``."""
    name = f" %{node.outputs[0].name}" if node.outputs else ""
    return f"{node.op}{name}" + (f" ({node.loc})" if node.loc else "")


PATTERNS: dict[str, Callable[[Bench, int], str | None]] = {
    "all_gather": fuse_all_gather,
    "reduce_scatter": fuse_reduce_scatter,
    "all_reduce": fuse_all_reduce,
}
"""How each collective is fused: None when it was, else the reason why not."""
