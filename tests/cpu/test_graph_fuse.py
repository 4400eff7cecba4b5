"""Which programs, written as people write them, fuse into which stages; and why others do not."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import iris
from iris import P
from iris.graph.nodes import Graph
from iris.graph.parse import parse
from iris.graph.passes import fusion_report, run_passes
from iris.spmd.mesh import AbstractMesh

pytestmark = pytest.mark.cpu

MESH = AbstractMesh((4,), ("tp",))
B, S, K, N = 2, 8, 16, 32  # global; K and N over 4 ranks are 4 and 8
ROWS, COLUMNS = P("tp", None), P(None, "tp")


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def fused(fn: Callable[..., Any], specs: tuple[P, ...], out: Any, *args: torch.Tensor) -> Graph:
    """The graph of ``fn`` on four ranks after all passes."""
    program = iris.spmd(mesh=MESH, in_specs=specs, out_specs=out)(fn)
    return run_passes(program.trace(*args).graph)


def stages(graph: Graph) -> list[str]:
    """Each stage with the ops of its body, and the collectives that stand alone."""
    found = []
    for node in graph.nodes:
        ops = [inner.op.partition(".")[0] for inner in node.body]
        if ops or node.op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            found.append(" ".join([f"{node.op}:", *ops]) if ops else node.op)
    return found


def test_linear_with_bias_after_a_gather() -> None:
    def layer(x, w, b):
        return F.gelu(F.linear(iris.all_gather(x, "tp", dim=0), w, b))

    graph = fused(layer, (ROWS, ROWS, P("tp")), COLUMNS, zeros(2, K), zeros(8, K), zeros(8))
    assert stages(graph) == ["all_gather_matmul: all_gather addmm gelu"]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_three_dims_any_gather_dim(dim: int) -> None:
    def layer(x, w, b):
        return F.relu(F.linear(iris.all_gather(x, "tp", dim=dim), w, b))

    spec = [None, None, None]
    spec[dim] = "tp"
    shape = [4, S, K]
    shape[dim] //= 4
    graph = fused(
        layer,
        (P(*spec), P("tp", None), P("tp")),
        P(None, None, "tp"),
        zeros(*shape),
        zeros(8, K),
        zeros(8),
    )
    assert stages(graph) == ["all_gather_matmul: all_gather view addmm view relu"]


def test_qkv_share_one_gather() -> None:
    def qkv(x, wq, wk, wv):
        return tuple(iris.all_gather(x, "tp", dim=1) @ w.t() for w in (wq, wk, wv))

    out = (P(None, None, "tp"),) * 3
    weights = (zeros(8, K), zeros(4, K), zeros(4, K))
    graph = fused(qkv, (P(None, "tp", None), ROWS, ROWS, ROWS), out, zeros(B, 2, K), *weights)
    assert stages(graph) == ["all_gather_matmul: all_gather view matmul matmul matmul"]


@pytest.mark.parametrize(
    ("activation", "ops"),
    [
        (lambda g, u: F.silu(g) * u, "silu mul"),
        (lambda g, u: F.gelu(g, approximate="tanh") * u, "gelu mul"),
        (lambda g, u: F.relu(g).square() * u, "relu pow mul"),
        (lambda g, u: (g * torch.sigmoid(1.702 * g)) * u, "mul sigmoid mul mul"),
        (
            lambda g, u: (F.silu(g.float()) * u.float()).to(g.dtype),
            "_to_copy silu _to_copy mul _to_copy",
        ),
    ],
)
def test_gated_epilogues_over_two_matmuls(activation: Callable[..., Any], ops: str) -> None:
    def mlp(x, gate, up):
        h = iris.all_gather(x, "tp", dim=0)
        return activation(h @ gate, h @ up)

    graph = fused(mlp, (ROWS, COLUMNS, COLUMNS), COLUMNS, zeros(2, K), zeros(K, 8), zeros(K, 8))
    assert stages(graph) == [f"all_gather_matmul: all_gather matmul matmul {ops}"]


def test_the_gathered_value_is_returned_too() -> None:
    def layer(x, w):
        g = iris.all_gather(x, "tp", dim=0)
        return g @ w, g

    graph = fused(layer, (ROWS, COLUMNS), (COLUMNS, P()), zeros(2, K), zeros(K, 8))
    (stage,) = graph.nodes
    assert [str(value.type) for value in stage.outputs] == ["bf16[8, 16]", "bf16[8, 32/tp]"]


def test_a_value_read_outside_ends_the_epilogue() -> None:
    def layer(x, w):
        h = F.silu(iris.all_gather(x, "tp", dim=0) @ w)
        return torch.relu(h) + 1, torch.cumsum(h, 0)

    graph = fused(layer, (ROWS, COLUMNS), (COLUMNS, COLUMNS), zeros(2, K), zeros(K, 8))
    assert stages(graph) == ["all_gather_matmul: all_gather matmul silu"]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_matmul_before_reduce_scatter_on_any_dim(dim: int) -> None:
    def layer(x, w):
        return iris.reduce_scatter((x @ w) * 0.5, "tp", dim=dim)

    out = [None, None]
    out[dim] = "tp"
    graph = fused(layer, (COLUMNS, ROWS), P(*out), zeros(8, 4), zeros(4, N))
    assert stages(graph) == ["matmul_reduce_scatter: matmul mul reduce_scatter"]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_three_dims_before_reduce_scatter(dim: int) -> None:
    def layer(x, w):
        return iris.reduce_scatter(F.linear(x, w).float(), "tp", dim=dim)

    out = [None, None, None]
    out[dim] = "tp"
    graph = fused(layer, (P(None, None, "tp"), COLUMNS), P(*out), zeros(4, S, 4), zeros(N, 4))
    assert stages(graph) == ["matmul_reduce_scatter: matmul _unsafe_view _to_copy reduce_scatter"]


@pytest.mark.parametrize("dim", [0, 1])
def test_bias_and_residual_after_reduce_scatter(dim: int) -> None:
    def layer(x, w, b, r):
        h = r + (iris.reduce_scatter(x @ w, "tp", dim=dim) + b)
        return h, torch.rsqrt(h.pow(2).mean(1 - dim, keepdim=True)) * h

    spec = P("tp", None) if dim == 0 else P(None, "tp")
    specs, args = (COLUMNS, ROWS, P(*spec.dims[1:]), spec), (zeros(8, 4), zeros(4, N))
    given = (zeros(N), zeros(2, N)) if dim == 0 else (zeros(N // 4), zeros(8, N // 4))
    graph = fused(layer, specs, (spec, spec), *args, *given)
    assert stages(graph) == ["matmul_reduce_scatter: matmul reduce_scatter add add"]


NORMS = {
    "_fused": lambda h, g: F.rms_norm(h, (N,), g, 1e-6),
    "float": lambda h, g: (
        (h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype) * g
    ),
    "plain": lambda h, g: g * (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_matmul_all_reduce_bias_residual_norm(norm: Callable[..., Any]) -> None:
    def layer(x, w, b, r, g):
        h = r + (iris.all_reduce(F.linear(x, w), "tp") + b)
        return h, norm(h, g)

    specs = (P(None, None, "tp"), COLUMNS, P(), P(), P())
    args = (zeros(B, S, 4), zeros(N, 4), zeros(N), zeros(B, S, N), zeros(N))
    graph = fused(layer, specs, (P(), P()), *args)
    (stage,) = (node for node in graph.nodes if node.body)
    assert stage.op == "matmul_all_reduce"
    assert [str(value.type) for value in stage.outputs] == ["bf16[2, 8, 32]"] * 2
    assert stage.body[-1].out.name == graph.outputs[1].name
    assert fusion_report(graph) == []


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_all_reduce_residual_norm_without_a_matmul(norm: Callable[..., Any]) -> None:
    def layer(x, r, g):
        h = iris.all_reduce(torch.tanh(x), "tp") + r
        return h, norm(h, g)

    specs = (P("tp", None, None), P(), P())
    graph = fused(layer, specs, (P(), P()), zeros(1, S, N), zeros(1, S, N), zeros(N))
    assert [s.split(":")[0] for s in stages(graph)] == ["all_reduce_norm"]


def test_matmul_before_all_gather() -> None:
    def layer(x, w):
        return iris.all_gather(F.silu(x @ w), "tp", dim=1)

    graph = fused(layer, (P(), COLUMNS), P(), zeros(8, K), zeros(K, 8))
    assert stages(graph) == ["matmul_all_gather: matmul silu all_gather"]


def test_a_whole_block() -> None:
    def block(x, wqkv, wo, w1, w3, w2, g1, g2):
        h = iris.all_gather(F.rms_norm(x, (K,), g1), "tp", dim=1)
        q, k, v = F.linear(h, wqkv).view(B, S, 3, 1, 4).transpose(1, 3).unbind(2)
        a = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + iris.reduce_scatter(F.linear(a.reshape(B, S, 4), wo), "tp", dim=1)
        h = iris.all_gather(F.rms_norm(x, (K,), g2), "tp", dim=1)
        h = F.silu(F.linear(h, w1)) * F.linear(h, w3)
        return x + iris.reduce_scatter(F.linear(h, w2), "tp", dim=1)

    specs = (P(None, "tp", None), ROWS, COLUMNS, ROWS, ROWS, COLUMNS, P(), P())
    args = (
        zeros(B, 2, K),
        zeros(12, K),
        zeros(K, 4),
        *[zeros(8, K)] * 2,
        zeros(K, 8),
        *[zeros(K)] * 2,
    )
    graph = fused(block, specs, P(None, "tp", None), *args)
    assert [s.split(":")[0] for s in stages(graph)] == [
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "all_gather_matmul",
        "matmul_reduce_scatter",
    ]
    assert fusion_report(graph) == []


def alone(fn: Callable[..., Any], specs: tuple[P, ...], out: Any, *args: torch.Tensor) -> list[str]:
    """Why collectives of ``fn`` are in no stage."""
    graph = fused(fn, specs, out, *args)
    return [
        re.sub(r"%\d+ \(test_graph_fuse.py:\d+\)", "%n", u.reason) for u in fusion_report(graph)
    ]


def test_second_use_of_the_product() -> None:
    def layer(x, w):
        y = x @ w
        return iris.all_reduce(y, "tp"), iris.reduce_scatter(y.abs(), "tp", dim=0, op="max")

    # without specs on the contracted dim nothing is partial, so abs is no error
    why = alone(layer, (P(), COLUMNS), (P(), P("tp")), zeros(8, K), zeros(K, 8))
    assert why == [
        "matmul %n is also read by abs %n, and no RMSNorm follows",
        "its op is max, only sums are fused",
    ]


def test_returned_product() -> None:
    def layer(x, w):
        y = x @ w
        return y, iris.all_gather(y, "tp", dim=1)

    why = alone(layer, (P(), COLUMNS), (COLUMNS, P()), zeros(8, K), zeros(K, 8))
    assert why == ["matmul %n is also returned"]


def test_no_matmul_beside() -> None:
    def layer(x, y):
        return (
            iris.all_gather(x, "tp", dim=0),
            iris.all_gather(torch.cumsum(x, 1), "tp", dim=0).sum(),
            iris.reduce_scatter(torch.softmax(y, 0), "tp", dim=0),
            iris.all_to_all(x, "tp", split_dim=1, concat_dim=0),
        )

    out = (P(), P(), P("tp", None), COLUMNS)
    why = alone(layer, (ROWS, COLUMNS), out, zeros(2, K), zeros(8, 4))
    assert why == [
        "nothing reads its result",
        "its result is read by sum %n, not by a matmul",
        "its operand comes from _softmax %n, not from a matmul",
        "no stage has all_to_all",
    ]


def test_wrong_operand_batch_and_dtype() -> None:
    def layer(x, w, a, b):
        return (
            x @ iris.all_gather(w, "tp", dim=1),
            iris.reduce_scatter(torch.bmm(a, b), "tp", dim=0),
            iris.all_reduce(x.double() @ w.double(), "tp"),
        )

    specs = (P(), COLUMNS, P(None, None, "tp"), P(None, "tp", None))
    args = (zeros(8, K), zeros(K, 8), zeros(4, 8, 4), zeros(4, 4, 8))
    assert alone(layer, specs, (P(), P("tp", None, None), P()), *args) == [
        "its result is not the left operand of matmul %n",
        "matmul %n is batched",
        "matmul %n is in f64, which has no fused kernel, and no RMSNorm follows",
    ]


def test_an_effect_between() -> None:
    def layer(x, w):
        g = iris.all_gather(x, "tp", dim=0)
        scale = iris.all_reduce(w.amax(), "tp", op="max")
        return g @ (w * scale)

    why = alone(layer, (ROWS, COLUMNS), COLUMNS, zeros(2, K), zeros(K, 8))
    assert why == [
        "all_reduce %n has to run between it and matmul %n",
        "its op is max, only sums are fused",
    ]


def test_one_matmul_goes_with_one_collective() -> None:
    def layer(x, w):
        return iris.reduce_scatter(iris.all_gather(x, "tp", dim=0) @ w, "tp", dim=0)

    why = alone(layer, (ROWS, COLUMNS), ROWS, zeros(2, K), zeros(K, 8))
    assert why == ["what it needs is made in all_gather_matmul %n"]


def test_a_product_of_products_is_not_one_stage() -> None:
    def layer(x, w):
        g = iris.all_gather(x, "tp", dim=0)
        return g @ (g @ w)

    graph = fused(layer, (ROWS, P()), P(), zeros(4, K), zeros(K, K))
    assert stages(graph) == ["all_gather_matmul: all_gather matmul"]


def test_effects_keep_their_order() -> None:
    graph = parse("""\
graph f[tp=2](%x: f32[8/tp, 4], %y: f32[8/tp, 4], %w: f32[4, 8]):
  %a: f32[8, 4] = all_gather(%x, axis=tp, dim=0)
  %b: f32[8, 4] = all_gather(%y, axis=tp, dim=0)
  %c: f32[8, 8] = matmul(%a, %w)
  %d: f32[8, 8] = matmul(%b, %w)
  return %c, %d
""")
    assert stages(run_passes(graph)) == ["all_gather_matmul: all_gather matmul"] * 2


def test_identical_gathers_become_one() -> None:
    def layer(x, w):
        a, b = iris.all_gather(x, "tp", dim=0), iris.all_gather(x, "tp", dim=0)
        return a @ w, b

    graph = fused(layer, (ROWS, COLUMNS), (COLUMNS, P()), zeros(2, K), zeros(K, 8))
    assert stages(graph) == ["all_gather_matmul: all_gather matmul"]
    assert [node.op for node in graph.nodes] == ["all_gather_matmul", "clone"]


def test_unused_collectives_and_random_numbers_stay() -> None:
    def layer(x):
        iris.all_reduce(x, "tp")
        torch.rand(3)
        x.cos()
        return x * 2

    graph = fused(layer, (ROWS,), ROWS, zeros(2, K))
    assert [node.op.partition(".")[0] for node in graph.nodes] == ["all_reduce", "rand", "mul"]
