"""Bad input to decorated functions: the same clear error on every rank, at once, and the ranks
usable afterwards.
"""

import time

import pytest
import torch

import iris
from iris import P

pytestmark = pytest.mark.ranks


def _caught(fn, *args):
    """Text of the error that ``fn`` raises, and whether a collective still works afterwards."""
    started = time.monotonic()
    with pytest.raises(iris.IrisError) as caught:
        fn(*args)
    assert time.monotonic() - started < 10
    after = iris.all_reduce(torch.ones(1)).item()
    return f"{type(caught.value).__name__}: {caught.value}", after


def _check(results, expected):
    assert [text for text, _ in results] == [expected] * len(results)
    assert [after for _, after in results] == [float(len(results))] * len(results)


def _specs_do_not_fit():
    iris.iris(1 << 20)

    @iris.spmd(in_specs=(P("tp", None), P(None, None, "tp"), P("tp")))
    def f(x, w, n):
        return x

    return _caught(f, torch.ones(4, 2), torch.ones(2, 2), 3)


def test_every_offending_spec_is_listed(ranks):
    _check(
        ranks(2).run(_specs_do_not_fit),
        "SpecError: f: 2 specs do not fit the arguments\n"
        "  w: P(None, None, 'tp') has 3 dims, the tensor has 2 (shape (2, 2))\n"
        "  n: P('tp') for a value of type int, not a tensor\n"
        "help: a P has at most one entry a dim; non-tensors take None",
    )


def _shards_differ():
    ctx = iris.iris(1 << 20)

    @iris.spmd(in_specs=(P("tp"), P()))
    def f(x, w):
        return x

    return _caught(f, torch.ones(3 + ctx.cur_rank, 2), torch.ones(2, 2 + ctx.cur_rank))


def test_shards_that_do_not_fit_together(ranks):
    _check(
        ranks(2).run(_shards_differ),
        "SpecError: f: 2 arguments differ from the specs on mesh tp=2\n"
        "  x: rank 0 holds f32[3, 2]; of f32[7/tp, 2] it should hold f32[4, 2]\n"
        "  w: rank 1 holds f32[2, 3]; of f32[2, 2] it should hold f32[2, 2]\n"
        "help: shards follow torch.chunk: all of the rounded-up size, "
        "the last ones smaller or empty",
    )


def _dtypes_differ():
    ctx = iris.iris(1 << 20)
    x = torch.ones(4, dtype=torch.float16 if ctx.cur_rank else torch.float32)
    return _caught(lambda: iris.all_reduce(x))


def test_dtypes_that_differ(ranks):
    _check(
        ranks(2).run(_dtypes_differ),
        "CollectiveMismatchError: all_reduce: ranks of one group passed different operands\n"
        "  rank 0: float32[4], op=sum\n"
        "  rank 1: float16[4], op=sum\n"
        "help: all ranks must pass the same shape, dtype and arguments",
    )


def _shapes_differ():
    ctx = iris.iris(1 << 22)
    return _caught(lambda: iris.all_reduce(torch.ones(409600 - 2 * ctx.cur_rank)))


def test_shapes_that_differ(ranks):
    # NVIDIA/nccl#1417
    _check(
        ranks(2).run(_shapes_differ),
        "CollectiveMismatchError: all_reduce: ranks of one group passed different operands\n"
        "  rank 0: float32[409600], op=sum\n"
        "  rank 1: float32[409598], op=sum\n"
        "help: all ranks must pass the same shape, dtype and arguments",
    )


def _calls_differ():
    ctx = iris.iris(1 << 20)
    x = torch.ones(4)
    return _caught(lambda: iris.all_reduce(x) if ctx.cur_rank else iris.all_gather(x))


def test_calls_that_differ(ranks):
    _check(
        ranks(2).run(_calls_differ),
        "CollectiveMismatchError: ranks of one group are in different calls\n"
        "  rank 0: all_gather\n"
        "  rank 1: all_reduce\n"
        "help: every rank of a group must make the same calls, with the same shapes and dtypes",
    )


def _branch_on_a_value():
    iris.iris(1 << 20)

    @iris.spmd
    def f(x):
        if x.sum() > 0:
            return x
        return -x

    return _caught(f, torch.ones(4))[0]


def test_branch_on_a_value_names_the_line(ranks):
    for text in ranks(2).run(_branch_on_a_value):
        first, where, help_ = text.splitlines()
        assert first == (
            "TraceError: f: Python asks for the value of a traced tensor "
            "(if, while, item(), int() or float())"
        )
        assert where.startswith("  at ")
        assert help_ == "help: use torch.where, or branch on shapes or on a plain Python argument"


def _unknown_axis():
    iris.iris(1 << 20)

    @iris.spmd(in_specs=P("tp"))
    def f(x):
        return iris.all_gather(x, "dp")

    return _caught(f, torch.ones(4))


def test_unknown_axis(ranks):
    _check(
        ranks(2).run(_unknown_axis),
        "SpecError: f: unknown mesh axis 'dp'; the mesh has tp=2\n"
        "help: name an axis of the mesh, or pass mesh= to @iris.spmd",
    )


def _one_rank_raises_while_tracing():
    ctx = iris.iris(1 << 20)

    @iris.spmd
    def f(x):
        if ctx.cur_rank == 1:
            raise ValueError("out of memory, say")
        return iris.all_reduce(x, "tp")

    with pytest.raises((ValueError, iris.TraceError)) as caught:
        f(torch.ones(2))
    return type(caught.value).__name__, str(caught.value), iris.all_reduce(torch.ones(1)).item()


def test_one_rank_raises_while_tracing(ranks):
    # pytorch/pytorch#163546
    others, raiser = ranks(2).run(_one_rank_raises_while_tracing)
    assert raiser == ("ValueError", "out of memory, say", 2.0)
    assert others == (
        "TraceError",
        "trace of f failed on another rank\n  rank 1: ValueError: out of memory, say",
        2.0,
    )


def _only_rank_zero_calls():
    ctx = iris.iris(1 << 20)
    if ctx.cur_rank == 0:
        iris.all_reduce(torch.ones(1))
    return "returned"


def test_peer_that_never_comes(ranks):
    # pytorch/pytorch#88000
    started = time.monotonic()
    with pytest.raises(iris.LaunchError) as caught:
        ranks(2).run(_only_rank_zero_calls)
    assert time.monotonic() - started < 40
    assert "rank 1" in str(caught.value)
    assert "all_reduce" in str(caught.value)


def _program_too_big_for_the_heap():
    iris.iris(1 << 16)
    return _caught(iris.spmd(_reduce), torch.ones(1 << 20))


def _reduce(x):
    return iris.all_reduce(x, "tp")


def test_program_too_big_for_the_heap(ranks):
    for text, after in ranks(2).run(_program_too_big_for_the_heap):
        assert text.startswith("HeapExhaustedError: ")
        assert "heap_size" in text
        assert after == 2.0


def _wrong_device():
    iris.iris(1 << 20)
    return _caught(iris.spmd(_product), torch.ones(2, 2), torch.ones(2, 2, device="meta"))


def _product(x, w):
    return x @ w


def test_tensor_on_another_device(ranks):
    _check(
        ranks(2).run(_wrong_device),
        "SpecError: _product: 1 tensor is not on cpu, where the program runs\n"
        "  w: on meta\n"
        "help: move them with .to(ctx.device), or start the context on their device",
    )


def _nothing_on_one_rank(lowering):
    ctx = iris.iris(1 << 22)

    @iris.spmd(lowering=lowering)
    def f(x, w):
        return iris.all_gather(x, "tp", dim=0) @ w

    w = torch.eye(4)
    for _ in range(3):
        assert f(torch.ones(8, 4), w).shape == (16, 4)
    with pytest.raises(iris.IrisError) as caught:
        f(torch.ones(0 if ctx.cur_rank else 8, 4), w)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_no_rows_on_one_rank_alone_without_specs(ranks):
    # triton-lang/triton-ascend#984
    assert (
        ranks(2).run(_nothing_on_one_rank, "torch")
        == [
            "TraceError: f: ranks traced different programs; the first line that differs:\n"
            "  rank 0: graph f[tp=2](%x: f32[8, 4]~tp, %w: f32[4, 4]~tp):\n"
            "  rank 1: graph f[tp=2](%x: f32[0, 4]~tp, %w: f32[4, 4]~tp):\n"
            "help: do not branch on the rank in Python: use iris.axis_index and torch.where"
        ]
        * 2
    )
    for text in ranks(2).run(_nothing_on_one_rank, "triton"):
        assert text.startswith("CollectiveMismatchError: ranks of one group are in different calls")
