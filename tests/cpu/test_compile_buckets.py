"""Which graphs of changing sizes are padded: those whose rows stay apart, and no others."""

import pytest
import torch
import torch.nn.functional as F

import iris
from iris.spmd import backend
from iris.spmd.buckets import rounded

pytestmark = pytest.mark.cpu

W = torch.randn(8, 8)


def causal(x):
    heads = x.view(1, -1, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2)


APART = {
    "pointwise": lambda x: F.gelu(x) * 2 + x,
    "product": lambda x: F.linear(x, W, W[0]),
    "norms": lambda x: F.rms_norm(x, (8,), W[0]) + F.layer_norm(x, (8,)),
    "softmax of columns": lambda x: x.softmax(-1) - x.mean(-1, keepdim=True),
    "views": lambda x: (x.unsqueeze(0).view(1, -1, 2, 4) * 2).transpose(1, 2),
    "causal attention": causal,
}
MEET = {
    "sum over rows": lambda x: x.sum(0),
    "softmax over rows": lambda x: x.softmax(0),
    "product of rows": lambda x: x.t() @ x,
    "attention to all": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, -1, 8)] * 3),
    "the last row": lambda x: x[-1],
    "reversed": lambda x: x.flip(0),
    "as a number": lambda x: x / x.shape[0],
    "rows between others": lambda x: x.repeat(2, 1).view(-1, 2, 8),
    "running sum": lambda x: x.cumsum(0),
}


@pytest.fixture(autouse=True)
def _context():
    iris.iris(1 << 20)
    torch._dynamo.reset()


def sizes(fn):
    """Rows of every program that serves ``fn``, compiled for any number of rows."""
    compiled = torch.compile(fn, backend="iris")
    for rows in (6, 5, 16, 17):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), fn(x))
    newest = max(backend.COMPILED, key=lambda one: one.number)
    shapes = ([leaf.value.shape for leaf in program.leaves] for program in newest.program.programs)
    return [next(rows for rows, *_ in found if rows != len(W)) for found in shapes]


@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart(name):
    assert sizes(APART[name]) == [16, 32]


@pytest.mark.parametrize("name", MEET)
def test_rows_that_meet(name):
    assert sizes(MEET[name]) == [6, 5, 16, 17]


def test_sizes_are_rounded_up():
    assert [rounded(n) for n in (0, 1, 16, 17, 1000)] == [16, 16, 16, 32, 1024]


def test_options_are_those_of_a_program():
    plain = torch.compile(torch.relu, backend="iris", options={"lowering": "torch", "fuse": False})
    assert plain(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    torch._dynamo.reset()
    wrong = torch.compile(torch.relu, backend="iris", options={"outputs": "reuse"})
    with pytest.raises(Exception, match="'outputs' is not one of mesh, lowering, fuse, replay"):
        wrong(torch.ones(1))
