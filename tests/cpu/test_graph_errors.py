"""The whole text of every error that the graph raises: what, where, and how out."""

from typing import Any

import pytest

from iris.errors import GraphError, TypeRuleError
from iris.graph.nodes import Graph
from iris.graph.ops import InferContext, Local, Output, check_outputs, infer_node
from iris.graph.parse import parse, parse_type
from iris.graph.passes import canonicalise, run_passes
from iris.graph.reference import run
from iris.graph.types import Mesh
from iris.graph.verify import verify

pytestmark = pytest.mark.cpu

MESH = Mesh((("dp", 2), ("tp", 4)))
SOURCES = (("a", "mlp.py:9"), ("b", "mlp.py:10"), ("c", ""))


def message(name: str, *args: Any, sources: Any = SOURCES, **attrs: Any) -> str:
    """The error of one op on operands ``%a``, ``%b``, ``%c`` at mlp.py:11."""
    given = [parse_type(a) if isinstance(a, str) else a for a in args]
    context = InferContext(MESH, MESH.origin, "mlp.py:11", sources)
    with pytest.raises(TypeRuleError) as caught:
        infer_node(name, context, given, attrs, [Local("f32", (8, 4))])
    return str(caught.value)


def test_bias_on_a_partial_sum() -> None:
    assert (
        message("add.Tensor", "f32[8, 4]+tp", "f32[4]")
        == """\
add: %a is a partial sum over 'tp' but %b is not
  at mlp.py:11
  %a: f32[8, 4]+tp, made at mlp.py:9
  %b: f32[4], made at mlp.py:10
  each rank would use %b in its part: the sum would count it 4 times
help: all_reduce or reduce_scatter %a over 'tp' first"""
    )


def test_number_added_to_a_partial_sum() -> None:
    assert (
        message("add.Tensor", "f32[8, 4]+tp", 1.0)
        == """\
add: %a is a partial sum over 'tp' but the number is not
  at mlp.py:11
  %a: f32[8, 4]+tp, made at mlp.py:9
  each rank would use the number in its part: the sum would count it 4 times
help: all_reduce or reduce_scatter %a over 'tp' first"""
    )


def test_linear_with_bias_over_a_split_dim() -> None:
    assert (
        message("addmm", "f32[4]", "f32[8, 16/tp]", "f32[16/tp, 4]")
        == """\
addmm: %b @ %c is a partial sum over 'tp' but the bias %a is not
  at mlp.py:11
  %a: f32[4], made at mlp.py:9
  %b: f32[8, 16/tp], made at mlp.py:10
  %c: f32[16/tp, 4]
  each rank would add %a to its part: the sum would count it 4 times
help: multiply without the bias, all_reduce or reduce_scatter over 'tp', then add it"""
    )


def test_nonlinear_function_of_a_partial_sum() -> None:
    assert (
        message("silu", "f32[8, 4]+tp", sources=())
        == """\
silu: operand 0 is a partial sum over 'tp' and silu is not linear
  at mlp.py:11
  operand 0: f32[8, 4]+tp
  silu of the parts does not add up to silu of the sum
help: all_reduce or reduce_scatter operand 0 over 'tp' first"""
    )


def test_product_of_partial_sums() -> None:
    assert (
        message("mul.Tensor", "f32[8, 4]+tp", "f32[8, 4]+tp")
        == """\
mul: %a is a partial sum over 'tp' and so is %b
  at mlp.py:11
  %a: f32[8, 4]+tp, made at mlp.py:9
  %b: f32[8, 4]+tp, made at mlp.py:10
  mul of the parts does not add up to mul of the sum
help: all_reduce or reduce_scatter %a over 'tp' first"""
    )


def test_partial_sum_times_a_split_weight() -> None:
    assert (
        message("matmul", "f32[8, 4]+tp", "f32[4, 16/tp]")
        == """\
matmul: %a is a partial sum over 'tp' and %b is split over it
  at mlp.py:11
  %a: f32[8, 4]+tp, made at mlp.py:9
  %b: f32[4, 16/tp], made at mlp.py:10
  matmul of the parts does not add up to matmul of the sum
help: all_reduce or reduce_scatter %a over 'tp' first"""
    )


def test_partial_sum_through_an_unknown_op() -> None:
    assert message("mylib::norm.default", "f32[8, 4]+tp").startswith(
        "mylib::norm: %a is a partial sum over 'tp' and mylib::norm is not linear\n"
    )


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
def test_double_reduction(op: str) -> None:
    assert (
        message(op, "f32[8/dp, 4]", axis="tp", op="sum", dim=0)
        == f"""\
{op}: %a is already the same on every rank of 'tp'
  at mlp.py:11
  %a: f32[8/dp, 4], made at mlp.py:9
  its sum would be 4 times too large
help: drop this {op}, or use op='avg'"""
    )


def test_sum_over_two_axes_where_one_is_done() -> None:
    text = message("all_reduce", "f32[8, 4]+tp", axis=("dp", "tp"), op="sum")
    assert text.startswith("all_reduce: %a is already the same on every rank of 'dp'\n")
    assert "its sum would be 2 times too large" in text


def test_maximum_of_a_partial_sum() -> None:
    assert (
        message("all_reduce", "f32[8, 4]+tp", axis="tp", op="max")
        == """\
all_reduce: %a is a partial sum over 'tp'
  at mlp.py:11
  %a: f32[8, 4]+tp, made at mlp.py:9
help: all_reduce or reduce_scatter %a over 'tp' first"""
    )


def test_gather_of_a_partial_sum() -> None:
    assert message("all_gather", "f32[8, 4]+tp", axis="tp", dim=0).startswith(
        "all_gather: %a is a partial sum over 'tp'\n"
    )


@pytest.mark.parametrize("x", ["f32[8, 4]", "f32[8, 16/tp]"])
def test_gather_of_what_is_not_split_there(x: str) -> None:
    assert (
        message("all_gather", x, axis="tp", dim=0)
        == f"""\
all_gather: dim 0 of {x} is not split over 'tp'
  at mlp.py:11
  %a: {x}, made at mlp.py:9
help: drop this all_gather, or gather a dim written `n/axis` in the type"""
    )


def test_gather_of_an_outer_axis() -> None:
    assert (
        message("all_gather", "f32[8/dp/tp, 4]", axis="dp", dim=0)
        == """\
all_gather: dim 0 of f32[8/dp/tp, 4] is split over more than 'dp', and not innermost
  at mlp.py:11
  %a: f32[8/dp/tp, 4], made at mlp.py:9
help: gather over ('dp', 'tp') in one call, or over the last of them first"""
    )


def test_sum_of_uneven_shards() -> None:
    assert (
        message("all_reduce", "f32[5/tp, 4]", axis="tp", op="sum")
        == """\
all_reduce: shards differ in size along dim 0
  at mlp.py:11
  %a: f32[5/tp, 4], made at mlp.py:9
help: pad dim 0 to a multiple of 4, or gather it first"""
    )


def test_unknown_axis_dim_op_and_ranks() -> None:
    x = "f32[8, 4]~tp"
    assert (
        message("all_gather", x, axis="pp", dim=0)
        == """\
all_gather: the mesh has no axis 'pp'
  at mlp.py:11
help: axes of this mesh: dp=2, tp=4"""
    )
    assert message("all_gather", x, axis=("tp", "tp"), dim=0).startswith(
        "all_gather: an axis twice in ('tp', 'tp')\n"
    )
    assert (
        message("reduce_scatter", x, axis="tp", dim=2)
        == """\
reduce_scatter: dim=2 of a value with 2 dims
  at mlp.py:11
  %a: f32[8, 4]~tp, made at mlp.py:9
help: dim goes from -2 to 1"""
    )
    assert message("all_reduce", x, axis="tp", op="mean").endswith(
        "help: one of sum, avg, max, min"
    )
    assert (
        message("broadcast", x, axis="tp", src=4)
        == """\
broadcast: src=4 in a group of 4 ranks
  at mlp.py:11
  %a: f32[8, 4]~tp, made at mlp.py:9
help: src counts ranks of the group, from 0 to 3"""
    )
    assert (
        message("ppermute", x, axis="tp", perm=((0, 1), (2, 1)))
        == """\
ppermute: perm=((0, 1), (2, 1)) does not pair ranks of a group of 4
  at mlp.py:11
  %a: f32[8, 4]~tp, made at mlp.py:9
help: pairs (src, dst) of ranks from 0 to 3, every dst once"""
    )


def test_returned_values_are_what_out_specs_says() -> None:
    good = [
        ("f32[8, 4]", ((), ())),
        ("f32[8/tp, 4]", (("tp",),)),
        ("f32[2, 4]~tp", (("tp",), ())),
        ("f32[8, 4]", (("tp",), ())),
        ("f32[]", ()),
    ]
    for text, spec in good:
        check_outputs([Output(parse_type(text), spec, "3")])


def test_returned_values_are_not_what_out_specs_says() -> None:
    outputs = [
        Output(parse_type("f32[8, 4]+tp"), (), "3", "mlp.py:10"),
        Output(parse_type("f32[8, 4]+tp"), (("tp",),), "4", "mlp.py:11"),
        Output(parse_type("f32[8, 4]~tp"), ((), ("dp",)), "5"),
        Output(parse_type("f32[8/tp, 4]"), ((), (("tp",))), "6", "mlp.py:12"),
    ]
    with pytest.raises(TypeRuleError) as caught:
        check_outputs(outputs)
    assert str(caught.value) == OUTPUTS


OUTPUTS = """\
4 returned values are not what out_specs says
  %3: f32[8, 4]+tp, out_spec P(): a sum over 'tp' is still due, all_reduce missing at mlp.py:10
  %4: f32[8, 4]+tp, out_spec P('tp'): a sum over 'tp' is still due, reduce_scatter missing at \
mlp.py:11
  %5: f32[8, 4]~tp, out_spec P(None, 'dp'): ranks of 'tp' may hold different values
  %6: f32[8/tp, 4], out_spec P(None, 'tp'): dim 0 is split over 'tp', made at mlp.py:12
help: all_reduce partial values before returning them; reduce_scatter partial values before \
returning them; all_reduce or all_gather over 'tp', or name it in the out_spec; all_gather that \
dim, or split it in the out_spec"""


GRAPH = """\
graph f[tp=2](%x: f32[8/tp, 4], %w: f32[4, 4]):
  %0: f32[8, 4] = all_gather(%x, axis=tp, dim=0)
  %1: f32[8, 4] = all_gather(%x, axis=tp, dim=0)
  %2: f32[8, 4] = matmul(%0, %w)
  %3: f32[8, 4] = add.Tensor(%2, %1)
  return %3
"""


def faults(text: str, before: str | None = None) -> str:
    with pytest.raises(GraphError) as caught:
        verify(parse(text), parse(before) if before else None)
    return str(caught.value)


def test_verify_names_every_fault() -> None:
    broken = GRAPH.replace("matmul(%0, %w)", "matmul(%9, %w)").replace("%1: f32[8", "%0: f32[9")
    assert (
        faults(broken)
        == """\
graph f is malformed
  %2 = matmul reads %9 before it is defined
  %3 = add.Tensor reads %1 before it is defined
  defined more than once: %0
  %0 = all_gather: %0 is f32[9, 4], its rule says f32[8, 4]"""
    )


def test_verify_knows_what_effects_were_there() -> None:
    lines = GRAPH.splitlines(keepends=True)
    other = (
        GRAPH.replace("%1: f32[8, 4] = all_gather(%x", "%1: f32[8/tp, 4] = ppermute(%x")
        .replace("axis=tp, dim=0)\n  %2", "axis=tp, perm=((0, 1), (1, 0)))\n  %2")
        .replace("add.Tensor(%2, %1)", "mul.Tensor(%2, 2)")
    )
    verify(parse(other))
    assert (
        faults("".join(line for line in other.splitlines(True) if "ppermute" not in line), other)
        == "graph f is malformed\n  %1 = ppermute was dropped, and it has effects"
    )
    swapped = other.splitlines(keepends=True)
    swapped[1:3] = swapped[2:0:-1]
    assert faults("".join(swapped), other) == (
        "graph f is malformed\n  effects are not in the order they were in"
    )
    without = "".join(line for line in lines if not line.startswith("  %1")).replace("%1", "%0")
    verify(parse(without), parse(GRAPH))  # one of two gathers of the same value
    assert faults(GRAPH, without) == (
        "graph f is malformed\n  %1 = all_gather has effects and is new"
    )


def test_verify_looks_into_stages() -> None:
    graph = run_passes(parse(GRAPH))
    text = str(graph)
    assert faults(text.replace("all_gather_matmul(%x, %w)", "all_gather_matmul(%w, %x)")).endswith(
        "%0 = all_gather_matmul does not read what its body reads"
    )
    renamed = text.replace("%2: f32[8, 4] = all_g", "%7: f32[8, 4] = all_g").replace(
        "(%2, ", "(%7, "
    )
    assert faults(renamed).endswith(
        "%0 = all_gather_matmul gives %7, which its body does not define so"
    )


def test_a_pass_that_drops_an_effect_is_caught() -> None:
    def careless(graph: Graph) -> Graph:
        return graph.with_nodes(tuple(n for n in graph.nodes if n.op != "all_reduce"))

    graph = parse(
        "graph f[tp=2](%x: f32[4]~tp):\n"
        "  %0: f32[4] = all_reduce(%x, axis=tp, op=sum)  # f.py:2\n"
        "  return %x\n"
    )
    with pytest.raises(GraphError) as caught:
        run_passes(graph, (canonicalise, careless))
    assert str(caught.value) == (
        "graph f is malformed\n  %0 = all_reduce (f.py:2) was dropped, and it has effects"
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "line 1: expected `graph name[axis=size](%input: type, ...):`"),
        ("graph f[](%x f32[2]):", "line 1: expected :, found 'f32[2]'"),
        ("graph f[](%x: f99[2]):", "line 1: not a type: 'f99[2]'"),
        ("graph f[]():\n  %0: f32[2] = neg(%x", "line 2: expected ,, found 'the end'"),
        ("graph f[]():\n  %0: f32[2] neg(%x)", "line 2: expected ,, found 'neg'"),
        ("graph f[]():\n  return ?", "line 2: cannot read '?'"),
        ("graph f[]():\n      %0: f32[2] = neg(%x)", "line 2: a body without its stage"),
    ],
)
def test_text_that_does_not_parse(text: str, error: str) -> None:
    with pytest.raises(GraphError) as caught:
        parse(text)
    assert str(caught.value) == error


def test_reference_says_what_it_cannot_run() -> None:
    graph = parse("graph f[tp=2]():\n  %0: f32[2]~tp = rand((2,))\n  return %0\n")
    with pytest.raises(GraphError) as caught:
        run(graph, [])
    assert str(caught.value) == "rand: no numpy reference"
