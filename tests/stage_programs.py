"""Programs of one fused stage each, by fields, run by kernels and by torch's ops and compared."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import iris
from iris import P
from iris.testing import TOLERANCE, delay

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
# What a part of a sum may go through, and what a whole product may.
LINEAR = {"none": lambda y: y, "scale": lambda y: y * 0.5, "minus": lambda y: -y}
POINTWISE = LINEAR | {
    "relu": F.relu,
    "clamp": lambda y: y.clamp(-3, 5),
    "cast": lambda y: y.float(),
}
SMOOTH = {"silu": F.silu, "gelu": lambda y: F.gelu(y, approximate="tanh")}
NORMS = {
    "fused": lambda h, g: F.rms_norm(h, h.shape[-1:], g, 1e-5),
    "written": lambda h, g: (
        (h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(h.dtype) * g
    ),
}


@dataclass(frozen=True)
class Case:
    """A program of one stage."""

    kind: str
    M: int
    N: int
    K: int
    dtype: torch.dtype = torch.float32
    dim: int = 0  # that is gathered or scattered
    layout: str = "rows"  # of the left operand, if it is a matrix: torch folds others by strides
    linear: bool = False  # the weight is given as [N, K]
    weights: int = 1
    epilogue: str = "none"
    bias: bool = False
    residual: bool = False
    norm: str = ""
    batched: bool = False  # the left operand is [1, M, K]
    again: bool = False  # the gathered value is returned too
    algorithm: str = "fused"


def product(case, x, w, scales):
    """``x @ w`` by the operator for the operands' type."""
    if x.dtype == torch.int8:
        return torch._int_mm(x, w)
    if x.dtype == FP8:
        return torch._scaled_mm(x, w, *scales, out_dtype=torch.bfloat16)
    return F.linear(x, w.t()) if case.linear else x @ w


def result(case, y, index, extra):
    """The epilogue of product ``index``."""
    y = (POINTWISE | SMOOTH)[case.epilogue](y)
    return y + extra["bias"][index] if case.bias else y


def after_sum(case, y, extra):
    """What follows a sum: both the sum and its norm where there is one."""
    if case.bias:
        y = y + extra["bias"][0]
    if case.residual:
        y = y + extra["residual"]
    return (y, NORMS[case.norm](y, extra["weight"])) if case.norm else y


def before(case, x, ws, scales, extra):
    """What is communicated."""
    if case.kind in ("gather", "norm"):
        return x
    y = product(case, x, ws[0], scales)
    return result(case, y, 0, extra) if case.kind == "send" else LINEAR[case.epilogue](y)


def after(case, y, ws, scales, extra):
    """What becomes of what was communicated."""
    if case.kind == "send":
        return y
    if case.kind != "gather":
        return after_sum(case, y, extra)
    ys = [result(case, product(case, y, w, scales), i, extra) for i, w in enumerate(ws)]
    if case.weights == 2 and case.residual:
        ys = [F.silu(ys[0]) * ys[1]]  # a pair that shares an epilogue
    return (*ys, y) if case.again else tuple(ys)


def program(case):
    """The case as a user writes it."""
    collective = COLLECTIVES[case.kind]
    dim = {} if collective == "all_reduce" else {"dim": case.dim + case.batched}

    def run(x, ws, scales, extra):
        y = getattr(iris, collective)(before(case, x, ws, scales, extra), "tp", **dim)
        return after(case, y, ws, scales, extra)

    return run


# Specs of what is added to rows or columns of a sum.
SCATTERED = (
    {"bias": P(), "residual": P("tp"), "weight": P()},
    {"bias": P("tp"), "residual": P(None, "tp"), "weight": P()},
)
KINDS = ("gather", "scatter", "reduce", "send", "norm")
COLLECTIVES = {
    **dict.fromkeys(("gather", "send"), "all_gather"),
    **dict.fromkeys(("reduce", "norm"), "all_reduce"),
    "scatter": "reduce_scatter",
}


def specs(case):
    """Specs of x and of each weight."""
    batch = (None,) if case.batched else ()
    if case.kind == "gather":
        x = P(*batch, "tp", None) if case.dim == 0 else P(*batch, None, "tp")
        return x, P(None, "tp") if case.dim == 0 else P()
    if case.kind == "send":
        return (P(*batch, "tp", None), P()) if case.dim == 0 else (P(), P(None, "tp"))
    return (P(*batch, None, "tp"), P("tp", None)) if case.kind != "norm" else (P("tp"), P())


def values(case, seed, exact, *shape):
    """Small integers, or floats, of the case's type; equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    if exact or case.dtype == torch.int8:
        return torch.randint(-2, 3, shape, generator=generator).to(case.dtype)
    return torch.randn(shape, generator=generator).to(case.dtype)


def shard(x, spec, rank, world):
    """This rank's part of ``x`` by torch.chunk's rule."""
    for dim, axes in enumerate(spec.dims):
        if axes:
            size = -(-x.shape[dim] // world)
            start = min(rank * size, x.shape[dim])
            x = x.narrow(dim, start, min(size, x.shape[dim] - start))
    return x


def laid(x, layout):
    """The same values in another order in memory."""
    if layout == "columns":
        return x.mT.contiguous().mT
    if layout == "strided":
        return x.repeat_interleave(2, -1)[..., ::2]
    return x.contiguous()


def operands(case, seed, exact, rank, world):
    """Arguments of the program on this rank."""
    of_x, of_w = specs(case)
    shape = (case.M, case.K) if case.kind != "norm" else (world * case.M, case.N)
    x = values(case, seed, exact, *([1] * case.batched), *shape)
    ws = []
    for i in range(case.weights):
        w = shard(values(case, seed + 50 + i, exact, case.K, case.N), of_w, rank, world)
        ws.append(laid(w, "columns" if case.linear or case.dtype == FP8 else "rows"))
    wide = case.dtype if case.dtype in FLOATS else torch.float32
    plain = replace(case, dtype=wide)
    n = ws[0].shape[1]
    extra = {
        "bias": [values(plain, seed + 70 + i, exact, n) for i in range(case.weights)],
        "residual": values(plain, seed + 80, exact, case.M, case.N),
        "weight": values(plain, seed + 90, exact, case.N).repeat_interleave(2)[::2],
    }
    if case.kind == "scatter":
        of_bias, of_residual = (SCATTERED[case.dim][name] for name in ("bias", "residual"))
        extra["bias"] = [shard(bias, of_bias, rank, world) for bias in extra["bias"]]
        extra["residual"] = shard(extra["residual"], of_residual, rank, world)
    scales = (torch.tensor(0.5), torch.tensor(4.0))
    layout = "rows" if case.batched else case.layout
    return laid(shard(x, of_x, rank, world), layout), ws, scales, extra


def compare(case, got, want, exact):
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        smooth = case.epilogue in SMOOTH or case.norm or (case.weights == 2 and case.residual)
        if (exact and not smooth) or not ours.is_floating_point():
            assert torch.equal(ours, theirs), (ours.double() - theirs.double()).abs().max()
        else:
            rtol, atol = TOLERANCE[case.dtype if case.dtype in FLOATS else torch.bfloat16]
            size = theirs.float().abs().amax().item() if theirs.numel() else 0.0  # parts may cancel
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol * (1 + size))


def moved(value, device):
    """A tree of tensors on a device, in the same order in memory."""
    if isinstance(value, torch.Tensor):
        there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return there.copy_(value)
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    return type(value)(moved(item, device) for item in value)


def in_specs(case):
    """Specs of all arguments of the program."""
    of_x, of_w = specs(case)
    if case.kind in ("gather", "send") and case.dim == (case.kind == "send"):
        return of_x, of_w, P(), {"bias": P("tp"), "residual": P(), "weight": P()}
    return of_x, of_w, P(), SCATTERED[case.dim] if case.kind == "scatter" else P()


def expected(case, seed, exact, rank, world):
    """What ``rank`` gets, computed by torch on the CPU from all ranks' operands."""
    given = [operands(case, seed, exact, r, world) for r in range(world)]
    parts = [before(case, *args) for args in given]
    dim, kind = case.dim + case.batched, COLLECTIVES[case.kind]
    if kind == "all_gather":
        y = torch.cat([part.float() for part in parts], dim)  # torch.cat takes no fp8
    else:
        y = sum(part.double() for part in parts)
    y = y.to(parts[0].dtype)
    if kind == "reduce_scatter":
        y = shard(y, P(*[None] * dim, "tp"), rank, world)
    return tuple_of(after(case, y, *given[rank][1:]))


def tuple_of(result):
    return (result,) if torch.is_tensor(result) else tuple(result)


def check(case, ctx, calls=3):
    """Run the case by kernels and by torch's ops, with exact values and then with floats."""
    config = iris.StageConfig(case.algorithm)
    fused, plain = (
        iris.spmd(in_specs=in_specs(case), lowering=lowering, config=config)(program(case))
        for lowering in ("triton", "torch")
    )
    runs = []
    for seed in range(calls):
        exact = seed % 3 < 2
        given = operands(case, seed, exact, ctx.cur_rank, ctx.num_ranks)
        if seed % 3 == 1:
            delay(ctx.num_ranks - 1, 0.01)
        runs.append((fused(*given), plain(*given), exact))
    for got, want, exact in runs:  # now that all ranks are through
        compare(case, tuple_of(got), tuple_of(want), exact)
    return ways_of(fused.trace(*given))


def ways_of(traced):
    """Stage, algorithm and reason of every stage of a program."""
    rows = traced.lower().explain().rows
    return [(row.stage, row.choice.algorithm, row.choice.why) for row in rows]
