"""Gradients of programs against autograd on one rank, for data that differs by rank."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import iris
from iris import P
from iris.testing import delay, shard, small_integers

pytestmark = pytest.mark.ranks


def leaf(x):
    return x.detach().clone().requires_grad_()


def _layer(rows, lowering):
    """A layer by rows, with a norm, a bias and a residual, and a sum that is whole everywhere."""
    ctx = iris.iris(1 << 23)
    rank, world = ctx.cur_rank, ctx.num_ranks

    def norm(x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight)

    @iris.spmd(
        in_specs=(P("tp"), {"norm": P(), "up": P(None, "tp"), "down": P("tp"), "bias": P()}),
        out_specs=(P("tp"), P()),
        lowering=lowering,
    )
    def layer(x, w):
        h = F.silu(iris.all_gather(norm(x, w["norm"]), "tp", dim=0) @ w["up"])
        y = x + iris.reduce_scatter(h @ w["down"], "tp", dim=0) + w["bias"]
        return y, iris.all_reduce(h @ w["down"], "tp") * w["bias"]

    dims = {"x": 0, "up": 1, "down": 0}
    for seed in range(3):
        torch.manual_seed(seed)
        shapes = {"x": (rows, 5), "norm": (5,), "up": (5, 8), "down": (8, 5), "bias": (5,)}
        whole = {n: leaf(torch.randn(*s, dtype=torch.float64)) for n, s in shapes.items()}
        mine = {
            n: leaf(shard(t, dims[n], rank, world) if n in dims else t) for n, t in whole.items()
        }
        gy, gz = torch.randn(rows, 5).double(), torch.randn(rows, 5).double()
        h = F.silu(norm(whole["x"], whole["norm"]) @ whole["up"]) @ whole["down"]
        y, z = whole["x"] + h + whole["bias"], h * whole["bias"]
        torch.autograd.backward((y, z), (gy, gz))
        delay(world - 1 if seed == 2 else -1)
        got = layer(mine["x"], {n: mine[n] for n in ("norm", "up", "down", "bias")})
        torch.testing.assert_close(got[0].detach(), shard(y.detach(), 0, rank, world))
        torch.testing.assert_close(got[1].detach(), z.detach())
        torch.autograd.backward(got, (shard(gy, 0, rank, world), gz))
        for name, tensor in whole.items():
            due = shard(tensor.grad, dims[name], rank, world) if name in dims else tensor.grad
            torch.testing.assert_close(mine[name].grad, due)
    (program,) = layer._state.programs.values()
    return [node.op for node in program.backward.graph.nodes if "all_reduce" in node.op]


@pytest.mark.parametrize(
    ("world", "rows", "lowering"),
    [(1, 3, "torch"), (2, 6, "torch"), (3, 7, "torch"), (4, 5, "torch"), (2, 5, "triton")],
)
def test_a_layer_of_even_and_uneven_shards(ranks, world, rows, lowering):
    # The sum that is whole everywhere goes back without a sum: two remain, of the whole arguments.
    for sums in ranks(world).run(_layer, rows, lowering):
        assert len(sums) <= 2


def _rotate(x):
    return iris.ppermute(x, "tp", [(0, 1), (1, 0), (0, 2)])


TRANSPOSED = {
    "all_gather": (lambda x: iris.all_gather(x * x, "tp", dim=1), True),
    "reduce_scatter": (lambda x: iris.reduce_scatter(x * x, "tp", dim=0), False),
    "mean of parts": (lambda x: iris.reduce_scatter(x * x, "tp", dim=1, op="avg"), False),
    "all_reduce": (lambda x: iris.all_reduce(x * x, "tp") * 2, True),
    "mean": (lambda x: iris.all_reduce(x * x, "tp", "avg") * 2, True),
    "all_to_all": (lambda x: iris.all_to_all(x * x, "tp", split_dim=1, concat_dim=0), False),
    "all_to_all of one dim": (lambda x: iris.all_to_all(x * x, "tp"), False),
    "broadcast": (lambda x: iris.broadcast(x * x, "tp", src=1), True),
    "ppermute": (_rotate, False),
}


def simulated(name, xs):
    """What every rank returns, in plain torch."""
    world, squares = len(xs), [x * x for x in xs]
    total = sum(squares)
    pieces = [
        [shard(s, 1 if "dim" not in name else 0, j, world) for j in range(world)] for s in squares
    ]
    return {
        "all_gather": lambda r: torch.cat(squares, 1),
        "reduce_scatter": lambda r: shard(total, 0, r, world),
        "mean of parts": lambda r: shard(total, 1, r, world) / world,
        "all_reduce": lambda r: total * 2,
        "mean": lambda r: total * 2 / world,
        "all_to_all": lambda r: torch.cat([row[r] for row in pieces]),
        "all_to_all of one dim": lambda r: torch.cat([row[r] for row in pieces]),
        "broadcast": lambda r: squares[1],
        "ppermute": lambda r: {0: xs[1], 1: xs[0], 2: xs[0]}.get(r, 0 * xs[r]),
    }[name]


def _collective(name):
    ctx = iris.iris(1 << 22)
    rank, world = ctx.cur_rank, ctx.num_ranks
    fn, whole = TRANSPOSED[name]
    program = iris.spmd(fn)
    for seed in range(3):
        xs = [leaf(small_integers((3 * world, 3 * world), r, seed).double()) for r in range(world)]
        ys = [simulated(name, xs)(r) for r in range(world)]
        torch.manual_seed(seed)
        # What is the same on all ranks is one result, with one gradient.
        gs = [torch.randint(-3, 4, y.shape).double() for y in ys]
        if whole:
            torch.autograd.backward(ys[0], gs[0])
            gs = gs[:1] * world
        else:
            torch.autograd.backward(ys, gs)
        mine = leaf(xs[rank])
        y = program(mine)
        assert torch.equal(y.detach(), ys[rank].detach())
        y.backward(gs[rank])
        due = xs[rank].grad
        torch.testing.assert_close(mine.grad, torch.zeros_like(mine) if due is None else due)


@pytest.mark.parametrize("name", TRANSPOSED)
def test_every_collective_goes_back(ranks, name):
    ranks(3).run(_collective, name)


def _two_axes():
    iris.iris(1 << 22)
    mesh = iris.mesh((2, 2), ("dp", "tp"))
    row, column = mesh.get_coordinate()

    @iris.spmd(mesh=mesh, in_specs=(P("dp"), P(None, "tp"), P("tp")), out_specs=P())
    def loss(x, up, down):
        y = iris.all_reduce(torch.relu(x @ up) @ down, "tp")
        return iris.all_reduce((y * y).sum(), "dp")

    for seed in range(3):
        sizes = ((5, 3), (3, 6), (6, 2))
        whole = [leaf(small_integers(s, i, seed).double()) for i, s in enumerate(sizes)]
        x, up, down = whole
        torch.relu(x @ up).matmul(down).square().sum().backward()
        places = ((0, row), (1, column), (0, column))
        mine = [leaf(shard(t, dim, at, 2)) for t, (dim, at) in zip(whole, places, strict=True)]
        loss(*mine).backward()
        for tensor, one, (dim, at) in zip(whole, mine, places, strict=True):
            assert torch.equal(one.grad, shard(tensor.grad, dim, at, 2))
    placed = distribute_tensor(up.detach(), mesh, [Replicate(), Shard(1)]).requires_grad_()
    loss(mine[0].detach(), placed, mine[2].detach()).backward()
    assert torch.equal(placed.grad.full_tensor(), up.grad)


def test_two_axes_and_dtensors(ranks):
    ranks(4).run(_two_axes)


def _known_in_the_backward():
    """Types in a backward would tell what the forward's do not: whole, split, or partial."""
    ctx = iris.iris(1 << 22)
    rank, world = ctx.cur_rank, ctx.num_ranks

    def moved(x, scale):
        mean = iris.reduce_scatter(iris.all_gather(x, "tp"), "tp", dim=0, op="avg")
        columns = iris.all_gather(x - x.mean(1, keepdim=True), "tp", dim=1)
        rows = iris.all_reduce(iris.reduce_scatter(x, "tp"), "tp") * scale
        return mean.square(), columns.square(), rows

    program = iris.spmd(moved)
    for seed in range(3):
        xs = [leaf(small_integers((2, 3), r, seed).double()) for r in range(world)]
        scales = [small_integers((1, 3), r, seed + 9).double() for r in range(world)]
        columns = torch.cat([x - x.mean(1, keepdim=True) for x in xs], 1)
        rows = sum((sum(xs).sum(0) * scale).sum() for scale in scales)
        (sum(x.square().sum() for x in xs) + columns.square().sum() + rows).backward()
        mine = leaf(xs[rank])
        sum(y.sum() for y in program(mine, scales[rank])).backward()
        torch.testing.assert_close(mine.grad, xs[rank].grad)


def test_what_is_known_of_cotangents_refuses_nothing(ranks):
    ranks(2).run(_known_in_the_backward)


def _sizes_that_two_ranks_cannot_tell():
    """Kernels in the forward, and none in the backward."""
    ctx = iris.iris(1 << 22)

    @iris.spmd(in_specs=P("tp"), out_specs=P(), lowering="triton")
    def squares(x):
        return iris.all_reduce(x.square().sum(), "tp")

    wholes = [small_integers((rows, 2), 0, rows) for rows in (5, 6)]
    parts = [leaf(shard(x, 0, ctx.cur_rank, ctx.num_ranks)) for x in wholes]
    for part in parts:
        squares.trace(part)
    for call, at in enumerate((0, 1, 1, 0, 0, 1)):
        delay(call % 3, 0.02)
        parts[at].grad = None
        y = squares(parts[at])
        y.backward()
        assert y == wholes[at].square().sum()
        assert torch.equal(parts[at].grad, 2 * parts[at].detach())


def test_sizes_that_some_ranks_cannot_tell_apart(ranks):
    ranks(3).run(_sizes_that_two_ranks_cannot_tell)


def _fused_on_some_ranks():
    """A backward whose views and products of one row are others than those of none."""
    ctx = iris.iris(1 << 22)

    @iris.spmd(in_specs=(P("tp"), P()), out_specs=P("tp"), lowering="triton")
    def program(x, w):
        mean = iris.all_gather(x, "tp").mean(1, keepdim=True)
        return iris.reduce_scatter(mean, "tp", dim=1, op="avg").t() @ w

    for seed in range(3):
        x, w = (leaf(small_integers(s, 0, seed)) for s in ((5, 4), (5, 3)))
        (x.mean(1, keepdim=True).t() @ w).square().sum().backward()
        mine = leaf(shard(x, 0, ctx.cur_rank, ctx.num_ranks)), leaf(w)
        program(*mine).square().sum().backward()
        due = shard(x.grad, 0, ctx.cur_rank, ctx.num_ranks), w.grad
        torch.testing.assert_close(tuple(part.grad for part in mine), due)


def test_a_backward_that_some_ranks_would_not_fuse(ranks):
    ranks(3).run(_fused_on_some_ranks)


COUNTS = {
    "full": lambda x: torch.full((), x.shape[0], dtype=x.dtype),
    "literal": lambda x: torch.tensor(float(x.shape[0])),
}


def _mean_of_uneven_rows(count):
    ctx = iris.iris(1 << 22)

    @iris.spmd(in_specs=P("tp"), out_specs=P())
    def mean(x):
        return iris.all_reduce(x.square().sum(), "tp") / iris.all_reduce(COUNTS[count](x), "tp")

    for seed in range(3):
        x = leaf(small_integers((5, 3), 0, seed).double())
        due = x.square().sum() / 5
        due.backward()
        mine = leaf(shard(x, 0, ctx.cur_rank, ctx.num_ranks))
        y = mean(mine)
        y.backward()
        torch.testing.assert_close((y, mine.grad), (due, shard(x.grad, 0, ctx.cur_rank, 2)))


@pytest.mark.parametrize("count", COUNTS)
def test_a_count_of_rows_is_not_the_same_on_all_ranks(ranks, count):
    ranks(2).run(_mean_of_uneven_rows, count)


class Net(torch.nn.Module):
    def __init__(self, world):
        super().__init__()
        torch.manual_seed(0)
        self.world = world
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        h = torch.tanh(self.first(iris.all_gather(x, "tp")))
        return iris.all_reduce(self.second(h).square().sum(), "tp") / self.world


def _training():
    ctx = iris.iris(1 << 22)
    world = ctx.num_ranks
    net, alone = iris.spmd(Net(world)), Net(world)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, alone))
    losses = []
    for step in range(4):
        x = [small_integers((2, 4), rank, step) for rank in range(world)]
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        loss = net(x[ctx.cur_rank])
        loss.backward()
        for parameter in net.parameters():  # nothing is claimed of them, so each rank has its part
            parameter.grad = iris.all_reduce(parameter.grad)
        h = torch.tanh(alone.first(torch.cat(x)))
        due = alone.second(h).square().sum()
        due.backward()
        torch.testing.assert_close(loss, due)
        for a, b in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        ours.step()
        theirs.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_module_learns_as_on_one_rank(ranks):
    ranks(2).run(_training)


def _refused():
    iris.iris(1 << 22)
    x = torch.ones(3, 3, requires_grad=True)
    group = torch.distributed.group.WORLD
    import torch.distributed._functional_collectives as functional

    def writes(x, y):
        y.add_(x)
        return y

    programs = (
        (lambda x, y: F.dropout(x), "draws"),
        (writes, "writes"),
        (lambda x, y: iris.all_reduce(x, "tp", "max"), "max"),
        (lambda x, y: iris.all_to_all(x, "tp", split_dim=1, concat_dim=0), "uneven"),
        (lambda x, y: functional.all_reduce(x, "sum", group), "functional"),
    )
    texts = []
    for fn, name in programs:
        with pytest.raises(iris.UnsupportedError) as caught:
            iris.spmd(name=name)(fn)(x, torch.ones(3, 3))
        texts.append(str(caught.value))
    twice = iris.spmd(lambda x: x * x)(x)
    (grad,) = torch.autograd.grad(twice.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()
    return texts


def test_what_has_no_gradient_is_refused(ranks):
    way_out = "help: do that outside the program, or call it under torch.no_grad()"
    for texts in ranks(2).run(_refused):
        assert texts == [
            "draws: an argument or parameter requires grad, and the program draws random numbers\n"
            + way_out,
            "writes: an argument or parameter requires grad, and the program "
            "writes to an argument or a buffer\n" + way_out,
            "all_reduce by max has no gradient\nhelp: reduce by sum or avg",
            "all_to_all of uneven pieces has no gradient\nhelp: pad both dims to divide",
            "functional: _c10d_functional.all_reduce.default has no gradient in a program\n"
            "help: use iris's collectives and torch's own ops, or call it under no_grad",
        ]
