"""What recording costs while it is off: nothing is compiled. No GPU is needed.

Run as a script, this file compiles stages with and without it, and with hooks that are empty.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from iris.device import tracing
from iris.device.context import DeviceContext
from iris.lower.kernels.collectives import Moves
from iris.lower.kernels.config import GemmConfig, Tiling
from iris.lower.kernels.exchange import exchange_kernel
from iris.lower.kernels.gemm import identity
from iris.lower.kernels.matmul_reduce_scatter import matmul_reduce_scatter_kernel

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

H200 = GPUTarget("cuda", 90, 32)
MI300 = GPUTarget("hip", "gfx942", 64)
POINTERS = {
    **dict.fromkeys(("words", "record", "staging", "sums", "flags", "pieces", "trace"), "*i64"),
    **dict.fromkeys(("heads", "table", "counts", "y"), "*i32"),
    "state": ("*i32", "*i32", "*i64"),
    **dict.fromkeys(("a", "b"), "tensordesc<bf16[64, 32]>"),
    **dict.fromkeys(("x", "out"), "*bf16"),
    **dict.fromkeys(("args", "after_args"), ()),
    "scratch": "*fp32",
}
TILING = Tiling.of(GemmConfig(64, 64, 32, 4, 3, pieces=1), 4, 1024, torch.bfloat16, False)
STAGES = {
    "scatter": (
        matmul_reduce_scatter_kernel,
        {
            "T": TILING.with_modes(announced=True, a_mode=1, b_mode=1),
            **dict.fromkeys(("epilogue", "after"), identity),
        },
    ),
    "exchange": (
        exchange_kernel,
        {"X": Moves(4, 4, tl.bfloat16, tl.float32, "sum", two_shot=True)},
    ),
}


@triton.jit
def own(words, x, y, rank: tl.constexpr, TRACING: tl.constexpr):
    ctx = DeviceContext.initialize(words, rank, 2, tracing=TRACING)
    since = ctx.trace_begin()
    i = tl.arange(0, 128)
    ctx.put(x + i, x + 128 + i, 1 - rank, i < 100)
    ctx.atomic_add(y, 1, 1 - rank)
    ctx.wait(y, 1, 1 - rank)
    ctx.trace_end(since, 30, 1 - rank, 5)


@triton.jit
def no_begin(watch):
    return 0


@triton.jit
def no_end(watch, since, kind, peers=0, nbytes=0, detail=0):
    pass


def assembly(kernel, constants, target=H200):
    """The instructions of ``kernel``, without what names source lines."""
    types = {
        name: "constexpr" if name in constants else POINTERS.get(name, "i32")
        for name in kernel.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(types.values())
        if str(kind).startswith("*")
    }
    source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
    binary = triton.compile(source, target=target, options={"num_warps": 4})
    text = binary.asm["ptx" if target is H200 else "amdgcn"].partition(".section")[0]
    return re.sub(r"^\s*(\.loc|\.file|//|\$L__tmp).*\n|\s*//.*$", "", text, flags=re.MULTILINE)


def compile_all():
    texts = {}
    for name, (kernel, constants) in STAGES.items():
        texts[f"{name} on"] = assembly(kernel, constants)
        texts[f"{name} off"] = assembly(kernel, constants | {"trace": None})
    for op in ("", "sum"):
        moves = Moves(4, 4, tl.bfloat16, tl.float32, op, two_shot=bool(op), vector=8)
        texts[f"moves {op}"] = assembly(exchange_kernel, {"X": moves, "s4": 1, "trace": None})
    texts["own on"] = assembly(own, {"rank": 0, "TRACING": True})
    texts["own off"] = assembly(own, {"rank": 0, "TRACING": False})
    texts["own on amd"] = assembly(own, {"rank": 0, "TRACING": True}, MI300)
    tracing.begin, tracing.end = no_begin, no_end
    for name, (kernel, constants) in STAGES.items():
        texts[f"{name} bare"] = assembly(kernel, constants | {"trace": None})
    texts["own bare"] = assembly(own, {"rank": 0, "TRACING": False})
    return texts


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    env = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_ALWAYS_COMPILE": "1",  # the cache does not know of hooks that were taken away
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, str(Path(__file__))]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", [*STAGES, "own"])
def test_what_is_off_is_not_compiled(texts, name):
    assert texts[f"{name} off"] == texts[f"{name} bare"]
    assert "%smid" not in texts[f"{name} off"]


@pytest.mark.parametrize("name", [*STAGES, "own"])
def test_events_carry_the_gpu_clock_and_the_multiprocessor(texts, name):
    on, off = texts[f"{name} on"], texts[f"{name} off"]
    assert "%smid" in on
    assert on.count("%globaltimer") >= off.count("%globaltimer") + 2
    assert re.search(r"atom\.global\.gpu\.relaxed\.add\.u64|atom\.relaxed\.gpu\.global\.add", on)


@pytest.mark.parametrize("op", ["", "sum"])
def test_plain_collectives_access_memory_16_bytes_at_a_time(texts, op):
    accesses = re.findall(r"\b(?:ld|st)\.global\S*", texts[f"moves {op}"])
    assert not [access for access in accesses if access.endswith("b16")]
    assert sum(access.endswith("v4.b32") for access in accesses) >= 4


def test_the_loop_stays_pipelined(texts):
    """Copies ahead of the loop, and in it, are as many with events as without."""
    copies = [texts[f"scatter {name}"].count("cp.async.bulk.tensor") for name in ("on", "off")]
    assert copies[0] == copies[1] > 4


def test_events_compile_for_amd(texts):
    assert "s_memrealtime" in texts["own on amd"]
    assert re.search(r"global_atomic_add_x2", texts["own on amd"])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compile_all()))
