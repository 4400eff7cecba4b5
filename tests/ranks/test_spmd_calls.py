"""Programs that meet no peer on the host: ranks in different calls are told so, all of them."""

import re
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import iris
from iris import P
from iris.testing import delay, small_integers

pytestmark = pytest.mark.ranks

HELP = (
    "help: every rank of a group must make the same calls, with the same shapes and dtypes; "
    "call f.trace(...) first with sizes that one rank's shard does not tell"
)
WITHIN = 10  # seconds, of the 20 after which a wait is given up


def programs():
    @iris.spmd(lowering="triton", name="f")
    def f(x):
        return iris.all_gather(x, "tp")

    @iris.spmd(lowering="triton", name="g")
    def g(x):
        return iris.all_gather(2 * x, "tp")

    return f, g


def failure(call):
    """What ``call`` raises, as text; it must come long before the time limit."""
    started = time.monotonic()
    with pytest.raises(iris.CollectiveMismatchError) as error:
        call()
    assert time.monotonic() - started < WITHIN
    return str(error.value)


def _different(case, late):
    ctx = iris.iris(1 << 22)
    rank = ctx.cur_rank
    f, g = programs()
    x, y, z = torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 3, dtype=torch.float64)
    for seed in range(3):
        x = small_integers((2, 3), rank, seed)
        whole = torch.cat([small_integers((2, 3), r, seed) for r in range(ctx.num_ranks)])
        assert torch.equal(f(x), whole)
        assert torch.equal(g(x), 2 * whole)
    if case in ("shape", "dtype"):
        f(y), f(z)
    calls = {
        "program": (lambda: f(x), lambda: g(x)),
        "shape": (lambda: f(x), lambda: f(y)),
        "dtype": (lambda: f(x), lambda: f(z)),
        "a rank raised and starts again": (lambda: g(x), lambda: f(x)),
        "meeting": (ctx.barrier, lambda: f(x)),
        "a new program": (lambda: f(x), lambda: f(torch.ones(5, 3))),
    }
    if case == "a rank raised and starts again":
        f(x)
    delay(late)
    first = failure(calls[case][rank == 1])
    assert first == failure(lambda: f(x))  # nothing runs any more
    ctx.reset()
    assert torch.equal(f(x), whole)
    return first


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("program", ["program f of (x: f32[2, 3]~tp)", "program g of (x: f32[2, 3]~tp)"]),
        ("shape", ["program f of (x: f32[2, 3]~tp)", "program f of (x: f32[4, 3]~tp)"]),
        ("dtype", ["program f of (x: f32[2, 3]~tp)", "program f of (x: f64[2, 3]~tp)"]),
        (
            "a rank raised and starts again",
            ["program g of (x: f32[2, 3]~tp)", "program f of (x: f32[2, 3]~tp)"],
        ),
        ("meeting", ["barrier of ranks (0, 1)", "program f of (x: f32[2, 3]~tp)"]),
        ("a new program", ["program f of (x: f32[2, 3]~tp)", "arguments of f"]),
    ],
)
def test_ranks_in_different_calls(ranks, case, texts, late):
    lines = [f"  rank {rank}: {text}" for rank, text in enumerate(texts)]
    expected = "\n".join(["ranks of one group are in different calls", *lines, HELP])
    for found in ranks(2).run(_different, case, late):
        assert re.sub(r"(program \w+) [0-9a-f]{8}", r"\1", found) == expected


def _sizes(lowering, rows, trace_first):
    ctx = iris.iris(1 << 22)
    rank, world = ctx.cur_rank, ctx.num_ranks

    @iris.spmd(in_specs=P("tp"), out_specs=P(), lowering=lowering)
    def whole(x):
        return iris.all_gather(x * 2, "tp")

    def shard(x):
        return x.tensor_split([2, 4, 6])[rank] if world == 4 else x

    if trace_first:
        for size in sorted(set(rows)):
            whole.trace(shard(small_integers((size, 3))))
    for seed, size in enumerate(rows):
        x = small_integers((size, 3), seed=seed)
        assert torch.equal(whole(shard(x)), 2 * x), size
    return sum(len(found) for found in whole._state.variants.values())


@pytest.mark.parametrize("lowering", ["torch", "triton"])
def test_sizes_that_a_shard_does_not_tell_are_right_once_traced(ranks, lowering):
    # Of 8 and of 7 rows the first three of four ranks hold two.
    assert ranks(4).run(_sizes, lowering, [8, 7, 7, 8, 7], True) == [2, 2, 2, 2]


def _untold():
    ctx = iris.iris(1 << 22)

    @iris.spmd(in_specs=P("tp"), out_specs=P(), lowering="triton")
    def whole(x):
        return iris.all_gather(x, "tp")

    x = torch.ones(2, 3)
    whole(x), whole(x), whole(x)
    return failure(lambda: whole(x[: 2 - ctx.cur_rank]))


def test_sizes_that_a_shard_does_not_tell_are_an_error_before(ranks):
    for found in ranks(2).run(_untold):
        assert "\n  rank 0: program whole " in found
        assert found.endswith(f" of (x: f32[4/tp, 3])\n  rank 1: arguments of whole\n{HELP}")


def _many_sizes(heap, sizes):
    ctx = iris.iris(heap)
    rank, world = ctx.cur_rank, ctx.num_ranks

    @iris.spmd(lowering="triton")
    def whole(x):
        return iris.all_gather(x, "tp")

    kept = whole.trace(torch.ones(sizes[0], 64)).lower().compile()
    for seed, size in enumerate(sizes):
        xs = [small_integers((size, 64), r, seed) for r in range(world)]
        y = whole(xs[rank])
        assert torch.equal(y, torch.cat(xs)), size
    loaded = [program.executable is not None for program in whole._state.programs.values()]
    xs = [small_integers((sizes[0], 64), r) for r in range(world)]
    assert torch.equal(kept(xs[rank]), torch.cat(xs))  # made ready again, if it was dropped
    return loaded


def test_programs_that_do_not_fit_on_the_heap_make_room(ranks):
    sizes = [1, 4, 16, 64, 1, 32, 64, 4]
    for loaded in ranks(2).run(_many_sizes, 3 << 14, sizes):
        assert len(loaded) == 5
        assert not all(loaded)
        assert any(loaded)


class Ops(TorchDispatchMode):
    """The torch ops that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _counted():
    ctx = iris.iris(1 << 24)
    rank, world = ctx.cur_rank, ctx.num_ranks

    @iris.spmd(in_specs=(P("tp"), P(None, "tp"), P("tp")), out_specs=P("tp"), lowering="triton")
    def mlp(x, up, down):
        return iris.reduce_scatter(torch.relu(iris.all_gather(x, "tp") @ up) @ down, "tp")

    def call(seed):
        x, up, down = (small_integers((4, 4), seed=seed + i) for i in range(3))
        y = mlp(
            x.tensor_split(world)[rank].contiguous(),
            up.tensor_split(world, 1)[rank].contiguous(),
            down.tensor_split(world)[rank].contiguous(),
        )
        assert torch.equal(y, (torch.relu(x @ up) @ down).tensor_split(world)[rank])

    call(0)
    meetings, program = ctx.world.epoch, next(iter(mlp._state.programs.values()))
    with Ops() as ops:
        for seed in range(1, 4):
            delay(seed % world)
            call(seed)
    assert ctx.world.epoch == meetings
    assert program.runner.used == 4
    return len(program.executable.steps), len(program.executable.fused), ops.names


def test_a_two_stage_mlp_is_two_launches_without_meetings_or_zeroing(ranks):
    for steps, kernels, ops in ranks(2).run(_counted):
        assert steps == kernels == 2
        assert not {name for name in ops if "zero" in name or "fill" in name}


@pytest.mark.parametrize("inner", [iris.all_reduce, iris.all_gather, iris.reduce_scatter])
def test_what_inference_mode_made_ready_serves_other_modes(ranks, inner):
    def run():
        ctx = iris.iris(1 << 20)
        program = iris.spmd(lambda x: inner(2 * x, "tp"))
        for seed, mode in enumerate((torch.inference_mode, torch.enable_grad, torch.no_grad) * 2):
            xs = [small_integers((4, 3), rank, seed) for rank in range(ctx.num_ranks)]
            with mode():
                at_once, found = inner(xs[ctx.cur_rank], "tp"), program(xs[ctx.cur_rank])
            whole = torch.cat(xs) if inner is iris.all_gather else sum(xs)
            if inner is iris.reduce_scatter:
                whole = whole.chunk(ctx.num_ranks)[ctx.cur_rank]
            assert torch.equal(at_once, whole)
            assert torch.equal(found, 2 * whole)

    ranks(2).run(run)


def _names():
    ctx = iris.iris(1 << 22)

    def relu(v0, v1, float):
        total = iris.all_reduce(v0, "tp")
        return torch.where(total > 0, torch.relu(total) + v1, torch.inf) * float + v0

    def backward(x, saved0, grad0):
        return iris.all_reduce(torch.sin(x * saved0) * grad0, "tp")

    for seed in range(3):
        xs = [small_integers((2, 3), rank, seed) + 0.5 for rank in range(ctx.num_ranks)]
        x, total = xs[ctx.cur_rank], sum(xs)
        for name in (None, "sum", "class"):
            due = torch.where(total > 0, total + 7 + seed, torch.inf) * 2 + x
            assert torch.equal(iris.spmd(name=name)(relu)(x, x * 0 + 7 + seed, x * 0 + 2), due)
        wanted = [x.clone().requires_grad_(), torch.full_like(x, 2.0).requires_grad_()]
        iris.spmd(backward)(*wanted, x * 0 + 3).sum().backward()
        torch.testing.assert_close(wanted[0].grad, 6 * torch.cos(2 * x))
        torch.testing.assert_close(wanted[1].grad, 3 * x * torch.cos(2 * x))


def test_arguments_and_programs_may_have_the_names_of_values_and_ops(ranks):
    ranks(2).run(_names)
