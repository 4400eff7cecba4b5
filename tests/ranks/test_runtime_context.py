"""The Iris class beside its heap: the examples of its reference page, logging, timing, knobs."""

import gc
import logging
import os
import time

import numpy as np
import pytest
import torch

from iris import config
from iris.errors import ConfigError, IrisError
from iris.logging import DEBUG, set_logger_level
from iris.runtime.benching import do_bench
from iris.runtime.context import Iris, as_current, current, current_or_none, iris
from iris.runtime.devices import Share, simulation, usable_units

pytestmark = pytest.mark.ranks


@pytest.fixture
def ctx():
    with iris(1 << 22) as context:
        yield context


def test_the_small_getters(ctx):
    assert isinstance(ctx, Iris)
    assert (ctx.get_rank(), ctx.get_num_ranks()) == (0, 1) == (ctx.cur_rank, ctx.num_ranks)
    assert ctx.get_device() == torch.device("cpu")
    assert ctx.get_device_id() == 0
    assert ctx.get_cu_count() == len(os.sched_getaffinity(0))
    assert ctx.get_usable_units() == ctx.get_cu_count()
    bases = ctx.get_heap_bases()
    assert (bases.shape, bases.dtype) == ((1,), torch.uint64)
    context = ctx.get_device_context()
    assert context.dtype == torch.int64
    record = ctx.watch.record.data_ptr()
    assert context.tolist() == [0, 1, int(bases[0]), 0, 0, 0, 0, record]


def test_defaults_of_the_factory():
    with iris() as ctx:
        assert ctx.heap.capacity == 1 << 30
        assert ctx.zeros(1024, 1024).shape == (1024, 1024)


def test_barriers_of_one_rank(ctx):
    ctx.barrier()
    ctx.device_barrier()
    ctx.device_barrier(group=[0])


def test_without_copy_engine(ctx):
    assert ctx.get_copy_engine_ctx() is None
    for method in (ctx.put, ctx.put_tile, ctx.put_tiles, ctx.quiet):
        with pytest.raises(RuntimeError, match="needs the copy engine, which is disabled"):
            method(ctx.zeros(1), 0, 0, 0) if method != ctx.quiet else method()


def test_current_context():
    assert current_or_none() is None
    with pytest.raises(IrisError, match=r"help: call ctx = iris.iris\(\) on every rank"):
        current()
    first = iris(1 << 20)
    with iris(1 << 20) as second:
        assert current() is second
        with iris(1 << 20):
            second.close()
    assert current() is first
    third = iris(1 << 20)
    first.close()
    assert current() is third
    iris(1 << 20)  # dropped once it is not the current one
    with iris(1 << 20) as last:
        gc.collect()
        with as_current(third):
            last.close()
        assert current() is third
    third.close()
    assert current_or_none() is None


def _two_contexts():
    a, b = iris(1 << 20), iris(2 << 20)
    x, mine = a.full((4,), 1.0 + a.cur_rank), b.full((4,), 10.0 + b.cur_rank)
    answers = []
    for ctx, operand in ((a, x), (b, mine), (a, x)):
        out = torch.zeros(4, device=ctx.device)
        ctx.ccl.all_reduce(out, operand)
        ctx.device_barrier()
        peer = ctx.heap.peer_tensor(operand, 1 - ctx.cur_rank)
        answers.append((out[0].item(), peer[0].item() + operand[0].item()))
        assert current() is b
    b.close()
    square, product = torch.ones(4, 4, device=a.device), torch.zeros(4, 4, device=a.device)
    a.ops.matmul_all_reduce(product, square, square, a)
    answers.append(product[0, 0].item())
    with pytest.raises(IrisError, match="this iris context is closed"):
        b.ccl.all_reduce(product, square)
    assert not a.is_symmetric(mine)
    return answers


def test_two_contexts_at_once(ranks):
    assert ranks(2).run(_two_contexts) == [[(3, 3), (21, 21), (3, 3), 8]] * 2


USES = {
    "zeros": lambda ctx, x: ctx.zeros(3),
    "out=": lambda ctx, x: ctx.zeros(4, out=x),
    "as_symmetric": lambda ctx, x: ctx.as_symmetric(x),
    "allocate_symmetric": lambda ctx, x: ctx.allocate_symmetric(3),
    "peer_tensor": lambda ctx, x: ctx.heap.peer_tensor(x, 0),
    "barrier": lambda ctx, x: ctx.barrier(),
    "device_barrier": lambda ctx, x: ctx.device_barrier(),
    "broadcast": lambda ctx, x: ctx.broadcast(1),
    "heap_bases": lambda ctx, x: ctx.get_heap_bases(),
    "device_context": lambda ctx, x: ctx.get_device_context(),
    "reset": lambda ctx, x: ctx.reset(),
    "iris": lambda ctx, x: iris(1 << 20),
}


def _closed():
    ctx = iris(1 << 20)
    x = ctx.ones(4)
    ctx.device_barrier()
    ctx.close()
    ctx.close()
    for name, use in USES.items():
        if name != "iris":
            with pytest.raises(IrisError) as caught:
                use(ctx, x)
            assert str(caught.value) == (
                "this iris context is closed\nhelp: create one with iris.iris()"
            ), name
    return x.tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_a_closed_context_says_so(ranks, world):
    assert ranks(world).run(_closed) == [[1] * 4] * world


@pytest.mark.parametrize(
    "size",
    [0, -1, 1.5, float("nan"), float("inf"), 2**62 + 1, 2**1024, "1", None],
    ids=lambda size: repr(size)[:20],
)
def test_a_bad_heap_size_is_refused(size):
    with pytest.raises(ConfigError) as caught:
        iris(size)
    assert str(caught.value) == f"heap_size={size!r} must be a whole number from 1 to 2**62"


@pytest.mark.parametrize("engines", ["rdma", ("sdma", "x"), None, ""], ids=repr)
def test_bad_engines_are_refused(engines):
    with pytest.raises(ConfigError) as caught:
        iris(1 << 20, engines=engines)
    assert str(caught.value) == f"engines={engines!r} is not allowed\nhelp: use () or ('sdma',)"


def test_arguments_that_are_no_stream_or_group(ctx):
    with pytest.raises(IrisError) as caught:
        ctx.barrier([0])
    assert str(caught.value) == (
        "barrier: stream=[0] is not a stream\nhelp: name ranks as barrier(group=...)"
    )
    for group in (0, "0", [0.5]):
        for call in (ctx.barrier, ctx.device_barrier):
            with pytest.raises(IrisError) as caught:
                call(group=group)
            assert str(caught.value) == (
                f"group={group!r} is not a group of this rank\n"
                "help: use global ranks, as in group=[0, 2], or a ProcessGroup that this rank is in"
            )


def test_an_unknown_allocator_lists_the_good_ones(monkeypatch):
    with pytest.raises(ConfigError) as caught:
        iris(1 << 20, allocator_type="malloc")
    assert str(caught.value) == (
        "allocator_type='malloc' is not allowed\nhelp: set it to one of: torch, vmem, symm_mem"
    )
    monkeypatch.setenv("IRIS_ALLOCATOR", "heap")
    with pytest.raises(ConfigError, match="IRIS_ALLOCATOR='heap' is not allowed"):
        iris(1 << 20)


@pytest.mark.parametrize(
    ("name", "bad", "allowed"),
    [
        ("IRIS_TIMEOUT", "-1", "a number of seconds above 0, at most 1e9"),
        ("IRIS_TIMEOUT", "nan", "a number of seconds above 0, at most 1e9"),
        ("IRIS_SLOW", "1e12", "a number of seconds above 0, at most 1e9"),
        ("IRIS_LOWERING", "cuda", "one of: auto, torch, triton"),
        ("IRIS_CHECK", "yes", "0 or 1"),
        ("IRIS_LOG", "cache,hep", "a comma list out of: cache, heap"),
        ("IRIS_DEVICE", "gpu", "one of: auto, cpu, cuda"),
    ],
)
def test_a_bad_knob_lists_the_good_values(monkeypatch, name, bad, allowed):
    monkeypatch.setenv(name, bad)
    knob = next(knob for knob in config.knobs() if knob.name == name)
    with pytest.raises(ConfigError) as caught:
        knob()
    assert str(caught.value) == f"{name}={bad!r} is not allowed\nhelp: set it to {allowed}"


def test_knobs_have_defaults_and_docs(monkeypatch):
    for knob in config.knobs():
        monkeypatch.delenv(knob.name, raising=False)
        knob()
        assert knob.doc
        assert knob.allowed
    monkeypatch.setenv("IRIS_TIMEOUT", "2.5")
    assert config.timeout() == 2.5
    monkeypatch.setenv("IRIS_LOG", "cache, heap")
    assert config.log() == {"cache", "heap"}


def test_device_cuda_without_a_gpu(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("IRIS_DEVICE", "cuda")
    with pytest.raises(ConfigError, match="IRIS_DEVICE=cuda, but this process sees no GPU"):
        iris(1 << 20)


def test_ranks_that_share_a_gpu_hear_how_to_run_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert simulation(4, 1) == (
        "simulation: 4 ranks run on 1 GPU in turn, so that a wait for a peer takes milliseconds; "
        "they run at once where `nvidia-cuda-mps-control -d` was run before"
    )
    (tmp_path / "control").touch()
    assert simulation(3, 2) == "simulation: 3 ranks run on 2 GPUs"


class TestLogging:
    def test_format_and_level(self, ctx, capsys, monkeypatch):
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        set_logger_level(DEBUG)
        ctx.debug("This will now be visible")
        set_logger_level("WARNING")
        ctx.info("hidden")
        ctx.warning("Memory usage is high")
        ctx.error("Failed")
        set_logger_level(logging.INFO)
        assert capsys.readouterr().err.splitlines() == [
            "[Iris] [0/1] This will now be visible",
            "[Iris] [0/1] Memory usage is high",
            "[Iris] [0/1] Failed",
        ]

    def test_a_bad_level_lists_the_good_ones(self):
        with pytest.raises(ConfigError) as caught:
            set_logger_level("loud")
        assert str(caught.value) == (
            "level='loud' is not allowed\n"
            "help: use iris.DEBUG, iris.INFO, iris.WARNING or iris.ERROR"
        )

    def test_topics_are_shown(self, capsys, monkeypatch):
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setenv("IRIS_LOG", "heap")
        logging.getLogger("iris").setLevel(logging.NOTSET)
        with iris(1 << 20) as ctx:
            ctx.zeros(25)
        logging.getLogger("iris").setLevel(logging.INFO)
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith("[Iris] heap: 100 bytes at 0x0 for ranks (0,), test_runtime_")

    def test_records_go_to_the_programs_handlers_alone(self, ctx, capsys, monkeypatch):
        shown = []

        class Keep(logging.Handler):
            def emit(self, record):
                shown.append(f"{record.iris_rank}/{record.iris_num_ranks} {record.getMessage()}")

        for logger in (logging.getLogger(), logging.getLogger("iris")):
            with monkeypatch.context() as patch:
                patch.setattr(logging.getLogger(), "handlers", [])
                logger.addHandler(Keep())
                ctx.info("100%")
                logger.removeHandler(logger.handlers[-1])
        assert shown == ["0/1 100%"] * 2
        assert capsys.readouterr().err == ""

    def test_records_carry_rank_and_world(self, ctx, caplog):
        ctx.info("Starting iteration 0")
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("iris", "INFO")
        assert (record.iris_rank, record.iris_num_ranks) == (0, 1)
        assert record.filename == "test_runtime_context.py"


class TestDoBench:
    @pytest.fixture
    def calls(self):
        return []

    def test_order_and_counts(self, calls):
        do_bench(
            lambda: calls.append("fn"),
            barrier_fn=lambda: calls.append("barrier"),
            preamble_fn=lambda: calls.append("preamble"),
            n_warmup=2,
            n_repeat=3,
        )
        assert calls == ["barrier", "preamble", "fn"] * 5

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, 4.0),
            ({"return_mode": "mean"}, 4.0),
            ({"return_mode": "min"}, 1.0),
            ({"return_mode": "max"}, 9.0),
            ({"return_mode": "median"}, 3.0),
            ({"return_mode": "all"}, [3.0, 1.0, 9.0, 5.0, 2.0]),
            ({"quantiles": [0.5]}, 3.0),
            ({"quantiles": [0.0, 0.25, 1.0], "return_mode": "min"}, [1.0, 2.0, 9.0]),
            ({"quantiles": []}, []),
        ],
    )
    def test_modes_and_quantiles(self, monkeypatch, options, expected):
        """On a clock of whole milliseconds, by which calls take 3, 1, 9, 5 and 2."""
        now, times = [0.0], iter([7, 3, 1, 9, 5, 2])  # the first one is the warm-up
        monkeypatch.setattr(time, "perf_counter", lambda: now[0] / 1e3)

        def fn():
            now[0] += next(times)

        found = do_bench(fn, n_warmup=1, n_repeat=5, **options)
        assert found == pytest.approx(expected)
        assert isinstance(found, type(expected))

    def test_bad_arguments(self):
        with pytest.raises(ConfigError, match="help: use one of: mean, min, max, median, all"):
            do_bench(lambda: None, return_mode="average")
        with pytest.raises(ConfigError, match="n_repeat=0 must be a whole number from 1 to"):
            do_bench(lambda: None, n_repeat=0)
        with pytest.raises(ConfigError, match=r"n_warmup=0\.5 must be a whole number from 0 to"):
            do_bench(lambda: None, n_warmup=0.5)
        with pytest.raises(ConfigError, match=r"quantiles=\[50\] must be numbers from 0 to 1"):
            do_bench(lambda: None, quantiles=[50])


def test_broadcast_of_one_rank(ctx):
    assert ctx.broadcast(42) == 42
    assert isinstance(ctx.broadcast(torch.zeros(2)), np.ndarray)


def _in_a_fork(use):
    """Return what ``use`` raises in a forked process, and that process's id."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "allowed"
        try:
            use()
        except IrisError as error:
            text = str(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    text = os.read(reader, 1000).decode()
    os.close(reader)
    os.close(writer)
    return text, pid


def _forks():
    ctx = iris(1 << 20)
    x = ctx.ones(4)
    for name, use in USES.items():
        text, pid = _in_a_fork(lambda use=use: use(ctx, x))
        assert text == (
            f"this iris context belongs to process {os.getpid()}, and this is a fork of it "
            f"(process {pid})\n"
            "help: start ranks with iris.launch or torchrun; fork helpers before iris.iris()"
        ), name
    for use in (ctx.close, lambda: ctx.fail("in a fork"), lambda: ctx.__exit__(None, None, None)):
        assert _in_a_fork(use)[0] == "allowed"  # and does nothing
    ctx.barrier()
    return ctx.zeros(3).tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_a_fork_of_the_process_is_refused(ranks, world):
    assert ranks(world).run(_forks) == [[0, 0, 0]] * world


def _device_barriers():
    ctx = iris(1 << 20)
    for _ in range(20):
        ctx.device_barrier()
        if ctx.cur_rank != 1:
            ctx.device_barrier(group=[0, 2])
    return True


def test_device_barriers_of_groups(ranks):
    assert ranks(3).run(_device_barriers) == [True] * 3


def _different_heap_sizes():
    from iris.errors import CollectiveMismatchError

    rank = int(os.environ["RANK"])
    with pytest.raises(CollectiveMismatchError) as caught:
        iris((1 + rank) << 20)
    return str(caught.value)


def _different_allocators():
    from iris.errors import CollectiveMismatchError

    if os.environ["RANK"] == "1":
        os.environ["IRIS_ALLOCATOR"] = "vmem"  # overrides the argument
    try:
        with pytest.raises(CollectiveMismatchError) as caught:
            iris(1 << 20, allocator_type="symm_mem")
    finally:
        os.environ.pop("IRIS_ALLOCATOR", None)
    return str(caught.value)


def test_the_environment_overrides_the_allocator(ranks):
    for text in ranks(2).run(_different_allocators):
        assert "rank 0: iris.iris(heap_size=1048576, allocator_type='symm_mem') on cpu" in text
        assert "rank 1: iris.iris(heap_size=1048576, allocator_type='vmem') on cpu" in text


def test_different_heap_sizes_are_refused(ranks):
    for text in ranks(2).run(_different_heap_sizes):
        assert "rank 0: iris.iris(heap_size=1048576, allocator_type='torch') on cpu" in text
        assert "rank 1: iris.iris(heap_size=2097152, allocator_type='torch') on cpu" in text


def test_ranks_that_share_a_gpu_fill_equal_parts_of_it():
    whole, part = Share("a", 132, False), Share("a", 58, True)
    assert usable_units([Share("cpu", 2, False)] * 4) == 2
    assert usable_units([whole, Share("b", 132, False)]) == 132
    assert usable_units([whole] * 4) == 33
    assert usable_units([part] * 2) == 58
    assert usable_units([whole, whole, Share("b", 132, False)]) == 66  # one number for all
    assert usable_units([Share("a", 2, False)] * 3) == 1
