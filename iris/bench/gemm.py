"""The GEMM loop that the fused stages share, alone, beside cuBLAS. Runs on every rank."""

import random
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import iris
from iris.bench.kernels import gemm_kernel
from iris.bench.peers import symmetric
from iris.bench.stages import MODELS, is_right, random_tensor
from iris.bench.timing import Call, Row, rotated, time_graphs
from iris.lower.kernels.config import Tiling, default_config
from iris.lower.kernels.gemm import identity
from iris.lower.kernels.host import (
    Share,
    can_store_tma,
    interpreted,
    operand,
    product_modes,
    target,
)
from iris.lower.kernels.protocol import STATE_WORDS
from iris.runtime.devices import compute_units


def _ours(copies: Any, out: Tensor) -> Call:
    x, w = copies[0]
    (M, K), N, dtype = x.shape, w.shape[1], x.dtype
    config = replace(default_config(M, N, dtype, out.device), programs=compute_units(out.device))
    T = product_modes(Tiling.of(config, 1, 1, dtype, interpreted()), x, w, config)
    T = T.with_modes(out_tma=can_store_tma([out], config.tma))
    share = Share.create(config, T, M, [N], K, 0, out.device)
    state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=out.device)

    def call(i: int) -> Tensor:
        x, w = copies[i % len(copies)]
        gemm_kernel[(share.programs,)](
            operand(x, T.a_mode, T.block_m, T.block_k), *x.stride(),
            operand(w.T, T.b_mode, T.block_n, T.block_k), *w.T.stride(),
            target(out, T), *out.stride(), state, M, N, K,
            share.heads, share.table, share.scratch, share.counts, identity, T,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        return out

    return call


def _products(M: int, K: int, N: int) -> tuple[Tensor, dict[str, Call]]:
    """The product in bf16, and all who compute it in bf16 and fp8."""
    copies = [
        (x, w.T) for x, w in rotated(random_tensor(M, K, seed=1), random_tensor(N, K, seed=2))
    ]
    out, peer_out = (torch.empty(M, N, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    want = copies[0][0].float() @ copies[0][1].float()

    def cublas(i: int) -> Tensor:
        return torch.matmul(*copies[i % len(copies)], out=peer_out)

    return want, {"gemm": cublas, "iris": _ours(copies, out)}


def _fp8_products(M: int, K: int, N: int) -> tuple[Tensor, dict[str, Call]]:
    kind = torch.float8_e4m3fn
    operands = rotated(random_tensor(M, K, seed=1).to(kind), random_tensor(N, K, seed=2).to(kind))
    copies = [(x, w.T) for x, w in operands]
    one = torch.ones((), device="cuda")
    want = copies[0][0].float() @ copies[0][1].float()
    out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)

    def scaled_mm(i: int) -> Tensor:
        x, w = copies[i % len(copies)]
        return torch._scaled_mm(x, w, one, one, out_dtype=torch.bfloat16)

    return want, {"gemm": scaled_mm, "iris": _ours(copies, out)}


def measure(args: Namespace) -> Iterator[Row]:
    """cuBLAS is ``gemm``; fp8 beside ``torch._scaled_mm``."""
    _, handle = symmetric(64)
    world = iris.current().num_ranks
    for table, make in (("gemm", _products), ("gemm fp8", _fp8_products)):
        for model in args.models:
            hidden, inner = MODELS[model]
            for M in args.rows:
                for K, N in ((hidden, inner // world), (inner // world, hidden)):
                    if table == "gemm fp8" and M < 16:
                        continue
                    want, calls = make(M, K, N)
                    names = random.Random(M).sample(list(calls), len(calls))
                    right = {name: is_right(calls[name], want) for name in names}
                    times = time_graphs({n: calls[n] for n in names}, handle.barrier)
                    point = {"model": model, "M": M, "K": K, "N": N}
                    for name, time in times.items():
                        yield Row(table, point, name, time, right[name])
