"""What a user is shown of a program, and what a trace refuses, in whole sentences; one rank."""

import gc
import re

import numpy as np
import pytest
import torch

import iris
from iris import P

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def ctx():
    with iris.iris(1 << 20) as context:
        yield context


def refusal(fn, *args):
    """The whole error of a call, with the line of this file left out."""
    with pytest.raises(iris.IrisError) as caught:
        fn(*args)
    return re.sub(r"test_spmd_inspection.py:\d+", "FILE:LINE", str(caught.value))


def test_python_numbers_of_values():
    @iris.spmd
    def f(x):
        return x * float(x.sum())

    assert refusal(f, torch.ones(2)) == (
        "f: Python asks for the value of a traced tensor (if, while, item(), int() or float())\n"
        "  at FILE:LINE: return x * float(x.sum())\n"
        "help: use torch.where, or branch on shapes or on a plain Python argument"
    )


@pytest.mark.parametrize(
    ("escape", "what"),
    [
        (lambda x: x.numpy(), "numpy()"),
        (lambda x: x.tolist(), "tolist()"),
        (lambda x: x.data_ptr(), "data_ptr()"),
        (lambda x: x.sum().item(), "item()"),
        (lambda x: np.asarray(x), "numpy conversion"),
        (lambda x: x.__dlpack__(), "DLPack export"),
    ],
)
def test_values_do_not_leave_a_trace(escape, what):
    @iris.spmd
    def f(x):
        escape(x)
        return x

    first, where, way_out = refusal(f, torch.ones(2)).splitlines()
    assert first == f"f: {what} of a traced tensor: its values are not known while tracing"
    assert where.startswith("  at FILE:LINE: (lambda x: ")
    assert way_out == (
        "help: keep the computation in torch ops, or do this outside the decorated function"
    )


def test_an_in_place_write_to_a_tensor_from_outside():
    outside = torch.zeros(2)

    @iris.spmd
    def f(x):
        outside.add_(x)
        return x

    assert refusal(f, torch.ones(2)) == (
        "f: changes in place a tensor that is not an argument\n"
        "  at FILE:LINE: outside.add_(x)\n"
        "help: pass the tensor as an argument, or make it a buffer of the decorated module, "
        "so that the write is part of the program"
    )


def test_a_shape_that_depends_on_values():
    @iris.spmd
    def f(x):
        return x[x > 0]

    assert refusal(f, torch.ones(2)) == (
        "f: aten.nonzero.default makes a shape that depends on values\n"
        "  at FILE:LINE: return x[x > 0]\n"
        "help: use a form with a fixed shape (masks, torch.where), or do this outside"
    )


def test_arguments_may_be_named_like_ops():
    @iris.spmd
    def f(t, mm, silu, add, axis_index):
        return (t.t() @ mm, silu.exp() + add, iris.axis_index("tp") + axis_index)

    x = torch.arange(4.0).reshape(2, 2)
    for _ in range(3):
        product, total, index = f(x, x, x, x, torch.tensor(3))
        assert torch.equal(product, x.t() @ x)
        assert torch.equal(total, x.exp() + x)
        assert index == 3


def test_a_miss_is_explained(monkeypatch, caplog):
    monkeypatch.setenv("IRIS_LOG", "cache")

    @iris.spmd
    def f(x, config, scale=1.0):
        return x * scale * config["w"]

    w = torch.ones(2)
    with caplog.at_level("DEBUG", logger="iris"):
        f(torch.ones(2), {"w": w})
        f(torch.ones(3, 2), {"w": w})
        f(torch.ones(2), {"w": w}, 2.0)
        f(torch.ones(2), {"w": w.double()})
        f(torch.ones(2), {"w": w, "v": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "f: traced: first call",
        "f: traced: x: shape (2,) -> (3, 2), stride (1,) -> (2, 1)",
        "f: traced: scale: value 1.0 -> 2.0",
        "f: traced: config['w']: dtype torch.float32 -> torch.float64",
        "f: traced: the arguments have another structure",
    ]


def test_explain_is_a_table_in_text_and_html():
    @iris.spmd(
        in_specs=(P("tp"), P(None, "tp"), P("tp")),
        out_specs=(P("tp"), P("tp")),
        mesh=iris.AbstractMesh((4,), ("tp",)),
    )
    def mlp(x, up, down):
        h = torch.relu(iris.all_gather(x, "tp", dim=0) @ up)
        return iris.reduce_scatter(h @ down, "tp", dim=0), iris.ppermute(x, "tp", [(0, 1)])

    found = mlp.explain(torch.empty(512, 1024), torch.empty(1024, 512), torch.empty(512, 1024))
    text = str(found)
    assert text.splitlines()[0].strip() == "mlp on tp=4"
    for cell in (
        "all_gather_matmul", "matmul_reduce_scatter", "fused", "unfused", "predicted",
        "ppermute", "no stage has ppermute", "not fused",
    ):  # fmt: skip
        assert cell in text, cell
    assert all(len(row.choice.candidates) >= 2 for row in found.rows if row.stage != "ppermute")
    assert found._repr_html_().startswith("<pre")
    assert "<style" not in found._repr_html_(), "it would hold for the whole notebook"


def test_a_trace_leaves_the_collector_on_and_no_grad_mode():
    @iris.spmd
    def f(x):
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        f(torch.ones(1))
    assert gc.isenabled()
    assert torch.is_grad_enabled()


def test_what_a_nested_function_reads_is_seen_again():
    scale = [1.0]

    def helper(x):
        return x * scale[0]

    @iris.spmd
    def inner(x):
        return helper(x)

    @iris.spmd
    def outer(x):
        y = inner(x)
        scale[0] += 1
        y = y + inner(x)
        scale[0] -= 1
        return y + inner(x)

    for _ in range(3):
        assert outer(torch.ones(1)).item() == 4
    names = [node.op for node in outer.trace(torch.ones(1)).graph.nodes]
    assert names.count("mul.Tensor") == 3
