"""A program as its user sees it at every stage, and what a trace refuses, in whole sentences."""

import gc
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

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


def test_ahead_of_time_stages():
    @iris.spmd(in_specs=(P("tp", None), P(None, "tp")), out_specs=P(None, "tp"))
    def up(x, w):
        return F.silu(iris.all_gather(x, "tp", dim=0) @ w)

    x, w = torch.randn(4, 8), torch.randn(8, 6)
    staged = up.trace(x, w)
    line = up.__wrapped__.__code__.co_firstlineno + 2
    head, *body, ret = staged.as_text().splitlines()
    assert head == "graph up[tp=1](%x: f32[4/tp, 8], %w: f32[8, 6/tp]):"
    assert [text.split("#")[0].strip() for text in body] == [
        "%0: f32[4, 8] = all_gather(%x, axis=tp, dim=0)",
        "%1: f32[4, 6/tp] = matmul(%0, %w)",
        "%2: f32[4, 6/tp] = silu(%1)",
    ]
    assert all(text.endswith(f"# {__file__.rsplit('/', 1)[-1]}:{line}") for text in body)
    assert ret == "  return %2"
    compiled = staged.lower().compile()
    assert torch.equal(compiled(x, w), F.silu(x @ w))
    assert compiled.memory().local == 4 * (4 * 8 + 4 * 6)  # the gathered x and the product
    assert "def up(x, w):" in compiled.as_text()
    with pytest.raises(iris.SpecError, match="compiled for other arguments"):
        compiled(x[:2], w)


def test_memory_of_views(ctx):
    @iris.spmd
    def turned(x):
        y = (x + 1).t()  # keeps the sum alive, and takes nothing
        z = y[:2] * 2
        return z.flip(0), y

    x = torch.randn(4, 8)
    assert turned.trace(x).lower().compile().memory().local == 4 * (4 * 8 + 2 * (2 * 4))


def test_tracing_for_a_mesh_that_is_not_there(ctx):
    ctx.close()
    mesh = iris.AbstractMesh((2, 4), ("dp", "tp"))

    @iris.spmd(mesh=mesh, in_specs=(P("dp", "tp"), P("tp", None)), out_specs=P("dp", None))
    def down(x, w):
        return iris.all_reduce(x @ w, "tp")

    text = down.trace(torch.empty(8, 16), torch.empty(16, 4)).as_text()
    assert "%x: f32[16/dp, 64/tp], %w: f32[64/tp, 4]" in text
    with pytest.raises(iris.UnsupportedError, match="an abstract mesh has no ranks to run on"):
        down(torch.empty(8, 16), torch.empty(16, 4))

    @iris.spmd(mesh=mesh)
    def fill(cache, x):
        return cache.add_(x) * 2

    shapes = torch.empty(4, 2, device="meta"), torch.empty(2, device="meta", dtype=torch.bfloat16)
    assert "write %cache <- %0" in fill.trace(*shapes).as_text()


def test_dump_holds_every_step_and_a_script_that_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("IRIS_DUMP", str(tmp_path))

    @iris.spmd(in_specs=(P("tp", None), P(None, "tp")), out_specs=P(None, "tp"), lowering="triton")
    def up(x, w):
        return F.silu(iris.all_gather(x, "tp", dim=0) @ w)

    up(torch.ones(4, 8), torch.ones(8, 6))
    folder = tmp_path / "rank0" / "up"
    assert sorted(path.name for path in folder.iterdir()) == [
        "00_import.txt",
        "01_canonicalise.txt",
        "02_dedupe.txt",
        "03_fuse.txt",
        "04_choose.txt",
        "05_kernel_all_gather_matmul_2.txt",
        "06_plan.txt",
        "repro.py",
    ]
    assert "tl.sigmoid" in (folder / "05_kernel_all_gather_matmul_2.txt").read_text()
    assert "all_gather_matmul(%x, %w, algorithm=fused)" in (folder / "04_choose.txt").read_text()
    ran = subprocess.run(
        [sys.executable, str(folder / "repro.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.stdout.startswith("output 0, rank 0: shape (4, 6), sum ")
