"""Memory of stages on the heap: two halves of what travels, and flags, whatever else they read;
of a program: what its largest stage needs.
"""

import pytest
import torch
import torch.nn.functional as F

import iris
from iris import P

pytestmark = pytest.mark.ranks

W, M, K, N = 3, 66, 96, 192
FLAGS = 2048  # at most, in these sizes


def gather(x, w):
    return F.silu(iris.all_gather(x, "tp", dim=0) @ w)


def scatter(x, w):
    return iris.reduce_scatter(x @ w, "tp", dim=0)


def reduce(x, w):
    return iris.all_reduce(x @ w, "tp")


def head(x, w):
    return iris.all_gather(x @ w, "tp", dim=0)


def norm(x, w):
    return F.rms_norm(iris.all_reduce(x, "tp"), (K,), w)


ROWS, COLUMNS, WHOLE = P("tp", None), P(None, "tp"), P()
PROGRAMS = [
    # Specs, this rank's shapes, and how many elements travel: of the operand or the result.
    # One-shot sums and norms get all of it from every rank, two-shot sums travel once more.
    ("all_gather_matmul", gather, (ROWS, COLUMNS), COLUMNS, ((M // W, K), (K, N)), M * K),
    ("matmul_reduce_scatter", scatter, (COLUMNS, ROWS), ROWS, ((M, K), (K, N)), M * N),
    ("matmul_all_gather", head, (ROWS, WHOLE), WHOLE, ((M // W, K), (K, N)), M * N),
    ("matmul_all_reduce", reduce, (COLUMNS, ROWS), WHOLE, ((M, K), (K, N)), 2 * M * N),
    ("matmul_all_reduce", reduce, (COLUMNS, ROWS), WHOLE, ((4, K), (K, N)), W * 4 * N),
    ("all_reduce_norm", norm, (P(partial="tp"), WHOLE), WHOLE, ((M, K), (K,)), W * M * K),
]


def _bytes():
    ctx, found = iris.iris(1 << 23), []
    for name, fn, given, made, shapes, _ in PROGRAMS:
        program = iris.spmd(in_specs=given, out_specs=made, lowering="triton")(fn)
        operands = [torch.ones(shape) for shape in shapes]
        traced = program.trace(*operands)
        assert [row.heap for row in traced.explain().rows] == [0]  # not known yet
        compiled = traced.lower().compile()
        (row,) = compiled.explain().rows
        assert row.stage == name
        assert f" {row.heap:,} " in str(compiled.explain())
        assert compiled.memory().heap == row.heap
        found.append(row.heap)
    ctx.barrier()
    return found


def test_a_stage_needs_two_halves_of_what_travels(ranks):
    results = ranks(W).run(_bytes)
    assert results == results[:1] * W
    for heap, (name, *_, elements) in zip(results[0], PROGRAMS, strict=True):
        assert 2 * 4 * elements < heap <= 2 * 4 * elements + FLAGS, name


def _unfused():
    iris.iris(1 << 23)
    program = iris.spmd(
        in_specs=(ROWS, COLUMNS),
        out_specs=COLUMNS,
        lowering="triton",
        config=iris.StageConfig("unfused"),
    )(gather)
    compiled = program.trace(torch.ones(M // W, K), torch.ones(K, N)).lower().compile()
    (row,) = compiled.explain().rows
    assert (row.choice.algorithm, row.heap) == ("unfused", compiled.memory().heap)
    return row.heap


def test_an_unfused_stage_has_its_collectives_workspace(ranks):
    """Every rank publishes its own rows."""
    for heap in ranks(W).run(_unfused):
        assert 2 * 4 * M // W * K < heap <= 2 * 4 * M // W * K + FLAGS


def _layers(depth):
    """Heap of a chain of layers, and of each of its stages, before and after it ran."""
    iris.iris(1 << 23)

    @iris.spmd(in_specs=(ROWS, COLUMNS, ROWS), out_specs=ROWS, lowering="triton")
    def chain(x, w, v):
        for _ in range(depth):
            h = F.relu(iris.all_gather(x, "tp", dim=0) @ w)
            x = x + iris.reduce_scatter(h @ v, "tp", dim=0)
        return x

    operands = torch.ones(M // W, K), torch.ones(K, N), torch.ones(N, K)
    compiled = chain.trace(*operands).lower().compile()
    return compiled.memory().heap, [row.heap for row in compiled.explain().rows if row.heap]


def test_stages_of_a_program_take_turns_in_one_workspace(ranks):
    for depth in (1, 4):
        for heap, each in ranks(W).run(_layers, depth):
            assert len(each) == 2 * depth
            assert max(each) <= heap <= 2 * 4 * M * K + 2 * depth * FLAGS
