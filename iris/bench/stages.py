"""The fused stages beside their peers, over shapes of known models. Runs on every rank.

Of ours every candidate of the planner is measured, and the one that it would take is marked.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import iris
from iris import P
from iris.bench.decoder import SHAPES
from iris.bench.peers import gather_peers, reduce_peers, scatter_peers, symmetric
from iris.bench.report import FLOORS
from iris.bench.timing import Call, Row, every, rotated, shuffled, time_graphs
from iris.graph.types import chunk_sizes
from iris.lower.kernels import collectives
from iris.lower.kernels.all_gather_matmul import AllGatherMatmul
from iris.lower.kernels.matmul_all_reduce import MatmulAllReduce
from iris.lower.kernels.matmul_reduce_scatter import MatmulReduceScatter

TOLERANCE = 1e-2  # relative, in the 2-norm: bf16 operands


@dataclass(frozen=True)
class Problem:
    """The size of the product, this rank's operands, right results (fp32) of ``gemm`` and of the
    rest, contestants.
    """

    size: tuple[int, int, int]
    operands: Sequence[Tensor]
    plain: Tensor
    want: Tensor
    calls: dict[str, Call]


def random_tensor(*shape: int, seed: int) -> Tensor:
    """Normal values that differ by seed."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def _ours(stage: Any, copies: Sequence[Any], out: Any) -> Call:
    """A stage, loaded, that writes to ``out``: a tensor, or a list of one."""
    stage.warm(*copies[0], out=out)

    def call(i: int) -> Tensor:
        stage(*copies[i % len(copies)], out=out)
        return out[0] if isinstance(out, list) else out  # type: ignore[no-any-return]

    return call


def _gather(M: int, hidden: int, inner: int) -> Problem:
    ctx, rank, world = iris.current(), dist.get_rank(), dist.get_world_size()
    full, sizes = random_tensor(M, hidden, seed=1), chunk_sizes(M, world)
    x = full.split(sizes)[rank].contiguous()
    copies = rotated(x, random_tensor(inner // world, hidden, seed=99 + rank))
    copies = [(x, w.T) for x, w in copies]
    w = copies[0][1]
    out = torch.empty(M, w.shape[1], device="cuda", dtype=x.dtype)
    calls = gather_peers(copies, [(full, w) for _, w in copies])
    for way in ("iris", *["iris copy engine"] * ctx.copies_beside_kernels):
        stage = AllGatherMatmul.create(
            ctx, ctx.world, M=M, K=hidden, columns=[w.shape[1]], dtype=x.dtype, engine=way != "iris"
        )
        calls[way] = _ours(stage, [(x, [w]) for x, w in copies], [out])
    gather = collectives.all_gather(ctx, ctx.world, x.shape, sizes, 0, x.dtype)
    gathered = torch.empty_like(full)
    gather.warm(x, out=gathered)

    def unfused(i: int) -> Tensor:
        x, w = copies[i % len(copies)]
        gather(x, out=gathered)
        return torch.matmul(gathered, w, out=out)

    calls["iris unfused"] = unfused
    want = full.float() @ w.float()
    return Problem((M, hidden, w.shape[1]), copies[0], want, want, calls)


def _partial(M: int, hidden: int, inner: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Operands of a row-parallel product, the product, and its sum over ranks."""
    world, K = dist.get_world_size(), inner // dist.get_world_size()
    total = torch.zeros(M, hidden, device="cuda")
    for rank in range(world):
        operands = random_tensor(M, K, seed=rank), random_tensor(hidden, K, seed=99 + rank)
        product = operands[0].float() @ operands[1].T.float()
        total += product.to(torch.bfloat16).float()
        if rank == dist.get_rank():
            part, mine = product, operands
    return [(x, w.T) for x, w in rotated(*mine)], part, total


def _unfused(copies: Sequence[Sequence[Tensor]], combine: Any, out: Tensor) -> Call:
    """cuBLAS, then a collective of ours."""
    product = torch.empty(len(copies[0][0]), out.shape[1], device="cuda", dtype=out.dtype)
    combine.warm(product, out=out)

    def call(i: int) -> Tensor:
        torch.matmul(*copies[i % len(copies)], out=product)
        combine(product, out=out)
        return out

    return call


def _scatter(M: int, hidden: int, inner: int) -> Problem:
    ctx, rank = iris.current(), dist.get_rank()
    copies, part, total = _partial(M, hidden, inner)
    (_, K), dtype = copies[0][0].shape, copies[0][0].dtype
    sizes = chunk_sizes(M, ctx.num_ranks)
    out = torch.empty(sizes[rank], hidden, device="cuda", dtype=dtype)
    stage = MatmulReduceScatter.create(ctx, ctx.world, M=M, N=hidden, K=K, dtype=dtype)
    scatter = collectives.reduce_scatter(ctx, ctx.world, (M, hidden), sizes, 0, "sum", dtype)
    calls = scatter_peers(copies)
    calls |= {"iris": _ours(stage, copies, out), "iris unfused": _unfused(copies, scatter, out)}
    return Problem((M, K, hidden), copies[0], part, total.split(sizes)[rank], calls)


def _reduce(M: int, hidden: int, inner: int) -> Problem:
    ctx = iris.current()
    copies, part, total = _partial(M, hidden, inner)
    (_, K), dtype = copies[0][0].shape, copies[0][0].dtype
    out = torch.empty(M, hidden, device="cuda", dtype=dtype)
    plain = collectives.all_reduce(ctx, ctx.world, out.shape, "sum", dtype)
    calls = reduce_peers(copies) | {"iris unfused": _unfused(copies, plain, out)}
    for way in ("one-shot", "two-shot"):
        stage = MatmulAllReduce.create(
            ctx, ctx.world, M=M, N=hidden, K=K, dtype=dtype, one_shot=way == "one-shot"
        )
        calls[f"iris {way}"] = _ours(stage, copies, out)
    return Problem((M, K, hidden), copies[0], part, total, calls)


STAGES: dict[str, Callable[[int, int, int], Problem]] = {
    "all_gather_matmul": _gather,
    "matmul_reduce_scatter": _scatter,
    "matmul_all_reduce": _reduce,
}

COLUMNS, ROWS, WHOLE = P(None, "tp"), P("tp", None), P()
PROGRAMS = {
    "all_gather_matmul": iris.spmd(in_specs=(ROWS, COLUMNS), out_specs=COLUMNS)(
        lambda x, w: iris.all_gather(x, "tp", dim=0) @ w
    ),
    "matmul_reduce_scatter": iris.spmd(in_specs=(COLUMNS, ROWS), out_specs=ROWS)(
        lambda x, w: iris.reduce_scatter(x @ w, "tp", dim=0)
    ),
    "matmul_all_reduce": iris.spmd(in_specs=(COLUMNS, ROWS), out_specs=WHOLE)(
        lambda x, w: iris.all_reduce(x @ w, "tp")
    ),
}


def planned(stage: str, operands: Sequence[Tensor]) -> str:
    """The contestant that the planner would take. Collective."""
    (row,) = PROGRAMS[stage].explain(*operands).rows
    return "iris" if row.choice.algorithm == "fused" else f"iris {row.choice.algorithm}"


def is_right(call: Call, want: Tensor) -> bool:
    """Whether the third result of a contestant is ``want``, on all ranks. Collective."""
    for i in range(2):
        call(i)
    result = call(2)
    torch.cuda.synchronize()
    return all(every(bool((result.float() - want).norm() <= TOLERANCE * want.norm())))


def _in_step(gemm: Call, barrier: Callable[[], object]) -> Call:
    """The product, its launches kept apart: on its own the library overlaps one with the next."""

    def call(i: int) -> Tensor:
        result: Tensor = gemm(i)
        barrier()
        return result

    return call


def measure(args: Namespace) -> Iterator[Row]:
    """All contestants at every point."""
    _, handle = symmetric(64)
    for stage in args.stages:
        for model in args.models:
            for M in args.rows:
                problem = STAGES[stage](M, SHAPES[model].hidden, SHAPES[model].inner)
                torch.cuda.synchronize()
                dist.barrier()  # kernels are loaded on all ranks
                in_step = {"gemm in step": _in_step(problem.calls["gemm"], handle.barrier)}
                calls = shuffled(problem.calls | in_step, M)
                right = {
                    name: is_right(call, problem.plain if name in FLOORS else problem.want)
                    for name, call in calls.items()
                }
                times = time_graphs(calls, handle.barrier)
                point = {"model": model, **dict(zip("MKN", problem.size, strict=True))}
                choice = planned(stage, problem.operands)
                assert choice in times, choice
                for name, time in times.items():
                    yield Row(stage, point, name, time, right[name], chosen=name == choice)
