"""DTensors as arguments: their placements are their specs, and programs see their local parts."""

import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import iris
from iris import P
from iris.testing import delay, small_integers

pytestmark = pytest.mark.ranks


def _mlp():
    ctx = iris.iris(1 << 22)
    mesh = iris.mesh((ctx.num_ranks,), ("tp",))

    @iris.spmd(out_specs=P("tp", None))
    def mlp(x, weights):
        h = torch.relu(iris.all_gather(x, "tp", dim=0) @ weights["up"])
        return iris.reduce_scatter(h @ weights["down"], "tp", dim=0)

    for call in range(3):
        x, up, down = (
            small_integers((7, 5), call),
            small_integers((5, 8), 1),
            small_integers((8, 3), 2),
        )
        placed = distribute_tensor(x, mesh, [Shard(0)])
        weights = {
            "up": distribute_tensor(up, mesh, [Shard(1)]),
            "down": distribute_tensor(down, mesh, [Shard(0)]),
        }
        delay(ctx.num_ranks - 1 if call == 2 else -1)
        y = mlp(placed, weights)
        whole = DTensor.from_local(y, mesh, [Shard(0)], shape=(7, 3), stride=(3, 1))
        assert type(y) is torch.Tensor
        assert torch.equal(whole.full_tensor(), torch.relu(x @ up) @ down)
    text = mlp.trace(placed, weights).as_text()
    assert len(mlp._state.programs) == 1
    return text.splitlines()[0]


@pytest.mark.parametrize("world", [2, 3])
def test_placements_are_specs_and_sizes_are_global(ranks, world):
    inputs = "%x: f32[7/tp, 5], %weights_up: f32[5, 8/tp], %weights_down: f32[8/tp, 3]"
    assert set(ranks(world).run(_mlp)) == {f"graph mlp[tp={world}]({inputs}):"}


def _two_axes():
    iris.iris(1 << 22)
    mesh = iris.mesh((2, 2), ("dp", "tp"))
    row, column = mesh.get_coordinate()
    x, w = small_integers((6, 4)), small_integers((4, 5), 1)
    part = small_integers((3, 5), 10 * row + column)

    @iris.spmd(mesh=mesh, in_specs=([Shard(0), Shard(1)], None, None), out_specs=P("dp", None))
    def product(x, w, part):
        return iris.all_reduce(x @ w, "tp") + iris.all_reduce(part, "tp")

    local = x[3 * row : 3 * row + 3, 2 * column : 2 * column + 2].contiguous()
    due = sum(small_integers((3, 5), 10 * row + place) for place in range(2))
    for given in (local, distribute_tensor(x, mesh, [Shard(0), Shard(1)])):
        y = product(
            given,
            distribute_tensor(w, mesh, [Replicate(), Shard(0)]),
            DTensor.from_local(part, mesh, [Shard(0), Partial()]),
        )
        assert torch.equal(y, x[3 * row : 3 * row + 3] @ w + due)
    return str(
        product.trace(
            local,
            distribute_tensor(w, mesh, [Replicate(), Shard(0)]),
            DTensor.from_local(part, mesh, [Shard(0), Partial()]),
        )
        .graph.inputs[2]
        .type
    )


def test_two_axes_partial_sums_and_placements_in_place_of_p(ranks):
    assert set(ranks(4).run(_two_axes)) == {"f32[6/dp, 5]+tp"}


def _changes():
    ctx = iris.iris(1 << 20)
    mesh = iris.mesh((2,), ("tp",))

    @iris.spmd
    def double(x):
        return x * 2

    x = small_integers((4, 4))
    rows, columns = (distribute_tensor(x, mesh, [Shard(dim)]) for dim in (0, 1))
    types = []
    for given in (rows, columns, rows, distribute_tensor(x, mesh, [Replicate()])):
        y = double(given)
        assert torch.equal(y, given.to_local() * 2)
        types.append(str(double.trace(given).graph.inputs[0].type))
    ctx.barrier()
    return types, len(double._state.programs)


def test_another_placement_is_another_program(ranks):
    types = ["f32[4/tp, 4]", "f32[4, 4/tp]", "f32[4/tp, 4]", "f32[4, 4]"]
    assert ranks(2).run(_changes) == [(types, 3)] * 2


def _refused():
    iris.iris(1 << 20)
    mesh, other = iris.mesh((2, 2), ("dp", "tp")), iris.mesh((4,), ("tp",))
    unnamed = init_device_mesh("cpu", (4,))
    x = small_integers((4, 4))
    outside = distribute_tensor(x, other, [Shard(0)])

    def add(x, y):
        return x + y

    def read(x):
        return x + outside

    split = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    calls = (
        (iris.spmd(mesh=mesh, in_specs=P("dp"))(add), (split, outside)),
        (iris.spmd(add), (split, outside)),
        (iris.spmd(add), (x, distribute_tensor(x, unnamed, [Shard(0)]))),
        (iris.spmd(add), (x, DTensor.from_local(x, other, [Partial("max")]))),
        (iris.spmd(read), (x,)),
    )
    texts = []
    for program, args in calls:
        with pytest.raises(iris.IrisError) as caught:
            program(*args)
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
    return texts


def test_what_does_not_fit_is_refused(ranks):
    for texts in ranks(4).run(_refused):
        texts[-1] = re.sub(r":\d+:", ":LINE:", texts[-1])
        assert texts == [
            "SpecError: add: 2 DTensors do not fit the program\n"
            "  x: placed as P('dp', 'tp'), not P('dp')\n"
            "  y: on ranks [0, 1, 2, 3] as (4,), not [0, 1, 2, 3] as dp=2, tp=2\n"
            "help: redistribute it, or leave its spec out: a DTensor has its own",
            "SpecError: add: DTensors on 2 meshes\nhelp: place them on one mesh",
            "SpecError: the mesh has no axis names: DeviceMesh((4,), 'cpu', stride=(1,))\n"
            "help: use iris.mesh(shape, names)",
            "SpecError: add: y: P(max) has no spec\nhelp: use Shard, Replicate or Partial('sum')",
            "TraceError: read: reads a DTensor that is not an argument\n"
            "  at test_spmd_dtensors.py:LINE: return x + outside\n"
            "help: pass it as an argument: the program then sees its local part",
        ]
