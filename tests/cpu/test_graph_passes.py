"""canonicalise and dedupe on small graphs, the order of passes, and their speed."""

from collections.abc import Callable

import pytest

from iris.graph.nodes import Arg, Graph, Node, Ref, Value
from iris.graph.ops import InferContext, Local, infer_node
from iris.graph.parse import parse
from iris.graph.passes import PASSES, canonicalise, dedupe, run_passes
from iris.graph.types import Mesh, TensorType
from iris.graph.verify import verify

pytestmark = pytest.mark.cpu


def after(step: Callable[[Graph], Graph], body: str) -> str:
    """The lines that a pass leaves of a graph over %x: f32[4, 6] and %y: f32[4, 6]."""
    lines = "".join(f"  {line.strip()}\n" for line in body.strip().splitlines())
    graph = parse(f"graph f[tp=2](%x: f32[4, 6], %y: f32[4, 6]~tp):\n{lines}")
    verify(graph)
    result = step(graph)
    verify(result, graph)
    return "\n".join(line.strip() for line in str(result).splitlines()[1:])


def test_passes_are_named_in_order() -> None:
    assert [step.__name__ for step in PASSES] == ["canonicalise", "dedupe", "fuse"]
    assert all("=>" in (step.__doc__ or "") for step in PASSES), (
        "a pass's docstring is its equation"
    )


def test_each_pass_is_seen() -> None:
    seen: list[str] = []
    graph = parse("graph f[](%x: f32[2]):\n  return %x\n")
    run_passes(graph, seen=lambda name, _: seen.append(name))
    assert seen == ["import", "canonicalise", "dedupe", "fuse"]


@pytest.mark.parametrize(
    ("body", "left"),
    [
        # dead nodes go, effects stay
        ("%0: f32[4, 6] = neg(%x)\nreturn %y", "return %y"),
        (
            "%0: f32[4, 6] = all_reduce(%y, axis=tp, op=sum)\nreturn %x",
            "%0: f32[4, 6] = all_reduce(%y, axis=tp, op=sum)\nreturn %x",
        ),
        ("%0: f32[3]~tp = rand((3,))\nreturn %x", "%0: f32[3]~tp = rand((3,))\nreturn %x"),
        # transposes
        (
            "%0: f32[6, 4] = t(%x)\n%1: f32[4, 6] = t(%0)\n%2: f32[4, 6] = neg(%1)\nreturn %2",
            "%2: f32[4, 6] = neg(%x)\nreturn %2",
        ),
        (
            "%0: f32[4, 6, 1] = unsqueeze(%x, -1)\n%1: f32[6, 4, 1] = transpose.int(%0, 0, 1)\n"
            "%2: f32[1, 6, 4] = permute(%1, (2, 0, 1))\nreturn %2",
            "%0: f32[4, 6, 1] = unsqueeze(%x, -1)\n%2: f32[1, 6, 4] = permute(%0, (2, 1, 0))\n"
            "return %2",
        ),
        # views
        (
            "%0: f32[24] = view(%x, (24,))\n%1: f32[2, 12] = view(%0, (2, 12))\nreturn %1",
            "%1: f32[2, 12] = view(%x, (2, 12))\nreturn %1",
        ),
        (
            "%0: f32[24] = view(%x, (24,))\n%1: f32[4, 6] = view(%0, (4, 6))\n"
            "%2: f32[4, 6] = neg(%1)\nreturn %2",
            "%2: f32[4, 6] = neg(%x)\nreturn %2",
        ),
        (
            "%0: f32[4, 6] = neg(%x)\n%1: f32[4, 6] = slice.Tensor(%0, 0, 0, 4)\nreturn %1",
            "%0: f32[4, 6] = neg(%x)\nreturn %0",
        ),
        # a batch of one matrix
        (
            "%0: f32[1, 4, 6] = unsqueeze(%x, 0)\n%1: f32[6, 4]~tp = t(%y)\n"
            "%2: f32[1, 6, 4]~tp = expand(%1, (1, 6, 4))\n%3: f32[1, 4, 4]~tp = matmul(%0, %2)\n"
            "%4: f32[1, 4, 4]~tp = neg(%3)\nreturn %4",
            "%0: f32[1, 4, 6] = unsqueeze(%x, 0)\n%1: f32[6, 4]~tp = t(%y)\n"
            "%view_of_3: f32[4, 6] = view(%0, (4, 6))\n"
            "%matmul_of_3: f32[4, 4]~tp = matmul(%view_of_3, %1)\n"
            "%3: f32[1, 4, 4]~tp = view(%matmul_of_3, (1, 4, 4))\n"
            "%4: f32[1, 4, 4]~tp = neg(%3)\nreturn %4",
        ),
        *(
            [
                "%0: f32[2, 4, 6] = stack((%x, %x))\n%1: f32[6, 4]~tp = t(%y)\n"
                "%2: f32[2, 6, 4]~tp = expand(%1, (2, 6, 4))\n"
                "%3: f32[2, 4, 4]~tp = matmul(%0, %2)\nreturn %3",
            ]
            * 2,
        ),
        # what the caller gets is neither an argument nor one value twice
        *[("%0: f32[4, 6] = view(%x, (4, 6))\nreturn %0",) * 2],
        *[("%0: f32[4, 6] = neg(%x)\n%1: f32[4, 6] = view(%0, (4, 6))\nreturn %0, %1",) * 2],
        # copies
        (
            "%0: f32[4, 6] = neg(%x)\n%1: f32[4, 6] = _to_copy(%0, dtype=:f32)\n"
            "%2: f32[4, 6] = clone(%1)\n%3: f32[4, 6] = neg(%2)\nreturn %3",
            "%0: f32[4, 6] = neg(%x)\n%3: f32[4, 6] = neg(%0)\nreturn %3",
        ),
        (
            "%0: f32[4, 6] = detach(%x)\n%1: f32[4, 6] = neg(%0)\nreturn %1",
            "%1: f32[4, 6] = neg(%x)\nreturn %1",
        ),
        # but for an input, a transposed value, a layout, and memory that the caller gets
        *(
            (text, text)
            for text in (
                "%0: f32[4, 6] = clone(%x)\n%1: f32[4, 6] = neg(%0)\nreturn %1",
                "%0: f32[6, 4] = t(%x)\n%1: f32[6, 4] = clone(%0)\n"
                "%2: f32[6, 4] = neg(%1)\nreturn %2",
                "%0: f32[4, 6] = neg(%x)\n"
                "%1: f32[4, 6] = clone(%0, memory_format=:contiguous_format)\n"
                "%2: f32[4, 6] = neg(%1)\nreturn %2",
                "%0: f32[4, 6] = neg(%x)\n%1: f32[4, 6] = clone(%0)\n"
                "%2: f32[6, 4] = t(%1)\nreturn %2, %0",
                "%0: f64[4, 6] = _to_copy(%x, dtype=:f64)\nreturn %0",
            )
        ),
    ],
)
def test_canonicalise(body: str, left: str) -> None:
    assert after(canonicalise, body) == left


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (
            "%0: f32[4, 6] = neg(%x)\n%1: f32[4, 6] = neg(%x)\n%2: f32[4, 6] = add.Tensor(%0, %1)\n"
            "%3: f32[4, 6] = add.Tensor(%1, %0)\n%4: f32[4, 6] = mul.Tensor(%2, %3)\nreturn %4",
            "%0: f32[4, 6] = neg(%x)\n%2: f32[4, 6] = add.Tensor(%0, %0)\n"
            "%4: f32[4, 6] = mul.Tensor(%2, %2)\nreturn %4",
        ),
        # 1, 1.0 and True, 0.0 and -0.0 are not the same
        *(
            (text, text)
            for text in (
                "%0: f32[4, 6] = add.Tensor(%x, 1)\n%1: f32[4, 6] = add.Tensor(%x, 1.0)\n"
                "%2: f32[4, 6] = sub.Tensor(%0, %1)\nreturn %2",
                "%0: f32[4, 6] = mul.Tensor(%x, 0.0)\n%1: f32[4, 6] = mul.Tensor(%x, -0.0)\n"
                "%2: f32[4, 6] = sub.Tensor(%0, %1)\nreturn %2",
                # two outputs stay two tensors
                "%0: f32[4, 6] = neg(%x)\n%1: f32[4, 6] = neg(%x)\nreturn %0, %1",
                # effects other than gathers stay
                "%0: f32[4, 6] = all_reduce(%y, axis=tp, op=sum)\n"
                "%1: f32[4, 6] = all_reduce(%y, axis=tp, op=sum)\n"
                "%2: f32[4, 6] = sub.Tensor(%0, %1)\nreturn %2",
                "%0: f32[3]~tp = rand((3,))\n%1: f32[3]~tp = rand((3,))\n"
                "%2: f32[3]~tp = sub.Tensor(%0, %1)\nreturn %2",
            )
        ),
    ],
)
def test_dedupe(body: str, left: str) -> None:
    assert after(dedupe, body) == left


def test_repeated_gathers() -> None:
    gathers = (
        "%0: f32[8, 6] = all_gather(%y, axis=tp, dim=0)\n"
        "%1: f32[8, 6] = all_gather(%y, axis=tp, dim=0)\n"
        "%2: f32[4, 12] = all_gather(%y, axis=tp, dim=1)\n"
    )
    assert after(dedupe, gathers + "%3: f32[8, 6] = neg(%1)\nreturn %3").splitlines() == [
        "%0: f32[8, 6] = all_gather(%y, axis=tp, dim=0)",
        "%2: f32[4, 12] = all_gather(%y, axis=tp, dim=1)",
        "%3: f32[8, 6] = neg(%0)",
        "return %3",
    ]
    assert after(dedupe, gathers + "return %0, %1").splitlines()[1] == "%1: f32[8, 6] = clone(%0)"


def layers(count: int) -> Graph:
    """``count`` layers of all_gather, matmul, silu, matmul, reduce_scatter."""
    mesh = Mesh((("tp", 4),))
    types = {"x": TensorType("bf16", (512, 256), (("tp",), ()))}
    nodes: list[Node] = []

    def add(op: str, /, *args: Arg, local: tuple[int, ...], **attrs: Arg) -> Ref:
        context = InferContext(mesh, mesh.origin, "mlp.py:9")
        typed = [types[arg.name] if isinstance(arg, Ref) else arg for arg in args]
        (type,) = infer_node(op, context, typed, attrs, [Local("bf16", local)])
        name = str(len(nodes))
        types[name] = type
        nodes.append(Node(op, args, tuple(attrs.items()), (Value(name, type),), "mlp.py:9"))
        return Ref(name)

    types["up"] = TensorType("bf16", (1024, 256), (("tp",), ()))
    types["down"] = TensorType("bf16", (256, 1024), ((), ("tp",)))
    inputs = tuple(Value(name, type) for name, type in types.items())
    x = Ref("x")
    for _ in range(count):
        g = add("all_gather", x, axis="tp", dim=0, local=(512, 256))
        h = add("matmul", g, add("t", Ref("up"), local=(256, 256)), local=(512, 256))
        h = add("silu", h, local=(512, 256))
        h = add("matmul", h, add("t", Ref("down"), local=(256, 256)), local=(512, 256))
        x = add("reduce_scatter", h, axis="tp", dim=0, op="sum", local=(128, 256))
    return Graph("layers", mesh, inputs, tuple(nodes), (x,))


def test_every_layer_of_a_long_program_is_fused() -> None:
    for count in (100, 400):
        graph = run_passes(layers(count))
        assert sum(bool(node.body) for node in graph.nodes) == 2 * count
