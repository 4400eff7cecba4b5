"""The race detector: faults planted in the kernels' protocols are found, and nothing else is."""

import importlib
import os
import re
import time

import pytest
import torch
import triton
import triton.language as tl

import iris
import iris.device.pickling  # kernels of this file travel to the ranks
from iris import P
from iris.device.context import DeviceContext
from iris.lower.kernels import collectives
from iris.lower.kernels.all_gather_matmul import AllGatherMatmul
from iris.lower.kernels.all_reduce_norm import AllReduceNorm
from iris.lower.kernels.config import GemmConfig
from iris.lower.kernels.host import rows_of
from iris.lower.kernels.matmul_all_gather import MatmulAllGather
from iris.lower.kernels.matmul_all_reduce import MatmulAllReduce
from iris.lower.kernels.matmul_reduce_scatter import MatmulReduceScatter
from iris.lower.kernels.workspace import shared

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

# Several tiles and programs, some tiles cut.
SMALL = GemmConfig(16, 16, 16, warps=1, stages=1, programs=2, pieces=1, copy=256, group_m=2)
CALLS = 3
K, N = 32, 20


def checked(fn, *args):
    """Call ``fn`` with the checks on."""
    os.environ["IRIS_CHECK"] = "1"
    try:
        return fn(*args)
    finally:
        del os.environ["IRIS_CHECK"]


def stage(ctx, kind, M):
    """A function that launches one stage, on operands that differ by rank and call."""
    W, rank = ctx.num_ranks, ctx.cur_rank
    m, group = rows_of(M, W, rank), ctx.world
    options = {"M": M, "K": K, "dtype": torch.float32, "config": SMALL}
    made = {
        "all_gather_matmul": lambda: AllGatherMatmul.create(ctx, group, columns=[N], **options),
        "matmul_all_gather": lambda: MatmulAllGather.create(ctx, group, N=N, **options),
        "matmul_reduce_scatter": lambda: MatmulReduceScatter.create(ctx, group, N=N, **options),
        "one-shot": lambda: MatmulAllReduce.create(ctx, group, N=N, one_shot=True, **options),
        "two-shot": lambda: MatmulAllReduce.create(ctx, group, N=N, one_shot=False, **options),
        "all_gather": lambda: collectives.all_gather(
            ctx, group, [m, K], [rows_of(M, W, r) for r in range(W)], 0, torch.float32
        ),
        "two-shot all_reduce": lambda: collectives.all_reduce(
            ctx, group, [M, K], "sum", torch.float32, two_shot=True
        ),
    }[kind]()
    rows = m if "gather" in kind else M
    out = m if kind == "matmul_reduce_scatter" else M

    def launch(call):
        x = torch.full((rows, K), float(rank + call))
        if kind in ("all_gather", "two-shot all_reduce"):
            return made(x, out=torch.empty(M, K))
        w = torch.full((K, N), float(call - rank))
        if kind == "all_gather_matmul":
            return made(x, [w], out=[torch.empty(M, N)])
        return made(x, w, out=torch.empty(out, N))

    return launch


KINDS = (
    "all_gather_matmul",
    "matmul_all_gather",
    "matmul_reduce_scatter",
    "one-shot",
    "two-shot",
    "all_gather",
    "two-shot all_reduce",
)


def run_stages(kinds, M):
    ctx = iris.iris(1 << 21)
    for late, kind in enumerate(kinds):
        launch = stage(ctx, kind, M)
        for call in range(CALLS):
            if call == 1 and ctx.cur_rank == late % ctx.num_ranks:
                time.sleep(0.02)
            launch(call)
        ctx.watch.check()
        ctx.check()


@pytest.mark.slow
@pytest.mark.parametrize(("world", "M"), [(2, 20), (3, 2), (4, 7)])
def test_stages_as_they_are_have_no_race(ranks, world, M):
    ranks(world).run(checked, run_stages, KINDS, M, timeout=100)


def run_in_turn(kinds, crowded=False):
    """Stages of one arena, one after another, several times."""
    ctx = iris.iris(1 << 21)
    ctx.crowded = crowded  # as on a GPU that several ranks share: launches end together
    with shared() as arenas:
        launches = [stage(ctx, kind, 70 if crowded else 20) for kind in kinds]
    assert len(arenas) == 1
    for call in range(CALLS):
        for late, launch in enumerate(launches):
            if ctx.cur_rank == (late + call) % ctx.num_ranks:
                time.sleep(0.01)
            launch(call)
    ctx.check()


@pytest.mark.parametrize(
    ("world", "kinds", "crowded"),
    [(2, KINDS, False), (3, ("all_gather_matmul", "matmul_reduce_scatter"), True)],
    ids=["all kinds", "crowded"],
)
def test_stages_that_take_turns_have_no_race(ranks, world, kinds, crowded):
    ranks(world).run(checked, run_in_turn, kinds, crowded)


def run_norms():
    """What the stages above have none of: columns that are gathered, norms."""
    ctx = iris.iris(1 << 21)
    W, rank, rows = ctx.num_ranks, ctx.cur_rank, 20
    options = {"M": rows, "K": K * W, "dtype": torch.float32, "config": SMALL}
    gather = AllGatherMatmul.create(ctx, ctx.world, columns=[N], dim=1, **options)
    reduce = MatmulAllReduce.create(ctx, ctx.world, N=N, one_shot=False, norm="plain", **options)
    norm = AllReduceNorm.create(ctx, ctx.world, M=rows, N=N, dtype=torch.float32)
    out = torch.empty(rows, N)
    for call in range(CALLS):
        if call == 1 and rank == 0:
            time.sleep(0.02)
        w = torch.full((K * W, N), float(call - rank))
        gather(torch.full((rows, K), float(rank + call)), [w], out=[out])
        reduce(torch.full((rows, K * W), 2.0), w, out=out, normed=torch.empty(rows, N), eps=1e-5)
        norm(torch.full((rows, N), float(rank)), out=out)
    ctx.check()


def test_gathered_columns_and_norms_have_no_race(ranks):
    ranks(2).run(checked, run_norms)


def nothing(*args):
    """A function that forgets what it is for."""


def single(real):
    """``enter`` of a stage that uses one half of its staging only."""

    def enter(state):
        epoch, turn, number = real(state)
        return epoch, 2 * turn, number

    return enter


def own_turn(real):
    """``enter`` of a stage that uses its halves in turn, whatever others of its arena do."""

    def enter(state):
        epoch, _, number = real(state)
        return epoch, epoch, number

    return enter


def unordered(real):
    """``finished`` of a stage whose programs count, and do not order, what they did."""

    def finished(state, work, count, total, number):
        last = (total == 0) & (number == 0)
        if count > 0:
            before = tl.atomic_add(state[0] + 5 + 2 * work, count, sem="relaxed", scope="gpu")
            last = before + count == total
        return last

    return finished


def narrow(real):
    """``publish`` at a scope that other ranks do not see."""

    def publish(flags, index, epoch, W, LANES):
        members = tl.arange(0, LANES)
        valid = members < W
        words = tl.cast(tl.load(flags + members, mask=valid, other=0), tl.pointer_type(tl.int32))
        tl.atomic_xchg(words + index, epoch + 1, mask=valid, sem="release", scope="gpu")

    return publish


def plant(kind, M, module, faults):
    """Run a stage, some functions of whose kernel are replaced; return what is found."""
    module = importlib.import_module(f"iris.lower.kernels.{module}")
    real = {name: getattr(module, name) for name in faults}
    for name, fault in faults.items():
        setattr(module, name, nothing if fault is nothing else fault(real[name]))
    try:
        run_stages([kind], M)
    except iris.CheckError as error:
        return str(error)
    finally:
        for name in faults:
            setattr(module, name, real[name])
    return ""


@pytest.mark.parametrize(
    ("kind", "module", "faults", "sides"),
    [
        # One edge removed: nobody waits for the signal.
        ("all_gather_matmul", "all_gather_matmul", {"wait_members": nothing}, "wrote read"),
        ("matmul_reduce_scatter", "sums", {"wait": nothing}, "wrote read"),
        ("two-shot", "sums", {"wait": nothing}, "wrote read"),
        ("all_gather", "exchange", {"wait_members": nothing}, "wrote read"),
        # The signal covers only what its own program did, or does not reach other ranks.
        ("all_gather_matmul", "all_gather_matmul", {"finished": unordered}, "wrote read"),
        ("all_gather_matmul", "all_gather_matmul", {"publish": narrow}, "wrote read"),
        ("all_gather", "exchange", {"publish": narrow}, "wrote read"),
        # A buffer is used again before it is known to be read.
        ("all_gather_matmul", "all_gather_matmul", {"enter": single}, "read wrote"),
        ("matmul_reduce_scatter", "matmul_reduce_scatter", {"enter": single}, "read wrote"),
        ("two-shot", "matmul_all_reduce", {"enter": single, "collect": nothing}, "read wrote"),
        ("all_gather", "exchange", {"enter": single}, "read wrote"),
    ],
)
def test_a_planted_fault_is_found(ranks, kind, module, faults, sides):
    texts = ranks(2).run(checked, plant, kind, 40, module, faults)
    assert texts[0] == texts[1]
    first, second = sides.split()
    assert re.search(rf"\n  rank \d {first} at .*\n  rank \d {second} at ", texts[0]), texts[0]


def plant_turns(kinds):
    """Run stages of one arena, each of which goes by turns of its own; return what is found."""
    modules = [importlib.import_module(f"iris.lower.kernels.{kind}") for kind in kinds]
    real = [module.enter for module in modules]
    for module in modules:
        module.enter = own_turn(module.enter)
    try:
        run_in_turn(kinds)
    except iris.CheckError as error:
        return str(error)
    finally:
        for module, enter in zip(modules, real, strict=True):
            module.enter = enter
    return ""


def test_stages_that_do_not_take_turns_are_found(ranks):
    for text in ranks(2).run(checked, plant_turns, ("all_gather_matmul", "matmul_reduce_scatter")):
        assert re.search(r"\n  rank \d read at .*\n  rank \d wrote at ", text), text


@pytest.mark.parametrize("kind", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_a_dropped_barrier_is_found(ranks, kind):
    """Rank 2 has no rows: without the meeting nobody knows that it has read, or is done."""
    for text in ranks(3).run(checked, plant, kind, 2, kind, {"meet": nothing}):
        assert re.search(r"\n  rank \d read at .*\n  rank \d wrote at ", text), text


@pytest.mark.parametrize("forgotten", ["enter", "collect"])
def test_what_is_ordered_otherwise_is_no_race(ranks, forgotten):
    """Two-shot orders the use of its staging twice over: by two halves, and by its sums."""
    faults = {"enter": single} if forgotten == "enter" else {"collect": nothing}
    case = ("two-shot", 20, "matmul_all_reduce", faults)
    assert ranks(2).run(checked, plant, *case) == ["", ""]


@triton.jit(do_not_specialize=["meet"])
def put_to_next(words, x, y, meet, rank: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(words, rank, W)
    i = tl.arange(0, BLOCK)
    ctx.put(x + i, y + i, to_rank=(rank + 1) % W)
    if meet != 0:
        ctx.barrier()


def put_and_read(meet):
    ctx = iris.iris(1 << 20)
    x, y = ctx.full((16,), float(ctx.cur_rank)), ctx.zeros(16)
    put_to_next[(1,)](ctx.get_device_context(), x, y, meet, ctx.cur_rank, ctx.num_ranks, BLOCK=16)
    total = float(y.sum()) if ctx.cur_rank == 0 else 0.0
    try:
        ctx.check()
    except iris.CheckError as error:
        return str(error)
    return total


def test_the_report_says_who_where_and_what_would_help(ranks):
    assert ranks(2).run(checked, put_and_read, 1) == [16.0, 0.0]
    text, other = ranks(2).run(checked, put_and_read, 0)
    assert text == other
    here = "test_check_races.py:"
    assert re.sub(rf"{here}\d+", f"{here}7", text) == (
        "race: nothing orders two accesses to 64 bytes on the heap of rank 0, from byte 0 of "
        f"64 bytes allocated at {here}7\n"
        f"  rank 1 wrote at {here}7: put_to_next, launch 1, program 0 of 1, called at {here}7\n"
        f"  rank 0 read at {here}7\n"
        "  way out: let rank 1 signal after it and rank 0 wait before it, "
        "or put a barrier of both in between"
    )


@triton.jit
def count_up(counter, LOCKED: tl.constexpr):
    """Every program adds one to a plain number, under a lock or not."""
    if LOCKED:
        while tl.atomic_cas(counter + 1, 0, 1, sem="acquire", scope="gpu") != 0:
            pass
    tl.store(counter, tl.load(counter) + 1)
    if LOCKED:
        tl.atomic_xchg(counter + 1, 0, sem="release", scope="gpu")


def programs_of_a_launch(locked):
    ctx = iris.iris(1 << 20)
    counter = ctx.zeros(2, dtype=torch.int32)
    count_up[(6,)](counter, LOCKED=locked)
    try:
        ctx.check()
    except iris.CheckError as error:
        return str(error)
    return int(counter[0])


def test_programs_of_a_launch_race_unless_something_orders_them(ranks):
    assert ranks(1).run(checked, programs_of_a_launch, True) == [6]
    (text,) = ranks(1).run(checked, programs_of_a_launch, False)
    assert re.search(r"count_up, launch 1, program \d of 6.*\n.*program \d of 6", text), text
    assert "way out: let one program release by an atomic after it" in text


def host_only(meet):
    """Torch operations on the heap, also on a peer's part of it."""
    ctx = iris.iris(1 << 20)
    x = ctx.zeros(4, 6)
    there = ctx.heap.peer_tensor(x, 1 - ctx.cur_rank)
    there[:, ctx.cur_rank].fill_(1.0)
    if meet:
        ctx.device_barrier()
    total = float(x[:, 1 - ctx.cur_rank].sum())
    beside = float(x[:, 4].sum())  # nobody writes there
    try:
        ctx.check()
    except iris.CheckError as error:
        return str(error)
    return total + beside


def test_torch_operations_on_the_heap_count(ranks):
    assert ranks(2).run(checked, host_only, True) == [4.0, 4.0]
    for text in ranks(2).run(checked, host_only, False):
        assert re.search(r"rank \d read at test_check_races.py:\d+\n", text), text
        assert "wrote at test_check_races.py" in text


@iris.spmd(in_specs=(P("tp", None), P(None, "tp"), P("tp", None)), out_specs=P("tp", None))
def mlp(x, up, down):
    return iris.reduce_scatter((iris.all_gather(x, "tp", dim=0) @ up).relu() @ down, "tp", dim=0)


def program(lowering, module, name):
    """A program under the checks; with ``name``, one function of its kernels forgotten."""
    os.environ["IRIS_LOWERING"] = lowering
    ctx = iris.iris(1 << 22)
    real = None
    if name:
        module = importlib.import_module(module)
        real = getattr(module, name)
        setattr(module, name, nothing)
    W, rank = ctx.num_ranks, ctx.cur_rank
    try:
        for call in range(CALLS):
            if call == 2 and rank == 0:
                time.sleep(0.02)
            x, up, down = (torch.full(n, float(rank + call)) for n in ((6, 8), (8, 4), (4, 8)))
            got = mlp(x, up, down)
            assert not got.isnan().any()
    except iris.CheckError as error:
        return str(error)
    finally:
        del os.environ["IRIS_LOWERING"]
        if name:
            setattr(module, name, real)
    return W


@pytest.mark.parametrize("lowering", ["torch", "triton"])
def test_programs_have_no_race(ranks, lowering):
    assert ranks(2).run(checked, program, lowering, "", "") == [2, 2]


def test_the_report_names_the_step_of_the_program(ranks):
    case = ("triton", "iris.lower.kernels.all_gather_matmul", "wait_members")
    for text in ranks(2).run(checked, program, *case):
        assert "all_gather_matmul_kernel, launch 1, program" in text
        assert re.search(r"step `.*all_gather_matmul.* # test_check_races.py:\d+` of mlp", text)
