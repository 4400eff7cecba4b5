"""Every op of a generated epilogue against torch's, on numbers of every kind."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import iris
from iris import P
from iris.lower.choices import Choose
from iris.lower.epilogue import EXPRESSIONS, RESHAPES, generate
from iris.spmd.mesh import AbstractMesh

pytestmark = pytest.mark.cpu

MESH = AbstractMesh((2,), ("tp",))
SPECIAL = [0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 30.0, -30.0]
FUNCTIONS = [
    *(
        torch.relu,
        torch.sigmoid,
        torch.tanh,
        F.silu,
        F.gelu,
        F.relu6,
        F.hardtanh,
        F.leaky_relu,
        torch.abs,
    ),
    *(torch.exp, torch.exp2, torch.log, torch.erf, torch.sin, torch.cos, torch.square, torch.neg),
    *(torch.sqrt, torch.rsqrt, torch.reciprocal, torch.clone),
    *(lambda y: F.gelu(y, approximate="tanh"), lambda y: F.leaky_relu(y, 0.3)),
    *(lambda y, n=n: y**n for n in (1, 2, 3, 4, -1, -2, -3.0, 0.5, -0.5, 1.5, -1.5)),
    *(lambda y: y.clamp(-0.5, 2), lambda y: y.clamp(min=-0.5), lambda y: y.clamp(max=2)),
    *(lambda y: y.clamp_min(0.5), lambda y: y.clamp_max(0.5), lambda y: y.clamp(max=float("inf"))),
    *(lambda y: torch.add(y, y, alpha=2), lambda y: torch.sub(y, 1, alpha=0.5), lambda y: 1 - y),
    *(lambda y: torch.rsub(y, 2, alpha=3), lambda y: y * float("nan"), lambda y: y / 3),
    *(lambda y: torch.maximum(y, 1 - y), lambda y: torch.minimum(y, 1 - y)),
    *(lambda y: y.half(), lambda y: y * float("-inf")),
]


@triton.jit
def apply(x, out, N: tl.constexpr, epilogue: tl.constexpr):
    columns = tl.arange(0, N)
    tile = tl.load(x + columns)[None, :]
    value = epilogue((tile, tile), tl.arange(0, 1), columns, 1, N, ())
    tl.store(out + columns[None, :], value.to(out.dtype.element_ty))


def chain_of(function):
    """The epilogue of ``function(product)``."""

    def program(x, w):
        return function(iris.all_gather(x, "tp", dim=0) @ w)

    traced = iris.spmd(mesh=MESH, in_specs=(P("tp"), P(None, "tp")), lowering="triton")(program)
    graph = traced.trace(torch.empty(2, 8, device="meta"), torch.empty(8, 8, device="meta"))
    choose = Choose("triton", None, {})
    choose(graph.lower().graph)
    (choice,) = choose.choices.values()
    assert choice.match.after == ()
    return choice.match.early[0]


def test_every_op_is_torchs():
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(64 - len(SPECIAL), generator=generator) * 3
    x, seen = torch.cat([torch.tensor(SPECIAL), numbers]), set()
    for function in FUNCTIONS:
        chain = chain_of(function)
        seen.update(node.op.partition(".")[0] for node in chain.nodes)
        want = function(x)
        out = torch.empty_like(want)
        with np.errstate(all="ignore"):
            apply[(1,)](x, out, 64, generate(chain).load())
        beyond = x.isinf() & (want.isnan() | out.isnan())  # each formula gives its own
        near = 1e-3 if want.dtype == torch.float16 else 5e-6
        torch.testing.assert_close(
            *(out.where(~beyond, 0), want.where(~beyond, 0)),
            rtol=near,
            atol=near,
            equal_nan=True,
            msg=lambda text, nodes=chain.nodes: f"{nodes}: {text}",
        )
    assert set(EXPRESSIONS) - RESHAPES - seen == set()


@pytest.mark.parametrize(
    "function",
    [
        *(lambda y, n=n: y**n for n in (0, 5, float("inf"), float("nan"), True)),
        *(lambda y: 2**y, lambda y: y**y),
    ],
    ids=["nothing", "fifth", "infinite", "no number", "true", "of a number", "of a tensor"],
)
def test_a_power_that_is_no_product_is_left_to_torch(function):
    def program(x, w):
        return iris.all_gather(function(x @ w), "tp", dim=0)

    traced = iris.spmd(mesh=MESH, in_specs=(P("tp"), P()), lowering="triton")(program)
    (row,) = traced.explain(torch.empty(2, 8, device="meta"), torch.empty(8, 8, device="meta")).rows
    assert row.choice.algorithm == "unfused"
