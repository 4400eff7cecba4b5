"""What the planner chooses for a gathered product, by shape and by what the device can do."""

import pytest
import torch

import iris
from iris import P
from iris.lower.choices import Choose, StageConfig
from iris.lower.cost import profile_of
from iris.spmd.mesh import AbstractMesh

pytestmark = pytest.mark.cpu

H200 = profile_of("NVIDIA H200")


def chosen(traced, profile, config, engine=False):
    """The one choice of a program."""
    choose = Choose("triton", profile, {}, config, engine)
    choose(traced.lower().graph)
    (found,) = choose.choices.values()
    return found


def choice(rows, inner, columns, engine, config=None):
    """The choice for [rows/4, inner] gathered times [inner, columns/4], in bf16 on 4 ranks."""

    @iris.spmd(
        mesh=AbstractMesh((4,), ("tp",)),
        in_specs=(P("tp", None), P(None, "tp")),
        out_specs=P(None, "tp"),
    )
    def up(x, w):
        return iris.all_gather(x, "tp", dim=0) @ w

    x = torch.empty(rows // 4, inner, dtype=torch.bfloat16, device="meta")
    w = torch.empty(inner, columns // 4, dtype=torch.bfloat16, device="meta")
    return chosen(up.trace(x, w), H200, config, engine)


@pytest.mark.parametrize("rows", [64, 512, 32768])
def test_the_copy_engine_is_chosen_where_much_is_sent(rows):
    found = choice(rows, 8192, 8192, engine=True)
    assert (found.algorithm == "copy engine") == (rows == 32768)
    assert {name for name, _ in found.candidates} == {"fused", "unfused", "copy engine"}


def test_without_a_copy_engine_it_is_no_candidate():
    for config in (None, StageConfig("copy engine")):
        found = choice(32768, 8192, 8192, engine=False, config=config)
        assert found.algorithm == "fused"
        assert {name for name, _ in found.candidates} == {"fused", "unfused"}


def reduced(rows, config=None):
    """The choice for [rows, 14336/4] @ [14336/4, 4096], summed over 4 ranks that share an H200."""

    @iris.spmd(
        mesh=AbstractMesh((4,), ("tp",)),
        in_specs=(P(None, "tp"), P("tp", None)),
        out_specs=P(),
    )
    def down(x, w):
        return iris.all_reduce(x @ w, "tp")

    x = torch.empty(rows, 3584, dtype=torch.bfloat16, device="meta")
    w = torch.empty(3584, 4096, dtype=torch.bfloat16, device="meta")
    profile = H200.shared(4, 26)
    return chosen(down.trace(x, w), profile, config)


def test_sums_of_few_rows_go_in_one_step_and_of_many_in_two():
    assert {reduced(rows).algorithm for rows in (1, 8, 64)} == {"one-shot"}
    assert reduced(4096).algorithm == "two-shot"
    assert {name for name, _ in reduced(8).candidates} == {"one-shot", "two-shot", "unfused"}


@pytest.mark.parametrize("way", ["one-shot", "two-shot", "unfused"])
def test_every_way_can_be_asked_for(way):
    found = reduced(64, StageConfig(way))
    assert (found.algorithm, found.why) == (way, "forced by config")
    assert (found.match is None) == (way == "unfused")
