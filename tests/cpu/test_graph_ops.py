"""Every op has all its parts, its type examples hold, and its reference does as torch does."""

import doctest
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from iris.graph import draw, ops, parse as parsing, reference as references, types
from iris.graph.nodes import Node, Ref, Value
from iris.graph.ops import (
    COLLECTIVES,
    FAMILIES,
    STAGES,
    Effect,
    InferContext,
    Local,
    get_op,
    infer_node,
    registry,
    rules,
    views,
)
from iris.graph.ops.base import Op
from iris.graph.ops.groups import Collective
from iris.graph.ops.opaque import Opaque, Random
from iris.graph.ops.pointwise import BINARY, UNARY
from iris.graph.parse import parse, parse_type
from iris.graph.passes import epilogue
from iris.graph.reference import random_inputs
from iris.graph.types import Mesh, TensorType

pytestmark = pytest.mark.cpu

MESH = Mesh((("dp", 2), ("tp", 4)))
EXAMPLE = re.compile(r"``([^`]*?)-> ([^`]*?)``")
TYPE = re.compile(r"\w+\[[^\]]*\](?:[+~]\w+)*")
ATTRS: dict[str, dict[str, Any]] = {
    "all_gather": {"axis": "tp", "dim": 0},
    "reduce_scatter": {"axis": "tp", "dim": 0, "op": "sum"},
    "all_reduce": {"axis": "tp", "op": "sum"},
    "all_to_all": {"axis": "tp", "split_dim": 1, "concat_dim": 0},
    "broadcast": {"axis": "tp", "src": 0},
    "ppermute": {"axis": "tp", "perm": ((0, 1), (1, 2))},
    "axis_index": {"axis": "tp"},
    "matmul": {},
}


def infer(name: str, *args: Any, out: str, **attrs: Any) -> str:
    """The types that op ``name`` gives, as text; ``out`` has the local shapes that tracing saw."""
    context = InferContext(MESH, MESH.origin, "f.py:3")
    locals_ = []
    for text in TYPE.findall(out):
        type = parse_type(text)
        locals_.append(Local(type.dtype, type.local_shape(MESH, MESH.origin)))
    given = [parse_type(a) if isinstance(a, str) and TYPE.fullmatch(a) else a for a in args]
    return ", ".join(map(str, infer_node(name, context, given, attrs, locals_)))


def examples(op: Op) -> list[tuple[list[str], str]]:
    """Operand types and output type of every example in an op's contract."""
    found = EXAMPLE.findall(type(op).__doc__ or "")
    return [(TYPE.findall(left), right) for left, right in found]


@pytest.mark.parametrize("name", registry())
def test_no_part_of_an_op_is_missing(name: str) -> None:
    op = registry()[name]
    assert op.name == name
    assert examples(op), f"{name}: no type example in its contract"
    for base, parts in ((Op, ("infer", "reference")), (Collective, ("type_rule", "exchange"))):
        if isinstance(op, base):
            assert all(getattr(type(op), part) is not getattr(base, part) for part in parts)
    communicates = name in COLLECTIVES | STAGES
    assert (Effect.COMMUNICATES in op.effects) == communicates
    if name not in STAGES:
        assert type(op).__module__ == f"iris.graph.ops.{name}", "one op, one file"


@pytest.mark.parametrize("name", ATTRS)
def test_type_examples_hold(name: str) -> None:
    for operands, result in examples(get_op(name)):
        assert infer(name, *operands, out=result, **ATTRS[name]) == result


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_aten_ops_with_a_reference(name: str) -> None:
    op = FAMILIES[name]
    assert examples(op), f"{name}: no type example in its contract"
    assert hasattr(torch.ops.aten, name.partition(".")[0])
    known = not isinstance(op, Opaque | Random)
    assert (type(op).reference is not Op.reference) == known


@pytest.mark.parametrize(
    ("op", "args", "out"),
    [
        # products
        ("matmul", ("f32[8/tp, 4]", "f32[4, 6]"), "f32[8/tp, 6]"),
        ("matmul", ("f32[8, 4]", "f32[4, 8/tp]"), "f32[8, 8/tp]"),
        ("matmul", ("f32[8/dp, 4/tp]", "f32[4/tp, 8]"), "f32[8/dp, 8]+tp"),
        ("matmul", ("f32[8, 16/tp]", "f32[4, 8]"), "f32[8, 8]~tp"),
        ("matmul", ("f32[8, 5/tp]", "f32[5/tp, 8]"), "f32[8, 8]+tp"),
        ("matmul", ("f32[5/tp, 4]", "f32[4, 8]"), "f32[5/tp, 8]"),
        ("matmul", ("f32[8, 4]+tp", "f32[4, 8]"), "f32[8, 8]+tp"),
        ("matmul", ("f32[8, 4]+tp", "f32[4, 8/dp]"), "f32[8, 8/dp]+tp"),
        ("matmul", ("f32[8, 4]~tp", "f32[4, 8]"), "f32[8, 8]~tp"),
        ("matmul", ("f32[8, 16/dp/tp]", "f32[16/dp/tp, 8]"), "f32[8, 8]+dp+tp"),
        ("matmul", ("f32[4/dp, 8, 8/tp]", "f32[4/dp, 8/tp, 2]"), "f32[4/dp, 8, 2]+tp"),
        ("addmm", ("f32[8/tp]", "f32[8, 4]", "f32[4, 8/tp]"), "f32[8, 8/tp]"),
        ("addmm", ("f32[8]+tp", "f32[8, 4/tp]", "f32[4/tp, 8]"), "f32[8, 8]+tp"),
        ("addmm", ("f32[8]~tp", "f32[8, 4/tp]", "f32[4/tp, 8]"), "f32[8, 8]~tp"),
        ("mv", ("f32[8, 4/tp]", "f32[4/tp]"), "f32[8]+tp"),
        ("dot", ("f32[8/tp]", "f32[8/tp]"), "f32[]+tp"),
        (
            "_scaled_mm",
            ("f8e4m3fn[8, 16/tp]", "f8e4m3fn[16/tp, 8]", "f32[]~tp", "f32[]~tp"),
            "bf16[8, 8]+tp",
        ),
        # pointwise
        ("add.Tensor", ("f32[8/tp, 4]", "f32[4]"), "f32[8/tp, 4]"),
        ("add.Tensor", ("f32[8/tp, 4]", "f32[2, 1]"), "f32[8/tp, 4]"),
        ("add.Tensor", ("f32[8/tp, 4]", "f32[8/dp, 4]"), None),
        ("add.Tensor", ("f32[8/tp, 4]", "f32[2, 16/tp]"), "f32[2, 4]~tp"),
        ("add.Tensor", ("f32[4/tp, 4]", "f32[3, 4]"), "f32[3, 4]~tp"),
        ("add.Tensor", ("f32[8]+tp", "f32[8]+tp"), "f32[8]+tp"),
        ("add.Tensor", ("f32[8]+tp", "f32[8]~tp"), "f32[8]~tp"),
        ("sub.Tensor", ("f32[8/dp]+tp", "f32[8/dp]+tp"), "f32[8/dp]+tp"),
        ("mul.Tensor", ("f32[8]+tp", 2.0), "f32[8]+tp"),
        ("mul.Tensor", ("f32[8]", "f32[8]+tp"), "f32[8]+tp"),
        ("div.Tensor", ("f32[8]+tp", "f32[]"), "f32[8]+tp"),
        ("neg", ("f32[8]+tp",), "f32[8]+tp"),
        ("_to_copy", ("bf16[8]+tp",), "f32[8]+tp"),
        ("zeros_like", ("f32[8/dp]+tp",), "f32[8/dp]"),
        ("where.self", ("bool[8]", "f32[8]+tp", "f32[8]+tp"), "f32[8]+tp"),
        ("silu", ("f32[5/tp]",), "f32[5/tp]"),
        # views
        ("view", ("f32[8/tp, 4, 2]", (2, 8)), "f32[8/tp, 8]"),
        ("view", ("f32[8/tp, 4]", (8,)), "f32[32/tp]"),
        ("view", ("f32[2, 8/tp, 4]", (2, 2, 2, 2)), "f32[2, 8/tp, 2, 2]"),
        ("view", ("f32[2, 8/tp, 4]", (4, 4)), "f32[4, 4]~tp"),
        ("view", ("f32[1, 8/tp, 4]", (2, 4)), "f32[8/tp, 4]"),
        ("view", ("f32[8/tp, 4]", (1, 2, 4)), "f32[1, 8/tp, 4]"),
        ("view", ("f32[5/tp, 4, 2]", (2, 8)), "f32[5/tp, 8]"),
        ("view", ("f32[5/tp, 4]", (8,)), "f32[8]~tp"),
        ("view", ("f32[8, 4]+tp", (32,)), "f32[32]+tp"),
        ("t", ("f32[8/tp, 4]",), "f32[4, 8/tp]"),
        ("transpose.int", ("f32[2, 8/tp, 4]", -1, 1), "f32[2, 4, 8/tp]"),
        ("permute", ("f32[2, 8/tp, 4]+dp", (2, 0, 1)), "f32[4, 2, 8/tp]+dp"),
        ("unsqueeze", ("f32[8/tp]", -1), "f32[8/tp, 1]"),
        ("squeeze.dim", ("f32[8/tp, 1]", 1), "f32[8/tp]"),
        ("squeeze.dim", ("f32[4/tp, 3]", 0), "f32[3]~tp"),
        ("expand", ("f32[8/tp, 1]", (2, 3)), "f32[8/tp, 3]"),
        ("slice.Tensor", ("f32[8, 8/tp]", 0, 0, 2), "f32[2, 8/tp]"),
        ("slice.Tensor", ("f32[8/tp]", 0, 0, 1), "f32[4/tp]"),
        ("slice.Tensor", ("f32[5/tp]", 0, 0, 9223372036854775807), "f32[5/tp]"),
        ("slice.Tensor", ("f32[5/tp]", 0, 0, 1), "f32[1]~tp"),
        ("split.Tensor", ("f32[4, 24/tp]", 2, 1), "f32[4, 8/tp], f32[4, 8/tp], f32[4, 8/tp]"),
        ("select.int", ("f32[8/tp, 4]", 0, 0), "f32[4]~tp"),
        ("cat", (("f32[8/tp, 4]", "f32[8/tp, 2]"), 1), "f32[8/tp, 6]"),
        ("cat", (("f32[8/tp, 4]", "f32[4/tp, 4]"), 0), "f32[12/tp, 4]"),
        ("cat", (("f32[8/tp, 4]", "f32[2, 4]"), 0), "f32[4, 4]~tp"),
        ("stack", (("f32[8/tp]", "f32[8/tp]"), 0), "f32[2, 8/tp]"),
        # reductions and the like
        ("sum.dim_IntList", ("f32[8/tp, 4]", (0,)), "f32[4]+tp"),
        ("sum.dim_IntList", ("f32[8/tp, 4]", (-1,), True), "f32[8/tp, 1]"),
        ("sum", ("f32[8/tp, 4/dp]",), "f32[]+dp+tp"),
        ("sum.dim_IntList", ("f32[8, 4]+tp", (0,)), "f32[4]+tp"),
        ("mean.dim", ("f32[8/tp, 4]", (0,)), "f32[4]~tp"),
        ("mean.dim", ("f32[8, 4]+tp", (0,)), "f32[4]+tp"),
        ("amax", ("f32[8/tp, 4]", (1,)), "f32[8/tp]"),
        ("max.dim", ("f32[8/tp, 4]", 1), "f32[8/tp], i64[8/tp]"),
        ("_softmax", ("f32[8/tp, 4]", 1, False), "f32[8/tp, 4]"),
        ("_softmax", ("f32[8, 4/tp]", 1, False), "f32[8, 1]~tp"),
        ("topk", ("f32[8/tp, 4]", 2), "f32[8/tp, 2], i64[8/tp, 2]"),
        ("embedding", ("f32[9, 8/tp]", "i64[4/dp]"), "f32[4/dp, 8/tp]"),
        ("embedding", ("f32[12/tp, 8]", "i64[4]"), "f32[4, 8]~tp"),
        ("index.Tensor", ("f32[8, 4/tp]", ("i64[3]", None)), "f32[3, 4/tp]"),
        ("index.Tensor", ("f32[8/tp, 4]", (None, "i64[3, 2]")), "f32[8/tp, 3, 2]"),
        ("index_put", ("f32[8, 4/tp]", ("i64[3]",), "f32[3, 4/tp]"), "f32[8, 4/tp]"),
        ("index_put", ("f32[8, 4]", ("i64[3]",), "f32[3, 16/tp]"), "f32[8, 4]~tp"),
        (
            "native_layer_norm",
            ("f32[8/tp, 4]", (4,), "f32[4]", None, 1e-5),
            "f32[8/tp, 4], f32[8/tp, 1], f32[8/tp, 1]",
        ),
        ("_fused_rms_norm", ("f32[8/tp, 4]", (4,), "f32[4]"), "f32[8/tp, 4], f32[8/tp, 1]"),
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            ("f32[2, 8/tp, 5, 4]",) * 3,
            "f32[2, 8/tp, 5, 4], f32[2, 8/tp, 5]",
        ),
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            (*("f32[2, 8/tp, 5, 4]",) * 3, 0.1),
            "f32[2, 8/tp, 5, 4]~dp, f32[2, 8/tp, 5]~dp",
        ),
        ("slice_scatter", ("f32[8, 4]+tp", "f32[8, 2]+tp", 1, 0, 2), "f32[8, 4]+tp"),
        # the rest
        ("fft_fft", ("f32[8/tp, 4]",), "c64[2, 4]~tp"),
        ("fft_fft", ("f32[8, 4]",), "c64[8, 4]"),
        ("mylib::op.default", ("f32[8/tp, 4]", "f32[8/dp]"), "f32[3]~dp~tp"),
        ("full", ((2, 3), 1.0), "f32[2, 3]"),
        ("rand", ((2, 3),), "f32[2, 3]~dp~tp"),
        ("bernoulli.p", ("f32[8/tp, 4]", 0.5), "f32[8/tp, 4]~dp"),
    ],
)
def test_types(op: str, args: tuple[Any, ...], out: str | None) -> None:
    given = [
        tuple(parse_type(a) if isinstance(a, str) else a for a in arg)
        if isinstance(arg, tuple)
        else arg
        for arg in args
    ]
    if out is not None:
        assert infer(op, *given, out=out) == out


@pytest.mark.parametrize(
    ("op", "x", "attrs", "out"),
    [
        ("all_gather", "f32[8/dp/tp, 4]", {"axis": "tp", "dim": 0}, "f32[8/dp, 4]"),
        ("all_gather", "f32[8/dp/tp, 4]", {"axis": ("dp", "tp"), "dim": 0}, "f32[8, 4]"),
        ("all_gather", "f32[5/tp, 4]", {"axis": "tp", "dim": 0}, "f32[5, 4]"),
        ("all_gather", "f32[2, 4]~tp", {"axis": "tp", "dim": 1}, "f32[2, 16]"),
        ("all_gather", "f32[8/tp, 4]+dp", {"axis": "tp", "dim": 0}, "f32[8, 4]+dp"),
        ("reduce_scatter", "f32[5, 4]+tp", {"axis": "tp", "dim": 0, "op": "sum"}, "f32[5/tp, 4]"),
        ("reduce_scatter", "f32[5, 4]~tp", {"axis": "tp", "dim": 1, "op": "max"}, "f32[5, 4/tp]"),
        ("reduce_scatter", "f32[8/dp, 4]+tp", {"axis": "tp", "dim": 0}, "f32[8/dp/tp, 4]"),
        ("reduce_scatter", "f32[8, 16/tp]", {"axis": "tp", "dim": 0}, "f32[8/tp, 4]"),
        ("reduce_scatter", "f32[8, 4]", {"axis": "tp", "dim": 0, "op": "avg"}, "f32[8/tp, 4]"),
        ("all_reduce", "f32[8, 4]+dp+tp", {"axis": ("dp", "tp"), "op": "sum"}, "f32[8, 4]"),
        ("all_reduce", "f32[8/tp, 4]", {"axis": "tp", "op": "max"}, "f32[2, 4]"),
        ("all_reduce", "f32[8/dp/tp, 4]", {"axis": "tp", "op": "sum"}, "f32[2/dp, 4]"),
        ("all_reduce", "f32[8, 4]", {"axis": "tp", "op": "max"}, "f32[8, 4]"),
        (
            "all_to_all",
            "f32[5/tp, 6]",
            {"axis": "tp", "split_dim": 1, "concat_dim": 0},
            "f32[5, 6/tp]",
        ),
        (
            "all_to_all",
            "f32[8, 4]~tp",
            {"axis": "tp", "split_dim": 0, "concat_dim": 1},
            "f32[8/tp, 16]",
        ),
        ("broadcast", "f32[8/tp, 4]", {"axis": "tp", "src": 3}, "f32[2, 4]"),
        ("ppermute", "f32[8/tp]", {"axis": "tp", "perm": ((0, 3),)}, "f32[8/tp]"),
        ("ppermute", "f32[8]", {"axis": "tp", "perm": ((0, 3),)}, "f32[8]~tp"),
        ("ppermute", "f32[8]+dp", {"axis": "dp", "perm": ((0, 1), (1, 0))}, "f32[8]+dp"),
    ],
)
def test_types_of_collectives(op: str, x: str, attrs: dict[str, Any], out: str) -> None:
    assert infer(op, x, out=out, **attrs) == out


def reference(op: str, args: list[Any], attrs: dict[str, Any], outs: list[Any]) -> list[Any]:
    """Outputs of ``op`` by its numpy reference on one rank."""
    mesh = Mesh((("tp", 1),))
    names = {torch.float32: "f32", torch.int64: "i64", torch.bool: "bool"}
    values = [Value(str(i), TensorType(names[o.dtype], tuple(o.shape))) for i, o in enumerate(outs)]

    def ranked(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return [arg.numpy()]
        return tuple(map(ranked, arg)) if isinstance(arg, tuple) else arg

    node = Node(op, tuple(Ref("x") for _ in args), (), tuple(values))
    with np.errstate(all="ignore"):
        found = get_op(op).reference(node, [ranked(arg) for arg in args], attrs, mesh)
    return [arrays[0] for arrays in found]


def compare(op: str, *args: Any, **attrs: Any) -> None:
    """The reference of ``op`` against torch."""
    packet, _, overload = op.partition(".")
    name = {"matmul": "mm"}.get(packet, packet)
    result = getattr(getattr(torch.ops.aten, name), overload or "default")(*args, **attrs)
    outs = list(result) if isinstance(result, list | tuple) else [result]
    for ours, torchs in zip(reference(op, list(args), attrs, outs), outs, strict=True):
        np.testing.assert_allclose(ours, torchs.numpy(), rtol=2e-5, atol=2e-5)
        assert ours.dtype == torchs.numpy().dtype


X = torch.linspace(-2, 2, 24).reshape(2, 3, 4) + 0.01
Y = torch.linspace(3, 0.5, 24).reshape(2, 3, 4)
INTS = torch.arange(24).reshape(2, 3, 4)
BITS = {"bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__"}
SHIFTS = {"bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"}
TENSORS = {
    "pow": "pow.Tensor_Tensor",
    "eq": "eq.Tensor",
    "ne": "ne.Tensor",
    "lt": "lt.Tensor",
    "le": "le.Tensor",
    "gt": "gt.Tensor",
    "ge": "ge.Tensor",
    "fmod": "fmod.Tensor",
    "remainder": "remainder.Tensor",
    "copysign": "copysign.Tensor",
    "bitwise_and": "bitwise_and.Tensor",
    "bitwise_or": "bitwise_or.Tensor",
    "bitwise_xor": "bitwise_xor.Tensor",
    "__and__": "__and__.Tensor",
    "__or__": "__or__.Tensor",
    "__xor__": "__xor__.Tensor",
    "bitwise_left_shift": "bitwise_left_shift.Tensor",
    "bitwise_right_shift": "bitwise_right_shift.Tensor",
    "__lshift__": "__lshift__.Tensor",
    "__rshift__": "__rshift__.Tensor",
}
EXTRA = {"threshold": (0.5, 2.0), "clamp": (-1, 1), "clamp_min": (0,), "clamp_max": (0,)}


@pytest.mark.parametrize("name", UNARY)
def test_unary_reference(name: str) -> None:
    x = INTS if name in BITS else (X.abs() / 3 if name == "logit" else X)
    if name == "acosh":
        x = Y + 1
    compare(name, x, *EXTRA.get(name, ()))


@pytest.mark.parametrize("name", BINARY)
def test_binary_reference(name: str) -> None:
    if name.partition(".")[0] in BITS | SHIFTS:
        compare(TENSORS[name], INTS, INTS[:1] % 4)
    else:
        compare(TENSORS.get(name, name), Y, X[:1] if name != "pow" else X)


@pytest.mark.parametrize(
    "call",
    [
        ("add.Tensor", X, Y, {"alpha": 2}),
        ("sub.Tensor", X, 1.5, {}),
        ("rsub.Scalar", X, 1.5, {}),
        ("mul.Tensor", X, Y, {}),
        ("div.Tensor", X, Y, {}),
        ("div.Tensor_mode", X, Y, {"rounding_mode": "floor"}),
        ("div.Tensor_mode", X, Y, {"rounding_mode": "trunc"}),
        ("where.self", X > 0, X, Y, {}),
        ("lerp.Scalar", X, Y, 0.3, {}),
        ("addcmul", X, X, Y, {"value": 2}),
        ("addcdiv", X, X, Y, {"value": 2}),
        ("masked_fill.Scalar", X, X > 0, 7.0, {}),
        ("fill.Scalar", X, 7.0, {}),
        ("copy", X, Y[:1], {}),
        ("gelu", X, {"approximate": "tanh"}),
        ("gelu_backward", X, Y, {"approximate": "none"}),
        ("gelu_backward", X, Y, {"approximate": "tanh"}),
        ("silu_backward", X, Y, {}),
        ("sigmoid_backward", X, Y, {}),
        ("tanh_backward", X, Y, {}),
        ("threshold_backward", X, Y, 1, {}),
        ("full_like", X, 3, {}),
        ("zeros_like", X, {}),
        ("ones_like", INTS, {}),
        ("pow.Tensor_Scalar", X, 3, {}),
        ("matmul", X[0], X[1].t(), {}),
        ("addmm", X[0, 0], X[0], X[1].reshape(4, 3)[:, :1].expand(4, 4), {"beta": 2}),
        ("view", X, (6, 4), {}),
        ("t", X[0], {}),
        ("transpose.int", X, -1, 0, {}),
        ("permute", X, (2, 0, 1), {}),
        ("unsqueeze", X, -1, {}),
        ("squeeze.dim", X[:1], 0, {}),
        ("expand", X[:1], (5, 3, 4), {}),
        ("slice.Tensor", X, 1, 1, 9223372036854775807, {}),
        ("slice.Tensor", X, 2, 0, -1, 2, {}),
        ("select.int", X, 1, -1, {}),
        ("split.Tensor", X, 3, 2, {}),
        ("split_with_sizes", X, (1, 3), 2, {}),
        ("unbind.int", X, 1, {}),
        ("flip", X, (0, 2), {}),
        ("roll", X, (1,), (2,), {}),
        ("repeat", X, (2, 1, 1), {}),
        ("cat", (X, Y), 1, {}),
        ("stack", (X, Y), -1, {}),
        ("sum", X, {}),
        ("sum.dim_IntList", X, (0, 2), True, {}),
        ("mean.dim", X, (-1,), {}),
        ("amax", X, (1,), {}),
        ("amin", X, (), {}),
        ("max", X, {}),
        ("max.dim", X, 1, True, {}),
        ("min.dim", X, -1, {}),
        ("argmax", X, {}),
        ("argmin", X, 1, {}),
        ("any", X > 1, {}),
        ("all.dim", X > 1, 1, {}),
        ("prod.dim_int", X, 1, {}),
        ("var.correction", X, (1,), {"correction": 1}),
        ("std.correction", X, (1,), {"correction": 0}),
        ("var_mean.correction", X, (0,), {"correction": 1}),
        ("logsumexp", X, (1,), {}),
        ("linalg_vector_norm", X, 2, (1,), {}),
        ("cumsum", X, 1, {}),
        ("cumprod", X, 0, {}),
        ("_softmax", X, 1, False, {}),
        ("_log_softmax", X, -1, False, {}),
        ("sort", X, -1, True, {}),
        ("topk", X, 2, {}),
        ("count_nonzero.dim_IntList", INTS, (0,), {}),
        ("embedding", X[0], INTS[0, 0] % 3, {}),
        ("index_select", X, 1, INTS[0, 0] % 3, {}),
        ("gather", X, 2, INTS % 4, {}),
        ("index.Tensor", X, (None, INTS[0, 0] % 3), {}),
        ("index_put", X, (INTS[0, 0] % 2,), Y[0, :1], {}),
        ("slice_scatter", X, Y[:, :1], 1, 0, 1, {}),
        ("select_scatter", X, Y[:, 0], 1, 2, {}),
        ("index_copy", X, 1, INTS[0, 0, :1], Y[:, :1], {}),
        ("index_add", X, 1, INTS[0, 0] % 3, Y.repeat(1, 2, 1)[:, :4], {}),
        ("scatter.src", X, 2, INTS[:, :, :1] % 4, Y, {}),
        ("scatter_add", X, 1, INTS % 3, Y, {}),
        ("native_layer_norm", X, (4,), Y[0, 0], X[0, 0], 1e-5, {}),
        ("full", (2, 3), 7.0, {}),
        ("arange.start", 2, 7, {}),
        ("eye", 3, {}),
        ("_fused_rms_norm", X, (4,), Y[0, 0], 1e-5, {}),
        ("_scaled_dot_product_flash_attention_for_cpu", X[None], Y[None], X[None], 0.0, True, {}),
    ],
    ids=lambda call: call[0],
)
def test_reference(call: tuple[Any, ...]) -> None:
    op, *args, attrs = call
    compare(op, *args, **attrs)


@pytest.mark.parametrize(
    "module",
    [draw, epilogue, ops, parsing, references, rules, types, views],
    ids=lambda m: m.__name__,
)
def test_examples_in_docstrings(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert (failed, tried > 0) == (0, True)


def test_random_inputs_follow_their_types() -> None:
    graph = parse("graph f[dp=2, tp=2](%x: f32[3/tp, 2]~dp, %y: i64[4]):\n  return %x\n")
    x, y = random_inputs(graph, seed=3)
    assert [a.shape for a in x] == [(2, 2), (1, 2)] * 2
    assert not np.array_equal(x[0], x[2])
    assert all(np.array_equal(a, y[0]) for a in y)
    again = random_inputs(graph, seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(x, again[0], strict=True))
