"""Every fused stage against torch's ops, over random programs: shapes, dtypes, strides, epilogues.

Ranks draw the same programs in step: each example ends with an exchange of what went wrong, so all
of them shrink alike. Small integers must come out exact, then floats within the tolerance table.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings, strategies as st
from stage_programs import FLOATS, FP8, KINDS, LINEAR, NORMS, POINTWISE, SMOOTH, Case, check

import iris

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


def drawn(strategy, kind, examples):
    """Check random cases in step with the other ranks; which ways their stages were computed."""
    ctx = iris.iris(1 << 26)
    ways = set()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(strategy(kind))
    def run(case):
        found, error = [], ""
        try:
            found = check(case, ctx)
        except Exception as failure:
            error = f"rank {ctx.cur_rank}: {type(failure).__name__}: {failure}"
        errors = [text for text in ctx.world.exchange_object("outcome", error) if text]
        note(str(case))
        assert not errors, "\n".join(errors)
        ways.update(found)

    run()
    return ways


def cases(kind):
    """Random cases of a kind, as far as they make sense."""
    booleans, floats = st.booleans(), st.sampled_from(FLOATS)
    sizes = st.one_of(st.integers(0, 4), st.integers(5, 40))
    fields = {
        "M": sizes,
        "N": sizes.map(lambda n: max(n, 1)),
        "K": sizes,
        "dtype": floats,
        "layout": st.sampled_from(["rows", "columns", "strided"]),
        "linear": booleans,
        "bias": booleans,
    }
    if kind == "gather":
        fields |= {
            "dim": st.integers(0, 1),
            "weights": st.integers(1, 3),
            "epilogue": st.sampled_from([*POINTWISE, *SMOOTH]),
            "residual": booleans,
            "batched": booleans,
            "again": booleans,
        }
    elif kind == "scatter":
        fields |= {"dim": st.integers(0, 1), "epilogue": st.sampled_from([*LINEAR])}
        fields |= {"batched": booleans, "residual": booleans}
    elif kind == "reduce":
        fields |= {"epilogue": st.sampled_from([*LINEAR]), "residual": booleans}
        fields |= {"norm": st.sampled_from(["", *NORMS])}
        fields |= {"algorithm": st.sampled_from(["one-shot", "two-shot", "unfused"])}
    elif kind == "send":
        fields |= {"dim": st.integers(0, 1), "epilogue": st.sampled_from([*POINTWISE, *SMOOTH])}
    else:
        fields |= {"residual": booleans, "norm": st.sampled_from([*NORMS])}
        fields |= {"linear": st.just(False), "layout": st.just("rows")}
    return st.builds(Case, kind=st.just(kind), **fields)


def narrow_cases(kind):
    """Products of int8 and of scaled fp8."""
    return st.builds(
        Case,
        kind=st.just(kind),
        M=st.integers(1, 24),
        N=st.integers(1, 3).map(lambda n: 16 * n),
        K=st.integers(1, 3).map(lambda k: 32 * k),
        dtype=st.sampled_from([torch.int8, FP8]),
        dim=st.integers(0, 1) if kind in ("gather", "scatter", "send") else st.just(0),
    )


def check_kind(ranks, kind, strategy, examples):
    world = 3 if kind == "reduce" else 2
    found = ranks(world).run(drawn, strategy, kind, examples, timeout=280)
    assert all(ways == found[0] for ways in found)
    return found[0]


STAGE = {
    "gather": "all_gather_matmul",
    "scatter": "matmul_reduce_scatter",
    "reduce": "matmul_all_reduce",
    "send": "matmul_all_gather",
    "norm": "all_reduce_norm",
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_programs(ranks, kind):
    ways = check_kind(ranks, kind, cases, 6)
    assert (STAGE[kind], "one-shot" if kind == "reduce" else "fused") in {w[:2] for w in ways}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_programs(ranks, kind):
    check_kind(ranks, kind, cases, 60)


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce", "send"])
def test_random_products_of_bytes(ranks, kind):
    ways = check_kind(ranks, kind, narrow_cases, 3)
    assert {way for _, way, _ in ways} <= {"fused", "one-shot", "two-shot"}
