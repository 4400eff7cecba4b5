"""Which kernel computes a stage, and which of the stage's nodes are left to torch.

A stage's body is cut in four: views before the kernel, the core (products and the collective), the
pointwise chain that becomes the kernel's epilogue, and what comes after. Where the kernel cannot
serve a body, `match` says why, and the body runs node by node.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from iris.graph.nodes import Node, Ref, Value
from iris.graph.types import TensorType
from iris.lower.epilogue import obstacle

DTYPES = frozenset({"f32", "f16", "bf16"})
ROW_VIEWS = frozenset({"view", "_unsafe_view", "unsqueeze", "squeeze"})
MOST_WEIGHTS = 3


@dataclass(frozen=True)
class Product:
    """``left @ right``, both 2-D, giving ``result``."""

    left: str
    right: str
    result: str


@dataclass(frozen=True)
class Match:
    """A stage's body, cut for its kernel.

    ``before`` and ``after`` run as torch ops; ``chain`` is the epilogue, from ``tiles`` to
    ``results``. Each result is stored by the kernel as [rows, columns]; ``collective`` is the node
    that communicates.
    """

    stage: str
    before: tuple[Node, ...]
    products: tuple[Product, ...]
    collective: Node
    tiles: tuple[str, ...]
    chain: tuple[Node, ...]
    results: tuple[str, ...]
    after: tuple[Node, ...]
    zipped: bool = False
    gathered: str = ""  # the gathered value, where others read it too


def match(stage: Node, types: Mapping[str, TensorType]) -> Match | str:
    """The cut of a stage's body, or why its kernel cannot serve."""
    body, fault = _expanded(stage)
    if fault:
        return fault
    types = {**types, **{value.name: value.type for node in body for value in node.outputs}}
    matcher = MATCHERS.get(stage.op)
    if matcher is None:
        return f"{stage.op} has no kernel yet"
    found = matcher(stage, body, types)
    if isinstance(found, str):
        return found
    widths = {types[name].dtype for p in found.products for name in (p.left, p.right)}
    if len(widths) != 1 or not widths <= DTYPES:
        return f"operands are {' and '.join(sorted(widths))}"
    return found


def _expanded(stage: Node) -> tuple[list[Node], str]:
    """The body with each addmm as a product and an addition."""
    body: list[Node] = []
    for node in stage.body:
        if node.op != "addmm":
            body.append(node)
            continue
        if node.attrs or len(node.args) != 3:
            return [], "addmm with alpha or beta"
        bias, left, right = node.args
        product = Value(f"{node.out.name}_product", node.out.type)
        body.append(Node("matmul", (left, right), (), (product,), node.loc))
        body.append(replace(node, op="add.Tensor", args=(Ref(product.name), bias)))
    return body, ""


def _products(body: Sequence[Node]) -> list[Product]:
    return [
        Product(node.uses[0], node.uses[1], node.out.name) for node in body if node.op == "matmul"
    ]


def _split(body: Sequence[Node], roots: Sequence[str]) -> tuple[list[Node], list[Node]]:
    """Nodes that do not need any of ``roots``, and those that do."""
    tainted, before, after = set(roots), [], []
    for node in body:
        if tainted & set(node.uses):
            tainted.update(value.name for value in node.outputs)
            after.append(node)
        else:
            before.append(node)
    return before, after


def _row_view(node: Node, types: Mapping[str, TensorType]) -> bool:
    """A view that keeps the last dim, so that the result is the same rows and columns."""
    if node.op.partition(".")[0] not in ROW_VIEWS:
        return False
    old, new = types[node.uses[0]].shape, node.out.type.shape
    return bool(old and new) and old[-1] == new[-1]


def _chain(
    nodes: Sequence[Node],
    roots: Sequence[str],
    kept: Sequence[str],
    types: Mapping[str, TensorType],
    late: Collection[str] = (),
) -> tuple[list[Node], str | None]:
    """The longest start of ``nodes`` that an epilogue can compute, and the one value that leaves
    it.

    None where the values do not come together in one: then nothing can be part of the epilogue.
    """
    ready = set(roots)
    best: tuple[int, str] | None = (0, roots[0]) if len(roots) == 1 else None
    for count, node in enumerate(nodes, 1):
        if obstacle(node, types) is not None and not _row_view(node, types):
            break
        if not set(late).isdisjoint(node.uses):
            break
        ready.add(node.out.name)
        needed = {name for later in nodes[count:] for name in later.uses} | set(kept)
        alive = ready & needed
        if len(alive) == 1:
            best = (count, next(iter(alive)))
    if best is None or (len(roots) == 1 and roots[0] in kept):
        return [], roots[0] if len(roots) == 1 else None
    return list(nodes[: best[0]]), best[1]


def _kept(stage: Node) -> list[str]:
    return [value.name for value in stage.outputs]


def _gather_matmul(
    stage: Node, body: Sequence[Node], types: Mapping[str, TensorType]
) -> Match | str:
    gather = next(node for node in body if node.op == "all_gather")
    products = _products(body)
    rest = [node for node in body if node.op not in ("all_gather", "matmul")]
    views = {gather.out.name}
    for node in rest:
        if set(node.uses) <= views and _row_view(node, types):
            views.add(node.out.name)
    if any(p.left not in views for p in products):
        return "the gathered value is not the left operand as it is"
    again = [node for node in rest if node.out.name in views]
    rest = [node for node in rest if node.out.name not in views]
    used = {name for node in rest for name in node.uses} | set(_kept(stage))
    shape = gather.out.type.shape
    if any(n != 1 for n in shape[: int(gather.kwargs["dim"])]) or len(shape) < 2:  # type: ignore[arg-type]
        return f"rows of dim {gather.kwargs['dim']} do not lie together"
    if int(gather.kwargs["dim"]) == len(shape) - 1:  # type: ignore[arg-type]
        return "the contracted dim is gathered"
    if len(products) > MOST_WEIGHTS:
        return f"{len(products)} products share one gather, the kernel takes {MOST_WEIGHTS}"
    roots = [p.result for p in products]
    before, nodes = _split(rest, [*roots, *views])
    zipped = len(products) == 2 and types[roots[0]].shape == types[roots[1]].shape
    chain, result = (
        _chain(nodes, roots, _kept(stage), types, views)
        if zipped or len(roots) == 1
        else ([], None)
    )
    results = (result,) if result is not None else tuple(roots)
    read_again = not views.isdisjoint(used)
    return Match(
        stage.op,
        tuple(before),
        tuple(products),
        gather,
        tuple(roots),
        tuple(chain),
        results,
        (*(again if read_again else ()), *nodes[len(chain) :]),
        zipped and result is not None,
        gather.out.name if read_again else "",
    )


def _matmul_then(stage: Node, body: Sequence[Node], types: Mapping[str, TensorType]) -> Match | str:
    """A product, an epilogue, then a reduce_scatter or an all_gather of rows or columns."""
    last = next(node for node in body if node.op in ("reduce_scatter", "all_gather"))
    product = _products(body)[0]
    before, nodes = _split([n for n in body if n.op != "matmul"], [product.result])
    at = nodes.index(last)
    kept = [*_kept(stage), *last.uses]
    chain, result = _chain(nodes[:at], [product.result], kept, types)
    if (result,) != last.uses or len(chain) < at:
        return f"what runs between the product and the {last.op} is no epilogue"
    if product.result in _kept(stage) or result in _kept(stage):
        return "the product is used elsewhere too"
    shape, dim = types[last.uses[0]].shape, int(last.kwargs["dim"])  # type: ignore[arg-type]
    if dim == len(shape) - 1 and len(shape) > 1 and chain:
        return "columns are sent after an epilogue"
    if dim != len(shape) - 1 and any(n != 1 for n in shape[:dim]):
        return f"rows of dim {dim} do not lie together"
    if last.kwargs.get("op", "sum") != "sum":
        return f"the reduction is {last.kwargs['op']}"
    return Match(
        stage.op,
        tuple(before),
        (product,),
        last,
        (product.result,),
        tuple(chain),
        (last.out.name,),
        tuple(nodes[at + 1 :]),
    )


def _matmul_reduce(
    stage: Node, body: Sequence[Node], types: Mapping[str, TensorType]
) -> Match | str:
    total = next(node for node in body if node.op == "all_reduce")
    product = _products(body)[0]
    before, nodes = _split([n for n in body if n.op != "matmul"], [product.result])
    at = nodes.index(total)
    if not all(_row_view(node, types) for node in nodes[:at]):
        return "what runs between the product and the sum is no view"
    inner = {product.result, *(node.out.name for node in nodes[:at])}
    if inner & {name for node in nodes[at + 1 :] for name in node.uses} or inner & set(
        _kept(stage)
    ):
        return "the product is used elsewhere too"
    if total.kwargs.get("op", "sum") != "sum":
        return f"the reduction is {total.kwargs['op']}"
    after = nodes[at + 1 :]
    chain, result = _chain(after, [total.out.name], _kept(stage), types)
    assert result is not None
    return Match(
        stage.op,
        tuple(before),
        (product,),
        total,
        (total.out.name,),
        tuple(chain),
        (result,),
        tuple(after[len(chain) :]),
    )


MATCHERS = {
    "all_gather_matmul": _gather_matmul,
    "matmul_reduce_scatter": _matmul_then,
    "matmul_all_gather": _matmul_then,
    "matmul_all_reduce": _matmul_reduce,
}
