"""What iris.gluon compiles to, and where it refuses. No GPU is needed.

Run as a script, this file compiles its kernels. The tests do so, because here Triton interprets.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import iris

pytestmark = pytest.mark.cpu

if __name__ == "__main__":
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    import iris.gluon as ig

    @gluon.jit
    def moves(words, x, y, bases, n, rank: gl.constexpr, peer: gl.constexpr):
        i = gl.program_id(0) * 2048 + gl.arange(
            0, 2048, layout=gl.BlockedLayout([8], [32], [4], [0])
        )
        mask = i < n
        gl.store(y + i, ig.load(x + i, rank, peer, bases, mask), mask)
        ig.store(y + i, gl.load(x + i, mask), rank, peer, bases, mask)
        ig.put(x + i, y + i, rank, peer, bases, mask)
        ig.get(x + i, y + i, rank, peer, bases, mask)
        ig.copy(x + i, y + i, peer, peer, rank, bases, mask)
        ctx = ig.DeviceContext.initialize(words, rank, 2)
        ctx.put(x + i, y + i, peer, mask)
        ctx.get(x + i, y + i, peer, mask)

    @gluon.jit
    def atomics(words, x, y, bases, n, rank: gl.constexpr, peer: gl.constexpr):
        i = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        mask = i < n
        ctx = ig.DeviceContext.initialize(words, rank, 2)
        for offset in gl.static_range(2):
            at = x + i if offset else x
            some = mask if offset else n > 0
            old = ig.atomic_add(at, 1, rank, peer, bases, some)
            old += ig.atomic_sub(at, 1, rank, peer, bases, some)
            old += ig.atomic_min(at, 1, rank, peer, bases, some)
            old += ig.atomic_max(at, 1, rank, peer, bases, some)
            old += ig.atomic_and(at, 1, rank, peer, bases, some)
            old += ig.atomic_or(at, 1, rank, peer, bases, some)
            old += ig.atomic_xor(at, 1, rank, peer, bases, some)
            old += ig.atomic_xchg(at, 1, rank, peer, bases, some)
            old += ig.atomic_cas(at, 0, 1, rank, peer, bases)
            old += ctx.atomic_add(at, 1, peer, some)
            gl.store(y + i if offset else y, old)

    @gluon.jit
    def signals(words, x, y, bases, n, rank: gl.constexpr, peer: gl.constexpr):
        lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        ctx = ig.DeviceContext.initialize(words, rank, 2)
        ctx.signal(y, 1, peer)
        ctx.wait(y, 1, peer)
        ig.signal(x + lane, 1, lane < 5)
        ig.wait(x + lane, 1, words, 0, lane, lane < 5)
        ctx.barrier()

    @gluon.jit
    def ask(words, x, y, bases, n, rank: gl.constexpr, peer: gl.constexpr):
        flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        tall: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
        i = gl.arange(0, 512, layout=flat)
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, tall))[:, None]
        at = row * n + gl.arange(0, 64, layout=gl.SliceLayout(0, tall))[None, :]
        ig.put(x + i, y + i, rank, peer, bases, i < n, copy_engine_ctx=words, use_copy_engine=True)
        ig.put(
            x + at, y + at, rank, peer, bases, row < n, copy_engine_ctx=words, use_copy_engine=True
        )
        ig.put(x, y, rank, peer, bases, copy_engine_ctx=words, use_copy_engine=True)
        ig.atomic_add(x, 1, rank, peer, bases, copy_engine_ctx=words, use_copy_engine=True)
        ig.quiet(words, peer)

    @gluon.jit
    def tiles(here, there, words, rank: gl.constexpr, peer: gl.constexpr):
        tile = ig.tma.buffer(here)
        arrived = ig.tma.arrival()
        for i in range(4):
            ig.tma.load(here, [64 * i, 0], tile, arrived, i % 2)
            ig.tma.store(there, [64 * i, 0], tile)
        ctx = ig.DeviceContext.initialize(words, rank, 2)
        ctx.barrier()

    def compiled(kernel, signature, num_warps=4):
        signature = signature | {"rank": "constexpr", "peer": "constexpr"}
        names = list(kernel.arg_names)
        types = {name: signature[name] for name in names}
        constants = {(names.index("rank"),): 0, (names.index("peer"),): 1}
        aligned = [name for name in names if types[name].startswith("*") or name == "n"]
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        source = GluonASTSource(kernel, types, constants, attributes)
        target = GPUTarget("cuda", 90, 32)
        return triton.compile(source, target=target, options={"num_warps": num_warps}).asm["ptx"]

    def compile_all():
        plain = {"words": "*i64", "x": "*i32", "y": "*i32", "bases": "*u64", "n": "i32"}
        layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
        desc = f"tensordesc<bf16[64, 64],{layout!r}>"
        texts = {kernel.__name__: compiled(kernel, plain) for kernel in (atomics, signals)}
        half = plain | {"x": "*bf16", "y": "*bf16"}
        texts["moves"] = compiled(moves, half)
        texts["ask"] = compiled(ask, plain)
        texts["signals of a warp"] = compiled(signals, plain, 1)
        texts["tiles"] = compiled(tiles, {"here": desc, "there": desc, "words": "*i64"})
        return texts

    sys.stdout.write(json.dumps(compile_all()))


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    env = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, str(Path(__file__))]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def instructions(text, pattern):
    return re.findall(rf"\b(?:{pattern})\.\S+", text)


def test_moves_are_16_bytes_wide(assembly):
    found = instructions(assembly["moves"], "(?:ld|st)\\.global")
    moved = [access for access in found if access != "ld.global.b64"]  # an entry of a table
    assert len(moved) == 7 * 4
    assert set(moved) == {"ld.global.v4.b32", "st.global.v4.b32"}


@pytest.mark.parametrize("name", ["atomics", "signals", "signals of a warp"])
def test_everything_that_synchronises_has_system_scope(assembly, name):
    found = instructions(assembly[name], "atom|red|fence") + re.findall(
        r"\b\S+\.(?:acquire|release)\.\S+", assembly[name]
    )
    assert len(found) >= 8
    assert [instruction for instruction in found if ".sys" not in instruction] == []


def test_a_request_is_fenced_before_the_host_sees_it(assembly):
    assert assembly["ask"].count("fence.acq_rel.sys") == 4


def test_a_tile_has_arrived_before_the_barrier_signals(assembly):
    steps = [
        "mbarrier.init",
        "mbarrier.arrive.expect_tx",
        "cp.async.bulk.tensor.2d.shared",
        "mbarrier.try_wait",
        "cp.async.bulk.tensor.2d.global.shared",
        "cp.async.bulk.commit_group",
        "cp.async.bulk.wait_group 0",
        "bar.sync",
        "atom.global.sys.release.exch",
    ]
    at = 0
    for step in steps:
        at = assembly["tiles"].find(step, at)
        assert at > 0, step


def refusal(patch):
    """What importing iris.gluon says, as if for the first time."""
    patch.delitem(sys.modules, "iris.gluon", raising=False)
    with pytest.raises(iris.UnsupportedError) as caught:
        importlib.import_module("iris.gluon")
    return str(caught.value)


def test_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert refusal(monkeypatch) == (
        "iris.gluon compiles kernels for a GPU, and Triton is set to "
        "interpret them\nhelp: use the functions of iris in @triton.jit kernels, or unset "
        "TRITON_INTERPRET where there is a GPU"
    )


def test_a_triton_without_gluon_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    assert refusal(monkeypatch) == (
        "iris.gluon needs Gluon, which this Triton does not have\n"
        "help: use a Triton from 3.6 on, or write the kernel with @triton.jit"
    )
