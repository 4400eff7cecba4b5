"""``torch.compile(backend="iris")`` and modules of DTensors: the values of torch without us, their
collectives in stages.
"""

import copy
import gc
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import iris
from iris.nn import ColumnParallelLinear, RowParallelLinear
from iris.testing import assert_close, delay, small_integers

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

COLUMNS, ROWS = ColwiseParallel, RowwiseParallel


class Block(nn.Module):
    """A feed-forward block with its norm and a head, as models have them."""

    def __init__(self, hidden=24):
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.gate, self.up = nn.Linear(8, hidden, bias=False), nn.Linear(8, hidden)
        self.down, self.head = nn.Linear(hidden, 8), nn.Linear(8, 12)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.head(self.norm(x))


def plan(by_rows):
    """How the block is spread: whole rows between products, or this rank's."""
    if not by_rows:
        return {"gate": COLUMNS(), "up": COLUMNS(), "down": ROWS()}
    rows = Shard(1)
    return {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=rows),
        "norm": SequenceParallel(),
        "gate": COLUMNS(input_layouts=rows),
        "up": COLUMNS(input_layouts=rows),
        "down": ROWS(output_layouts=rows, use_local_output=False),
        "head": COLUMNS(input_layouts=rows, output_layouts=Replicate()),
    }


def spread(by_rows, hidden=24):
    """The block whole, and over ranks: one seed, so every rank makes the same."""
    forget()
    torch.manual_seed(0)
    whole = Block(hidden)
    mesh = iris.mesh((iris.current().num_ranks,), ("tp",))
    return whole, parallelize_module(copy.deepcopy(whole), mesh, plan(by_rows))


def forget():
    """Drop what earlier tests compiled in this process."""
    torch._dynamo.reset()
    gc.collect()


def counts(model, name=""):
    """Collectives in stages and in all, by stage of each program."""
    found = [row for row in iris.explain(model).fused if row.program.startswith(name)]
    return {(row.collective, row.stages, row.total) for row in found}


def _inference(by_rows, hidden, decorated):
    ctx = iris.iris(1 << 22)
    whole, model = spread(by_rows, hidden)
    model = iris.spmd(model) if decorated else torch.compile(model, backend="iris")
    for call in range(3):
        x = torch.randn(2, 12, 8)
        delay(ctx.num_ranks - 1 if call == 2 else -1)
        with torch.no_grad():
            torch.testing.assert_close(model(x), whole(x), rtol=1e-5, atol=1e-5)
    return counts(model)


@pytest.mark.parametrize(
    ("world", "hidden", "decorated"),
    [(2, 24, False), (2, 30, True), pytest.param(3, 30, False, marks=pytest.mark.slow)],
)
def test_a_block_of_whole_rows(ranks, world, hidden, decorated):
    for found in ranks(world).run(_inference, False, hidden, decorated):
        assert found == {("all_reduce", (("matmul_all_reduce", 1),), 1)}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_block_by_rows(ranks, world):
    stages = {
        ("all_gather", (("all_gather_matmul", 2),), 3),  # the last joins columns of such a stage
        ("reduce_scatter", (("matmul_reduce_scatter", 1),), 1),
    }
    assert ranks(world).run(_inference, True, 24, True)[0] == stages


def test_gradients(ranks):
    def run():
        iris.iris(1 << 22)
        # The norm's gradients leave out that of x, which needs none.
        whole, model = (nn.Sequential(nn.LayerNorm(8), part) for part in spread(False))
        compiled = torch.compile(model, backend="iris")
        for _ in range(3):
            x = torch.randn(2, 5, 8)
            compiled(x).square().sum().backward()
            whole(x).square().sum().backward()
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        for mine, other in pairs:
            grad = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
            torch.testing.assert_close(grad, other.grad, rtol=1e-4, atol=1e-4)

    ranks(2).run(run)


def test_shards_that_are_slices_of_a_batch(ranks):
    """Only the first rank's begins where its memory does; sizes change."""

    def run():
        ctx = iris.iris(1 << 22)
        forget()
        torch.manual_seed(0)
        whole, rows = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)), Shard(0)
        styles = {"0": SequenceParallel(sequence_dim=0), "1": COLUMNS(input_layouts=rows)}
        styles["2"] = ROWS(output_layouts=rows)
        mesh = iris.mesh((ctx.num_ranks,), ("tp",))
        model = parallelize_module(copy.deepcopy(whole), mesh, styles)
        compiled = torch.compile(model, backend="iris")
        for size in (4, 6, 4, 10):
            x = torch.randn(size, 8).chunk(ctx.num_ranks)[ctx.cur_rank]
            compiled(x).square().sum().backward()
            whole(x).square().sum().backward()
        for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
            total = iris.all_reduce(other.grad)
            torch.testing.assert_close(mine.grad.full_tensor(), total, rtol=1e-4, atol=1e-4)
        summary = iris.explain(compiled)
        mine = [one for one in summary.alone if one.program.startswith("compiled")]
        assert not mine, summary
        return len(counts(compiled, "compiled"))

    assert ranks(2).run(run) == [2] * 2  # a gather and a scatter, each always in its stage


def test_many_sizes_need_few_programs(ranks):
    def run():
        iris.iris(1 << 22)
        whole, model = spread(False)
        compiled = torch.compile(model, backend="iris")
        for rows in (5, 6, 7, 20, 21, 31, 9):
            x = torch.randn(2, rows, 8)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), whole(x), rtol=1e-5, atol=1e-5)
        names = {row.program for row in iris.explain(compiled).fused}
        return sorted(name for name in names if name.startswith("compiled"))

    # Dynamo takes the first size as it is, and those after it as one that changes.
    assert ranks(2).run(run)[0] == ["compiled 2x16x8", "compiled 2x32x8", "compiled 2x5x8"]


def test_graph_breaks_and_functional_collectives(ranks):
    def run():
        ctx = iris.iris(1 << 22)
        forget()
        group = torch.distributed.group.WORLD

        def model(x, up, down):
            h = F.relu(functional.all_gather_tensor(x, 1, group) @ up)
            torch._dynamo.graph_break()
            return functional.reduce_scatter_tensor(h @ down, "sum", 0, group)

        compiled = torch.compile(model, backend="iris")
        for seed in range(3):
            x = small_integers((4, 3), ctx.cur_rank, seed)
            up, down = small_integers((6, 4), seed=7), small_integers((4, 5), ctx.cur_rank, 8)
            assert_close(compiled(x, up, down), model(x, up, down))
        return counts(compiled, "compiled")

    assert ranks(2).run(run)[0] == {
        ("all_gather", (("all_gather_matmul", 1),), 1),
        ("reduce_scatter", (("matmul_reduce_scatter", 1),), 1),
    }


@pytest.mark.slow
def test_a_group_of_some_ranks_and_an_op_without_a_name(ranks):
    def run():
        ctx = iris.iris(1 << 22)
        forget()
        mesh = iris.mesh((2, 2), ("dp", "tp"))
        x = small_integers((4, 2), ctx.cur_rank)

        def exchange(x):
            sent = functional.all_to_all_single(x * 2, None, None, (mesh, 1))
            return functional.all_reduce(sent + 1, "sum", (mesh, 1))

        assert_close(torch.compile(exchange, backend="iris")(x), exchange(x))

        def both(x):
            inner = functional.all_reduce(x, "sum", (mesh, 1))
            return functional.all_reduce(inner, "sum", (mesh, 0))

        with pytest.raises(Exception, match="collectives over 2 groups of ranks, and no mesh"):
            torch.compile(both, backend="iris")(x)

    ranks(4).run(run)


@pytest.mark.parametrize("lowering", ["torch", "triton"])
def test_iris_inside_a_compiled_function(ranks, lowering):
    def run():
        iris.iris(1 << 22)
        forget()
        torch.manual_seed(0)
        up, down = nn.Linear(6, 12), nn.Linear(12, 6)
        column, row = ColumnParallelLinear.from_linear(up), RowParallelLinear.from_linear(down)
        model = nn.Sequential(column, nn.ReLU(), row)
        doubled = iris.spmd(lowering=lowering)(lambda x: iris.all_reduce(x * 2, "tp"))
        for backend in ("iris", "aot_eager"):  # each call of ours breaks the graph
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("error", UserWarning)
                compiled = torch.compile(lambda x: doubled(model(x)) + 1, backend=backend)
                for _ in range(3):
                    x = torch.randn(4, 6)
                    torch.testing.assert_close(compiled(x), 4 * down(up(x).relu()) + 1)

    ranks(2).run(run)


def test_the_name_is_known_without_loading_dynamo():
    code = """
import sys, torch, iris
assert "torch._dynamo" not in sys.modules
iris.iris(1 << 20)
double = torch.compile(lambda x: (x @ x.T).relu() * 2, backend="iris")
x = torch.randn(3, 4)
with torch.no_grad():
    torch.testing.assert_close(double(x), (x @ x.T).relu() * 2)
print(len(iris.explain(double).fused), "iris.spmd.backend" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 True\n", done.stderr
