"""The GEMM loop that the fused stages share, alone, beside cuBLAS. Runs on every rank."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import iris
from iris.bench.decoder import SHAPES
from iris.bench.kernels import gemm_kernel
from iris.bench.peers import library, symmetric
from iris.bench.stages import is_right, random_tensor
from iris.bench.timing import Call, Row, rotated, shuffled, time_graphs
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
    state = torch.zeros(STATE_WORDS + 1, dtype=torch.int32, device=out.device)
    scratch = torch.empty(max(1, share.scratch // 4), dtype=share.acc, device=out.device)

    def call(i: int) -> Tensor:
        x, w = copies[i % len(copies)]
        gemm_kernel[(share.programs,)](
            operand(x, T.a_mode, T.block_m, T.block_k), *x.stride(),
            operand(w.T, T.b_mode, T.block_n, T.block_k), *w.T.stride(),
            target(out, T), *out.stride(), (*state.split(STATE_WORDS), None), M, N, K,
            share.heads, share.table, scratch, share.counts, identity, T,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        return out

    return call


def _products(M: int, K: int, N: int, kind: torch.dtype) -> tuple[Tensor, dict[str, Call]]:
    """The right product of operands of one dtype, and all who compute it in bf16."""
    operands = rotated(random_tensor(M, K, seed=1).to(kind), random_tensor(N, K, seed=2).to(kind))
    copies = [(x, w.T) for x, w in operands]
    want = copies[0][0].float() @ copies[0][1].float()
    out, peer_out = (torch.empty(M, N, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return want, {"gemm": library(copies, peer_out), "iris": _ours(copies, out)}


def measure(args: Namespace) -> Iterator[Row]:
    """cuBLAS is ``gemm``; fp8 beside ``torch._scaled_mm``."""
    _, handle = symmetric(64)
    world = iris.current().num_ranks
    for table, kind in (("gemm", torch.bfloat16), ("gemm fp8", torch.float8_e4m3fn)):
        for model in args.models:
            hidden, inner = SHAPES[model].hidden, SHAPES[model].inner
            for M in args.rows:
                for K, N in ((hidden, inner // world), (inner // world, hidden)):
                    if table == "gemm fp8" and M < 16:
                        continue
                    want, calls = _products(M, K, N, kind)
                    calls = shuffled(calls, M)
                    right = {name: is_right(call, want) for name, call in calls.items()}
                    point = {"model": model, "M": M, "K": K, "N": N}
                    for name, time in time_graphs(calls, handle.barrier).items():
                        yield Row(table, point, name, time, right[name])
