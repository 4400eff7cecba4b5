"""Kernels that only benchmarks run."""

import triton
import triton.language as tl

from iris.device import copy_engine, ops
from iris.device.target import device_function
from iris.lower.kernels.gemm import finish_piece, nothing, run_segments
from iris.lower.kernels.protocol import enter, leave, team


@triton.jit
def nothing_kernel():
    """Do nothing."""


@triton.jit
def ask_kernel(engine, x, out, bases, nbytes, rank, peer):
    """Put ``nbytes`` by the copy engine, and wait until they are there."""
    copy_engine.put_rows(engine, peer, ops.translate(out, bases, rank, peer), x, nbytes)
    copy_engine.quiet(engine, peer)


@triton.jit
def store_kernel(x, out, bases, n, rank, peer, BLOCK: tl.constexpr):
    """Put ``n`` elements with the threads of a grid that stays."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for first in range(0, tl.cdiv(n, tl.num_programs(0) * BLOCK)):
        at = i + first.to(tl.int64) * tl.num_programs(0) * BLOCK
        ops.put(x + at, out + at, rank, peer, bases, at < n)


@device_function
def _emit(env, tiles, row, column, epilogue, T: tl.constexpr):
    M, N, out = env
    finish_piece(tiles, row, column, out, M, N, epilogue, (), T)


@triton.jit
def gemm_kernel(
    a, a_row, a_k, b, b_row, b_k, out, out_row, out_column, state, M, N, K,
    heads, table, scratch, counts, epilogue: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """``out = a @ b.T``."""
    epoch, turn, number = enter(state)
    left = (a, M, a_row, a_k, 0)
    right = (b, N, b_row, b_k)
    nobody = (None, 0, None)  # to wait for
    plan = (heads, table, scratch, counts, epoch, team(state), nobody)
    env = (M, N, (out, out_row, out_column))
    run_segments(left, right, right, K, plan, number, nothing, _emit, nothing, env, epilogue, T)
    leave(state, epoch, turn, 0, (None, 0, None), T)
