"""Which stages have no kernel, and what ``explain`` says then; what tritonBLAS is asked."""

import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

import iris
from iris import P
from iris.lower.choices import Choose
from iris.lower.cost import ANY
from iris.lower.kernels.config import GemmConfig
from iris.lower.kernels.selector import selected_config
from iris.spmd.mesh import AbstractMesh

pytestmark = pytest.mark.cpu

MESH = AbstractMesh((4,), ("tp",))
ROWS, COLUMNS = P("tp", None), P(None, "tp")


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def gather_batches(x, w):
    return iris.all_gather(x, "tp", dim=1) @ w


def four_weights(x, w):
    g = iris.all_gather(x, "tp", dim=0)
    return tuple(g @ (w + i) for i in range(4))


def alpha(x, w, b):
    return torch.addmm(b, iris.all_gather(x, "tp", dim=0), w, alpha=2)


def chosen(x, w):
    y = x @ w
    return iris.all_gather(torch.where(y > 0, y, 2 * y), "tp", dim=1)


def scatter_batches(x, w):
    return iris.reduce_scatter(x @ w, "tp", dim=1)


def scaled(x, w, s):
    y = torch._scaled_mm(x, w.t(), s, s, scale_result=s, out_dtype=torch.float8_e4m3fn)
    return iris.all_gather(y, "tp", dim=0)


def two_kinds(x, w, s):
    y = torch._scaled_mm(x, w.t(), s, s, out_dtype=torch.bfloat16)
    return iris.all_gather(y, "tp", dim=0)


def odd_norm(x):
    y = iris.all_reduce(torch.tanh(x), "tp")
    return y * torch.rsqrt(torch.add((y * y).mean(-1, keepdim=True), 1e-6, alpha=2))


def norm(x):
    return F.rms_norm(iris.all_reduce(torch.tanh(x), "tp"), x.shape[-1:], eps=1e-5)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = empty(dtype=torch.float32)
UNSERVED = [
    (gather_batches, (P(None, "tp", None), COLUMNS), [empty(2, 4, 8), empty(8, 4)],
     "rows of dim 1 do not lie together"),
    (four_weights, (ROWS, COLUMNS), [empty(2, 8), empty(8, 4)],
     "4 products share one gather, the kernel takes 3"),
    (alpha, (ROWS, COLUMNS, P("tp")), [empty(2, 8), empty(8, 4), empty(4)],
     "addmm with alpha or beta"),
    (chosen, (P(), COLUMNS), [empty(8, 8), empty(8, 4)],
     "what runs between the product and the all_gather is no epilogue"),
    (scatter_batches, (P(None, None, "tp"), ROWS), [empty(2, 8, 4), empty(4, 8)],
     "rows of dim 1 do not lie together"),
    (scaled, (ROWS, P(), P()), [empty(16, 16, dtype=E4M3), empty(16, 16, dtype=E4M3), ONE],
     "_scaled_mm with a scale of its result"),
    (two_kinds, (ROWS, P(), P()), [empty(16, 16, dtype=E4M3), empty(16, 16, dtype=E5M2), ONE],
     "operands are f8e4m3fn and f8e5m2"),
    (odd_norm, (P("tp"),), [empty(1, 8)], "the norm is of another form"),
    (norm, (P("tp"),), [empty(1, 8, dtype=torch.float64)], "operands are f64"),
    (norm, (P("tp"),), [empty(1, 16385)], "rows of 16385 elements, the kernel takes 16384"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "specs", "args", "why"), UNSERVED, ids=[c[3] for c in UNSERVED])
def test_what_has_no_kernel_is_explained(fn, specs, args, why):
    program = iris.spmd(mesh=MESH, in_specs=specs, lowering="triton")(fn)
    (row,) = (row for row in program.explain(*args).rows if row.choice.algorithm != "torch")
    assert (row.choice.algorithm, row.choice.why) == ("unfused", f"no kernel: {why}")


def test_the_programs_that_communicate_are_part_of_the_plan():
    def program(x, w):
        return iris.all_gather(x, "tp", dim=0) @ w

    config = iris.StageConfig("fused", communication=8)
    program = iris.spmd(mesh=MESH, in_specs=(ROWS, COLUMNS), lowering="triton", config=config)(
        program
    )
    (row,) = program.explain(empty(2, 8), empty(8, 4)).rows
    assert row.choice.why == "forced by config; 8 programs communicate"
    with pytest.raises(iris.ConfigError) as caught:
        iris.StageConfig(communication=-1)
    assert str(caught.value) == "communication is -1, a number of programs or 0"


def match_of(graph, profile=None):
    choose = Choose("triton", profile, {})
    choose(graph)
    return next(iter(choose.choices.values())).match


def test_every_weight_has_an_epilogue_of_its_own():
    def qkv(x, q, k, v, b, c):
        g = iris.all_gather(x, "tp", dim=0)
        return F.linear(g, q, b), F.silu(F.linear(g, k, c)), F.linear(g, v).cumsum(1)

    specs = (ROWS, ROWS, ROWS, ROWS, P("tp"), P("tp"))
    args = [empty(2, 8), empty(4, 8), empty(2, 8), empty(2, 8), empty(4), empty(2)]
    program = iris.spmd(mesh=MESH, in_specs=specs, lowering="triton")(qkv)
    graph = program.trace(*args).lower().graph
    match = match_of(graph)
    assert match is not None
    assert not match.zipped
    assert [[node.op.partition(".")[0] for node in chain.nodes] for chain in match.early] == [
        ["add"],
        ["add", "silu"],
        [],
    ]
    assert match.after == ()


@pytest.mark.parametrize(("rows", "profile", "zipped"), [(64, ANY, 1), (65, ANY, 0), (65, None, 1)])
def test_pairs_of_weights_share_tiles_of_few_rows_on_gpus(rows, profile, zipped):
    def swiglu(x, gate, up):
        g = iris.all_gather(x, "tp", dim=0, size=rows)
        return F.silu(g @ gate) * (g @ up)

    program = iris.spmd(mesh=MESH, in_specs=(ROWS, COLUMNS, COLUMNS), lowering="triton")(swiglu)
    traced = program.trace(empty(-(-rows // 4), 8), empty(8, 4), empty(8, 4))
    match = match_of(traced.lower().graph, profile)
    assert match.zipped == bool(zipped)
    left = [] if zipped else ["mul"]
    assert [node.op.partition(".")[0] for node in match.after] == left


@pytest.mark.parametrize("profile", [ANY, None])
def test_the_norm_of_a_products_sum_is_torchs_on_gpus(profile):
    def block(x, w, r, scale):
        h = r + iris.all_reduce(x @ w, "tp")
        return h, F.rms_norm(h, (8,), scale)

    specs = (COLUMNS, ROWS, P(), P())
    program = iris.spmd(mesh=MESH, in_specs=specs, lowering="triton")(block)
    graph = program.trace(empty(4, 2), empty(2, 8), empty(4, 8), empty(8)).lower().graph
    match = match_of(graph, profile)
    assert [node.op.partition(".")[0] for node in match.late.nodes] == ["add"]
    assert (match.norm is None) == bool(match.after) == (profile is ANY)


def test_what_follows_a_scattered_sum_is_its_epilogue():
    def program(x, w, b):
        y = F.relu(iris.reduce_scatter(x @ w, "tp", dim=0) + b)
        return y, y.cumsum(0)

    traced = iris.spmd(mesh=MESH, in_specs=(COLUMNS, ROWS, P()), lowering="triton")(program)
    graph = traced.trace(empty(8, 2), empty(2, 8), empty(8)).lower().graph
    match = match_of(graph)
    assert [node.op.partition(".")[0] for node in match.late.nodes] == ["add", "relu"]
    assert match.after == ()


SELECTORS = {
    "of today": """\
        class OrigamiMatmulSelector:
            def __init__(self, m, n, k, a_dtype, b_dtype, c_dtype, device):
                asked.append((m, n, k, a_dtype, b_dtype, c_dtype))
                self.block_m, self.block_n, self.block_k, self.group_m = 64, 128, 32, 4
        """,
    "of before": """\
        class MatmulHeuristicResult:
            def __init__(self, m, n, k, a_dtype, b_dtype, c_dtype):
                asked.append((m, n, k, a_dtype, b_dtype, c_dtype))

            def get_config(self):
                return 64, 128, 32, 4
        """,
}


@pytest.mark.parametrize("text", SELECTORS.values(), ids=SELECTORS)
def test_tritonblas_is_asked_as_it_documents(text, tmp_path, monkeypatch):
    source = "asked = []\n" + textwrap.dedent(text)
    (tmp_path / "tritonblas.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = GemmConfig(warps=4)
    found = selected_config(512, 1024, 256, torch.bfloat16, torch.device("cpu"), given)
    assert found == GemmConfig(64, 128, 32, warps=4, group_m=4)
    assert sys.modules.pop("tritonblas").asked == [(512, 1024, 256, *[torch.bfloat16] * 3)]


def test_without_tritonblas_the_config_is_ours():
    given = GemmConfig(warps=4)
    device = torch.device("cpu")
    assert selected_config(512, 1024, 256, torch.bfloat16, device, given) is given
