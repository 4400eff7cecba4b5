"""What the device functions compile to. No GPU is needed.

Run as a script, this file compiles its kernels. The tests do so, because here Triton interprets.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from iris.device import atomics, copy_engine, ops, signals
from iris.device.barrier_kernel import barrier_kernel
from iris.device.context import DeviceContext

pytestmark = pytest.mark.cpu

H200 = GPUTarget("cuda", 90, 32)
MI300 = GPUTarget("hip", "gfx942", 64)
MOVES = ["load", "store", "put", "get", "copy", "context"]
DTYPES = ["i1", "i8", "fp8e4nv", "bf16", "fp32", "i64"]


@triton.jit
def move(words, x, y, bases, n, rank: tl.constexpr, peer: tl.constexpr, MOVE: tl.constexpr):
    i = tl.program_id(0) * 2048 + tl.arange(0, 2048)
    mask = i < n
    if MOVE == "load":
        tl.store(y + i, ops.load(x + i, rank, peer, bases, mask), mask)
    elif MOVE == "store":
        ops.store(y + i, tl.load(x + i, mask), rank, peer, bases, mask)
    elif MOVE == "put":
        ops.put(x + i, y + i, rank, peer, bases, mask)
    elif MOVE == "get":
        ops.get(x + i, y + i, rank, peer, bases, mask)
    elif MOVE == "copy":
        ops.copy(x + i, y + i, peer, peer, rank, bases, mask)
    else:
        ctx = DeviceContext.initialize(words, rank, 2)
        ctx.put(x + i, y + i, peer, mask)


@triton.jit
def ask(engine, x, y, flag, bases, n, rank: tl.constexpr, peer: tl.constexpr):
    i = tl.arange(0, 256)
    at = i[:, None] * n + tl.arange(0, 16)[None, :]
    mask = i < n
    ops.put(x + i, y + i, rank, peer, bases, mask, copy_engine_ctx=engine, use_copy_engine=True)
    ops.put(x + at, y + at, rank, peer, bases, copy_engine_ctx=engine, use_copy_engine=True)
    ops.put(x, y, rank, peer, bases, copy_engine_ctx=engine, use_copy_engine=True)
    atomics.atomic_add(flag, 1, rank, peer, bases, copy_engine_ctx=engine, use_copy_engine=True)
    copy_engine.quiet(engine, peer)


@triton.jit
def every_atomic(words, x, y, bases, n, rank: tl.constexpr, peer: tl.constexpr):
    ctx = DeviceContext.initialize(words, rank, 2)
    i = tl.arange(0, 128)
    mask = i < n
    for offset in tl.static_range(2):
        at = x + i if offset else x
        some = mask if offset else n > 0
        old = atomics.atomic_add(at, 1, rank, peer, bases, some)
        old += atomics.atomic_sub(at, 1, rank, peer, bases, some)
        old += atomics.atomic_min(at, 1, rank, peer, bases, some)
        old += atomics.atomic_max(at, 1, rank, peer, bases, some)
        old += atomics.atomic_and(at, 1, rank, peer, bases, some)
        old += atomics.atomic_or(at, 1, rank, peer, bases, some)
        old += atomics.atomic_xor(at, 1, rank, peer, bases, some)
        old += atomics.atomic_xchg(at, 1, rank, peer, bases, some)
        old += atomics.atomic_cas(at, 0, 1, rank, peer, bases)
        old += ctx.atomic_add(at, 1, peer, some)
        tl.store(y + i if offset else y, old)
    ctx.signal(y, 1, peer)
    signals.arrive(ops.translate(y, bases, rank, peer))
    ctx.wait(y, 1, peer)
    ctx.barrier()


@triton.jit
def wait_for_many(words, x):
    lane = tl.arange(0, 8)
    signals.wait(x + lane, 1, words, 0, lane, lane < 5)


@triton.jit
def modifiers(words, x, y, bases, rank: tl.constexpr, peer: tl.constexpr):
    i = tl.arange(0, 512)
    value = ops.load(x + i, rank, peer, bases, cache_modifier=".cg")
    ops.store(y + i, value, rank, peer, bases, cache_modifier=".cs")
    ctx = DeviceContext.initialize(words, rank, 2)
    ctx.get(x + i, y + i, peer, load_cache_modifier=".ca", store_cache_modifier=".wt")
    ctx.copy(x + i, y + i, peer, peer, load_cache_modifier=".cg", store_cache_modifier=".cs")
    ctx.put(x + i, y + i, peer, load_cache_modifier=".cg", store_cache_modifier=".wt")


@triton.jit
def narrow_scope(x, bases):
    atomics.atomic_add(x, 1, 0, 1, bases, sem="relaxed", scope="gpu")


def compiled(kernel, signature, constants, num_warps=4, target=H200):
    """Return the assembly of ``kernel``, for pointers and ``n`` that are multiples of 16."""
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (place,): aligned
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name == "n"
    }
    types = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    binary = triton.compile(source, target=target, options={"num_warps": num_warps})
    return binary.asm["ptx" if target is H200 else "amdgcn"]


def compile_all():
    """Return the assembly of every kernel of this file, by name."""
    ranks = {"rank": 0, "peer": 1}
    texts = {}
    for dtype in DTYPES:
        pointers = {"words": "*i64", "x": "*" + dtype, "y": "*" + dtype, "bases": "*u64"}
        for name in MOVES:
            texts[f"{name} {dtype}"] = compiled(
                move, pointers | {"n": "i32"}, ranks | {"MOVE": name}
            )
    meet = {"record": "*i64", "members": "i64", "stage": "i64"} | dict.fromkeys(
        ("row", "rank", "world"), "i32"
    )
    words = {"words": "*i64", "x": "*i32", "y": "*i32", "bases": "*u64", "n": "i32"}
    texts["atomics"] = compiled(every_atomic, words, ranks)
    texts["barrier"] = compiled(barrier_kernel, meet, {"LANES": 32}, num_warps=1)
    texts["wait for many"] = compiled(wait_for_many, {"words": "*i64", "x": "*i32"}, {})
    places = {"words": "*i64", "x": "*fp32", "y": "*fp32", "bases": "*u64"}
    texts["modifiers"] = compiled(modifiers, places, ranks)
    texts["narrow scope"] = compiled(narrow_scope, {"x": "*i32", "bases": "*u64"}, {})
    ours = {"engine": "*i64", "x": "*bf16", "y": "*bf16", "flag": "*i32", "bases": "*u64"}
    marks = dict.fromkeys(("address", "value"), "i64") | dict.fromkeys(("wide", "add"), "i32")
    holds = {name: marks[name] for name in ("address", "value", "wide")}
    holds |= {"record": "*i64", "stage": "i32", "peer": "i32"}
    for at, target in (("", H200), ("amd ", MI300)):
        texts[at + "ask"] = compiled(ask, ours | {"n": "i32"}, ranks, target=target)
        texts[at + "signal"] = compiled(copy_engine.signal_kernel, marks, {}, 1, target)
        texts[at + "hold"] = compiled(copy_engine.wait_kernel, holds, {}, 1, target)
    texts["amd atomics"] = compiled(every_atomic, words, ranks, target=MI300)
    texts["amd barrier"] = compiled(barrier_kernel, meet, {"LANES": 64}, 1, MI300)
    return texts


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


def accesses(text):
    """Return the plain loads and stores of global memory, without those of a table's entries."""
    found = re.findall(r"\b(?:ld|st)(?:\.volatile)?\.global(?:\.v\d)?\.b\d+", text)
    return [access for access in found if access != "ld.global.b64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MOVES)
def test_moves_are_16_bytes_wide(assembly, name, dtype):
    wide = "v2.b64" if dtype == "i64" else "v4.b32"
    found = accesses(assembly[f"{name} {dtype}"])
    assert set(found) == {f"ld.global.{wide}", f"st.global.{wide}"}


def test_cache_modifiers_reach_wide_accesses(assembly):
    found = re.findall(r"\b(?:ld|st)\.global\S*\.v4\.b32", assembly["modifiers"])
    wanted = [f"ld.global.{of}.v4.b32" for of in ("cg", "ca", "cg", "cg")]
    wanted += [f"st.global.{of}.v4.b32" for of in ("cs", "wt", "cs", "wt")]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("name", ["atomics", "barrier", "wait for many"])
def test_everything_that_synchronises_has_system_scope(assembly, name):
    # ROCm/iris#462
    text = assembly[name]
    found = re.findall(r"\b(?:atom|red|fence)\.\S+|\b\S+\.(?:acquire|release)\.\S+", text)
    assert len(found) >= 4
    assert [instruction for instruction in found if ".sys" not in instruction] == []


def test_a_scope_that_is_asked_for_is_kept(assembly):
    found = re.findall(r"\b(?:atom|red)\.\S+", assembly["narrow scope"])
    assert found
    assert all(".gpu.relaxed" in instruction for instruction in found)


def test_a_barrier_signals_by_release_and_looks_by_acquire(assembly):
    text = assembly["barrier"]
    assert len(re.findall(r"atom\.global\.sys\.release\.exch\.b32", text)) == 1
    assert "ld.acquire.sys.global.b32" in text
    assert "%globaltimer" in text


def test_a_request_is_whole_before_the_host_sees_it(assembly):
    """Descriptor, meeting of the threads, fence, sequence number: by one thread, no atomic."""
    text = assembly["ask"]
    assert text.count("fence.acq_rel.sys") == 4
    for part in text.split("fence.acq_rel.sys")[:-1]:
        assert re.search(r"st\.global\.b64[^;]*;(?s:.*)bar\.sync(?!(?s:.*)st\.global)", part)
    for part in text.split("fence.acq_rel.sys")[1:]:
        assert re.match(r"(?s:.{0,200})@%p\d+ st\.global\.b64", part)


def test_a_full_queue_is_seen_in_host_memory_without_an_atomic_there(assembly):
    text = assembly["ask"]
    looks = re.findall(r"ld\.volatile\.global\.b64 \{ (%rd\d+) \}, \[ (%rd\d+)", text)
    raised = re.findall(
        r"@%p\d+ atom\.global\.sys\.acq_rel\.max\.s64 %rd\d+, \[ (%rd\d+) \+ 0 \], (%rd\d+)", text
    )
    assert len(raised) == 4  # in each of three puts and an addition
    assert {value for _, value in raised} <= {value for value, _ in looks}
    assert {place for place, _ in raised}.isdisjoint(place for _, place in looks)


@pytest.mark.parametrize("name", ["signal", "hold"])
def test_what_streams_do_has_system_scope(assembly, name):
    text = assembly[name]
    assert re.search(r"\.(b|u)64", text)
    found = re.findall(r"\b(?:atom|red)\.\S+", text)
    assert found
    assert [instruction for instruction in found if ".sys" not in instruction] == []


@pytest.mark.parametrize(
    "name", ["amd atomics", "amd barrier", "amd ask", "amd signal", "amd hold"]
)
def test_the_same_functions_compile_for_amd(assembly, name):
    assert re.search(r"global_atomic_\w+", assembly[name])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compile_all()))
