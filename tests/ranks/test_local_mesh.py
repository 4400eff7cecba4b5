"""The local mesh: global tensors in and out, notebook manners, and failures."""

import gc
import json
import math
import os
import sys
import textwrap
import threading
import types
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import iris
from iris import P
from iris.runtime.timeline import Timeline
from iris.spmd.local import LocalMesh
from iris.spmd.modules import partition
from iris.spmd.program import Program
from iris.testing import assert_close, small_integers

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with iris.local_mesh(4, heap_size=1 << 24) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def grid() -> Iterator[LocalMesh]:
    with iris.local_mesh((2, 2), ("dp", "tp"), heap_size=1 << 24) as mesh:
        yield mesh


def matmul(x, w):
    return iris.all_gather(x, "tp", dim=0) @ w


def total(x):
    return iris.all_reduce(x.sum(0), "tp")


@pytest.mark.parametrize("rows", [8, 5, 1, 0], ids="rows={}".format)
def test_global_tensors_in_and_out(mesh, rows):
    program = iris.spmd(mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
    f = program(matmul)
    for seed in range(3):
        x, w = small_integers((rows, 6), seed=seed), small_integers((6, 10), seed=seed + 9)
        assert torch.equal(f(x, w), x @ w)


def test_shapes_that_only_some_ranks_see_as_new(mesh):
    double = iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(lambda x: 2 * x)
    for rows in (8, 7, 8, 5, 6):
        assert torch.equal(double(torch.ones(rows, 2)), torch.full((rows, 2), 2.0))


def test_grid_and_nested_axes(grid):
    @iris.spmd(
        mesh=grid,
        in_specs=(P(("dp", "tp")), P("tp", "dp"), None),
        out_specs={"x": P(("dp", "tp")), "both": (P(None, "dp"), P("dp")), "n": None},
    )
    def f(x, w, times=2):
        return {
            "x": x * times,
            "both": (iris.all_gather(w, "tp"), iris.all_gather(x, "tp")),
            "n": times,
        }

    x, w = small_integers((7, 3)), small_integers((5, 4))
    got = f(x, w)
    assert torch.equal(got["x"], 2 * x)
    assert torch.equal(got["both"][0], w)
    assert torch.equal(got["both"][1], x)
    assert got["n"] == 2
    assert torch.equal(f(x, w, times=3)["x"], 3 * x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_dtypes_and_strides(mesh, dtype):
    f = iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P())(lambda x: iris.all_gather(x, "tp"))
    x = small_integers((6, 5)).to(dtype).t()
    assert torch.equal(f(x), x)
    assert torch.equal(f(x[:, 1:4]), x[:, 1:4])
    if dtype.is_complex:
        y = f(x * (2 + 1j))
        assert torch.equal(f(y.conj()), y.conj())
        assert torch.equal(f(y.conj().imag), y.conj().imag)


def test_a_result_without_dims(mesh):
    f = iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P())(
        lambda x: iris.all_reduce(x.sum(), "tp")
    )
    assert f(torch.arange(7.0)).item() == 21


def test_profile(mesh, tmp_path):
    f = iris.spmd(mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))(matmul)
    x, w = torch.ones(8, 4), torch.ones(4, 8)
    f(x, w)
    with mesh.profile() as timeline:
        f(x, w)
    assert timeline.names(-1) == ["call matmul"]
    for rank in range(4):
        wait, *steps = timeline.names(rank)
        assert wait.startswith("wait in all_gather")
        assert steps == ["all_gather %0", "mm %1", "call matmul"]
    assert all(event.start <= event.end for event in timeline.events)
    timeline.save(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    titles = {row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert titles == {"caller", "rank 0", "rank 1", "rank 2", "rank 3"}
    assert {row["ph"] for row in rows} == {"M", "X"}
    loaded = Timeline.load(tmp_path / "trace.json")
    assert [loaded.names(rank) for rank in range(-1, 4)] == [
        timeline.names(rank) for rank in range(-1, 4)
    ]
    assert mesh.run(sys.gettrace) == [None] * 4


def test_profile_of_what_kernels_do(mesh):
    specs = {"in_specs": (P("tp"), P(None, "tp")), "out_specs": P(None, "tp")}
    f = iris.spmd(mesh=mesh, lowering="triton", **specs)(matmul)
    with mesh.profile(tracing=True) as timeline:
        f(torch.ones(64, 16), torch.ones(16, 64))
    kinds = {(event.rank, event.kind) for event in timeline.events if event.track != "host"}
    assert kinds == {(rank, kind) for rank in range(4) for kind in ("push", "wait", "tile", "emit")}
    assert [about["rank"] for about in timeline.about["ranks"]] == [0, 1, 2, 3]
    assert mesh.run(lambda: iris.current().tracing.enabled) == [False] * 4


def test_picture_of_a_profile(mesh):
    pytest.importorskip("matplotlib")
    with mesh.profile() as timeline:
        _total(mesh)(torch.ones(4, 2))
    (axes,) = timeline.plot().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "caller", "rank 0", "rank 1", "rank 2", "rank 3"
    ]  # fmt: skip


def test_results_go_on_without_a_copy(mesh):
    double = iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(lambda x: 2 * x)
    x = double(torch.ones(64, 64))
    y = mesh.share({"y": torch.ones(64, 64)})["y"]
    shared = mesh._arena.empty
    made = []
    mesh._arena.empty = lambda *args: made.append(args) or shared(*args)
    try:
        assert torch.equal(double(x), torch.full((64, 64), 4.0))
        assert torch.equal(double(y), x)
        assert len(made) == 2, "the results only"
    finally:
        del mesh._arena.empty


def test_shared_memory_is_used_again(mesh):
    double = iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(lambda x: 2 * x)
    places = set()
    for _ in range(6):
        y = double(torch.ones(1 << 18))
        places.add(y.data_ptr())
        del y
        gc.collect()
    assert len(places) <= 2


def test_arguments_that_a_program_writes(mesh):
    @iris.spmd(mesh=mesh, in_specs=(P("tp"), P()), out_specs=P())
    def update(cache, count):
        cache.mul_(2)
        count.add_(1)
        return iris.all_gather(cache, "tp")

    cache, count = torch.arange(6.0), torch.zeros(2)
    for step in range(1, 4):
        assert torch.equal(update(cache, count), 2**step * torch.arange(6.0))
        assert torch.equal(cache, 2**step * torch.arange(6.0))
        assert torch.equal(count, torch.full((2,), float(step)))
    with pytest.raises(iris.UnsupportedError, match="arguments share memory"):
        update(cache, cache[:2])


def test_cells_travel_and_edits_are_seen(mesh, monkeypatch):
    space = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", space)
    names = space.__dict__

    def run(source):
        exec(compile(textwrap.dedent(source), "<cell>", "exec"), names)

    names["mesh"] = mesh
    run("""
        import torch, iris
        from iris import P
        scale, offset = 3, torch.tensor([1.0, 2.0])
        def helper(x):
            return x * scale
        @iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
        def f(x):
            return helper(x) + offset
    """)
    f, x = names["f"], torch.ones(4, 2)
    sent = _definitions(mesh)
    assert f(x)[0].tolist() == [4, 5]
    assert f(x)[0].tolist() == [4, 5]
    assert len(sent) == 1
    run("scale = 10")
    assert f(x)[0].tolist() == [11, 12]
    run("def helper(x): return x - scale")
    assert f(x)[0].tolist() == [-8, -7]
    run("offset += 1")
    assert f(x)[0].tolist() == [-7, -6]
    assert f(x)[0].tolist() == [-7, -6]
    assert len(sent) == 4
    assert mesh.run(lambda: f.__wrapped__.__name__) == ["f"] * 4


def _definitions(mesh) -> list[bytes]:
    """Every definition that goes to the ranks from now on."""
    sent, call = [], mesh._session.call

    def counted(name, fn, *args):
        sent.extend(a.definition for a in args if getattr(a, "definition", None))
        return call(name, fn, *args)

    mesh._session.call = counted
    return sent


def test_modules_and_their_updates(mesh):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        @iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
        def forward(self, x):
            return x * self.weight

    module, x = Scale(), torch.ones(4, 3)
    with torch.no_grad():
        assert torch.equal(module(x), x)
        module.weight.fill_(5)
        assert torch.equal(module(x), 5 * x)
        assert torch.equal(Scale()(x), x)
    with pytest.raises(iris.UnsupportedError, match="does not differentiate"):
        module(x)


def test_writes_to_a_buffer_are_refused(mesh):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        @iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
        def forward(self, x):
            self.count += 1
            return x + 1

    module = Counter()
    for _ in range(2):
        with pytest.raises(iris.UnsupportedError) as caught:
            module(torch.ones(4, 2))
        assert str(caught.value) == (
            "forward: writes to a buffer of its module, "
            "and the caller of a local mesh has the module\n"
            "help: pass what it writes to as an argument: that reaches the caller"
        )
    assert not module.count.any()


def test_modules_from_outside_and_their_updates(mesh):
    layer, scale = nn.Linear(2, 3), torch.tensor(2.0)
    with torch.inference_mode():
        half = torch.tensor(0.5)  # has no version

    @iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    def f(x):
        return layer(x) * scale * half

    x = small_integers((8, 2))
    with torch.no_grad():
        for step in range(3):
            assert_close(f(x), layer(x) * scale * half)
            layer.bias += step
            scale += step
        layer = nn.Linear(2, 3)
        assert_close(f(x), layer(x) * scale * half)
    found = mesh.run(lambda: (layer.weight, scale, [scale] * 2))
    assert all(torch.equal(weight, layer.weight) for weight, *_ in found)
    assert all(one is both[0] is both[1] for _, one, both in found)


def test_programs_in_programs(mesh):
    inner = _total(mesh)

    @iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    def outer(x):
        return x - inner(x)

    x = small_integers((6, 2))
    for _ in range(3):
        assert torch.equal(outer(x), x - x.sum(0))


def test_large_tensors_that_a_function_closes_over(mesh):
    weight = torch.randn(300, 200)
    f = iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(lambda x: x @ weight.t())
    x = torch.randn(4, 200)
    assert_close(f(x), x @ weight.t())
    sent = _definitions(mesh)
    weight.zero_()
    assert not f(x).any()
    assert len(sent) == 1
    assert len(sent[0]) < 10_000

    def write(kept):
        kept += 1
        return kept.sum().item()

    assert mesh.run(write, weight) == [weight.numel()] * 4
    assert not weight.any()


def test_a_partitioned_module_is_split(mesh):
    module = partition(nn.Linear(6, 8), {"weight": P("tp"), "bias": P("tp")})
    decorate = iris.spmd(mesh=mesh, in_specs=P(), out_specs=P(None, "tp"))
    plain, x = nn.Linear(6, 8), torch.randn(3, 6)
    plain.load_state_dict(module.state_dict())
    decorate(module)
    with torch.no_grad():
        for _ in range(2):
            assert_close(module(x), plain(x))
    assert module.weight.shape == (8, 6)


def test_trace_and_explain(mesh):
    f = iris.spmd(mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))(matmul)
    x, w = torch.ones(10, 4), torch.ones(4, 8)
    traced = f.trace(x, w)
    assert "(%x: f32[10/tp, 4], %w: f32[4, 8/tp])" in traced.as_text()
    assert "all_gather_matmul" in str(f.explain(x, w))
    assert torch.equal(f(x, w), x @ w)
    with pytest.raises(iris.UnsupportedError, match="cannot be compiled here"):
        traced.lower().compile()


def test_run(mesh):
    def whoami(text, *, end):
        ctx = iris.current()
        ones = iris.all_reduce(torch.ones(1))
        return f"{text} {ctx.get_rank()} of {int(ones)}{end}"

    assert mesh.run(whoami, "rank", end="!") == [f"rank {rank} of 4!" for rank in range(4)]


def test_knobs_and_default_dtype_follow(mesh, monkeypatch):
    monkeypatch.setenv("IRIS_LOWERING", "triton")
    ask = lambda: (os.environ.get("IRIS_LOWERING"), torch.get_default_dtype())  # noqa: E731
    assert mesh.run(ask) == [("triton", torch.float32)] * 4
    monkeypatch.delenv("IRIS_LOWERING")
    assert mesh.run(ask) == [(None, torch.float32)] * 4


def test_autocast_follows(mesh):
    f = iris.spmd(mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))(matmul)
    x, w = torch.ones(8, 4), torch.ones(4, 8)
    for cast, dtype in ((False, torch.float32), (True, torch.bfloat16), (False, torch.float32)):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            assert f(x, w).dtype == dtype


def test_what_does_not_travel(mesh):
    lock = threading.Lock()
    f = iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(lambda x: x if lock else -x)
    with pytest.raises(iris.UnsupportedError) as caught:
        f(torch.ones(4))
    assert str(caught.value) == (
        "<lambda>: it, or what it reads from outside, does not travel to ranks: "
        "cannot pickle '_thread.lock' object\n"
        "help: make such an object on the ranks, inside the function"
    )
    with pytest.raises(iris.UnsupportedError, match="<lambda>: its result does not travel to the"):
        mesh.run(lambda: threading.Lock())
    for x in (torch.eye(4).to_sparse(), torch.ones(4, 4, device="meta")):
        with pytest.raises(iris.UnsupportedError, match=r"tensor of shape \(4, 4\) cannot go to"):
            _total(mesh)(x)
    assert torch.equal(_total(mesh)(torch.ones(4, 2)), torch.full((2,), 4.0))


def test_constants_that_differ_between_ranks(mesh):
    def beside(constant):
        f = iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=(P("tp"), None))(
            lambda x: (2 * x, constant(iris.current().get_rank()))
        )
        return f(torch.ones(4))[1]

    for constant, shown in (
        (lambda rank: rank, "[0, 1, 2, 3]"),
        (lambda rank: "last" if rank == 3 else None, "[None, None, None, 'last']"),
    ):
        with pytest.raises(iris.TypeRuleError) as caught:
            beside(constant)
        assert str(caught.value) == (
            "<lambda>: a result is no tensor, and differs between ranks\n"
            f"  {shown} on ranks 0 to 3\n"
            "help: return it as a tensor with a spec, or ask by mesh.run"
        )
    assert math.isnan(beside(lambda rank: float("nan")))
    assert beside(lambda rank: None) is None


def _total(mesh):
    return iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P())(total)


def test_replicated_results_are_compared(mesh):
    def break_rank_3():
        if iris.current().get_rank() == 3:
            call = Program.__call__
            Program.__call__ = lambda self, x: call(self, x) + torch.tensor([0.0, 0.5])

    mesh.run(break_rank_3)
    try:
        with pytest.raises(iris.TypeRuleError) as caught:
            _total(mesh)(torch.ones(4, 2))
    finally:
        mesh.restart()
    assert str(caught.value) == (
        "total: a replicated result is not the same on all ranks\n"
        "  the result on rank 3: 1 of 2 elements differ from the first rank's, "
        "at [1]: 4.5 and 4.0\n"
        "help: split it by its out-spec, or find what differs: random numbers, or state of a rank"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_specs": P("tp")}, "joins results by out_specs, and there are none"),
        ({"out_specs": P()}, "1 global tensors cannot be split or joined\n  x: no spec"),
        ({"in_specs": P(partial="tp"), "out_specs": P()}, r"x: P\(.*\) is partial"),
        ({"in_specs": P("tp"), "out_specs": P(partial="tp")}, r"result: P\(.*\) is partial"),
        ({"in_specs": P("tp"), "out_specs": None}, "there are none"),
        ({"in_specs": P("tp"), "out_specs": P("dp")}, "specs use axes 'tp', 'dp', the local mesh"),
        ({"in_specs": P("tp", None, None), "out_specs": P("tp")}, "1 spec does not fit"),
    ],
)
def test_specs_that_say_too_little(mesh, options, message):
    f = iris.spmd(mesh=mesh, **options)(lambda x: x.sum(0))
    with pytest.raises(iris.SpecError, match=message):
        f(torch.ones(4, 2))


def test_gradients_are_refused(mesh):
    with pytest.raises(iris.UnsupportedError, match="does not differentiate"):
        _total(mesh)(torch.ones(4, 2, requires_grad=True))


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        (0, None, "shape 0 has no ranks"),
        ((2, 2), None, "needs 2 different names"),
        ((2, 2), ("a", "a"), "needs 2 different names"),
        (2, ("a", "b"), "needs 1 different names"),
        (2, 2, "needs 1 different names"),
        ("4", None, "shape '4' has no ranks"),
        (2.0, None, "shape 2.0 has no ranks"),
    ],
)
def test_bad_shapes(shape, names, message):
    with pytest.raises(iris.SpecError, match=message):
        iris.local_mesh(shape, names)
