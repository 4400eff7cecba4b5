"""What the planner chooses for a gathered product, by shape and by what the device can do."""

import pytest
import torch

import iris
from iris import P
from iris.lower.choices import StageConfig, choose
from iris.lower.cost import profile_of
from iris.spmd.mesh import AbstractMesh

pytestmark = pytest.mark.cpu

H200 = profile_of("NVIDIA H200")


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
    (found,) = choose(up.trace(x, w).lower().graph, "triton", H200, {}, config, engine).values()
    return found


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
