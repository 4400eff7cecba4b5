"""A matched stage as one callable: a kernel of `iris.lower.kernels` with its operands put in
place.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from iris.graph.types import Mesh, TensorType
from iris.lower.dtypes import TORCH_DTYPES
from iris.lower.epilogue import Epilogue, of_match
from iris.lower.kernels.all_gather_matmul import AllGatherMatmul
from iris.lower.kernels.config import default_config
from iris.lower.kernels.gemm import identity
from iris.lower.kernels.host import Turns, Workspace
from iris.lower.kernels.matmul_all_gather import MatmulAllGather
from iris.lower.kernels.matmul_all_reduce import MatmulAllReduce
from iris.lower.kernels.matmul_reduce_scatter import MatmulReduceScatter
from iris.lower.stages import Match
from iris.runtime.context import Iris
from iris.runtime.groups import Group
from iris.runtime.guards import nans

Shape = tuple[int, ...]


def rows(shape: Sequence[int]) -> int:
    """Rows of a value whose last dim are the columns."""
    return math.prod(shape[:-1])


@dataclass(frozen=True)
class Values:
    """Local shapes and dtypes of a program's values, by name."""

    types: Mapping[str, TensorType]
    mesh: Mesh
    coord: Mapping[str, int]

    def shape(self, name: str) -> Shape:
        """Local shape of a value."""
        return self.types[name].local_shape(self.mesh, self.coord)

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a value."""
        return TORCH_DTYPES[self.types[name].dtype]


class FusedCall:
    """Calls a kernel stage on ``(x, *weights, *operands)`` and returns its results.

    With ``dry`` set, kernels are loaded or compiled, and nothing is computed or waited for.
    """

    def __init__(self, match: Match, ctx: Iris, group: Group, values: Values) -> None:
        self.dry: int | Turns = 0
        self.device = ctx.device
        self.empty: Callable[..., Tensor] = torch.empty if ctx.checks is None else nans
        self.weights = len(match.products)
        self.gathers = bool(match.gathered)
        self.shapes = [values.shape(name) for name in results_of(match)]
        self.dtypes = [values.dtype(name) for name in results_of(match)]
        self.epilogue = of_match(match)
        self.tile_shapes = _tile_shapes(match, self.epilogue, values)
        self.launch, self.work = LAUNCHERS[match.stage](self, match, Site(ctx, group, values))
        self.workspace = self.work.block.nbytes

    def __call__(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        weights, operands = rest[: self.weights], rest[self.weights :]
        outs = [
            self.empty(shape, dtype=dtype, device=self.device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        args: list[Any] = []
        for operand, shape in zip(operands, self.tile_shapes, strict=True):
            tile = operand.expand(shape).reshape(rows(shape), shape[-1])
            args += [tile, *tile.stride()]
        flat = [out.view(rows(out.shape), out.shape[-1]) for out in outs]
        with np.errstate(over="ignore"):  # the interpreter's exp, where a GPU's is silent too
            self.launch(x, weights, flat, tuple(args), self.dry)
        return tuple(outs)

    @property
    def function(self) -> Any:
        """The epilogue that the kernel is compiled with."""
        return identity if self.epilogue is None else self.epilogue.load()


def results_of(match: Match) -> tuple[str, ...]:
    """Values that a fused call returns, in order: a gathered value that others read comes last."""
    return (*match.results, *([match.gathered] if match.gathered else []))


def operands_of(match: Match) -> tuple[str, ...]:
    """Values that a fused call takes, in order."""
    epilogue = of_match(match)
    left = (
        match.collective.uses[0] if match.stage == "all_gather_matmul" else match.products[0].left
    )
    return (left, *(p.right for p in match.products), *(epilogue.operands if epilogue else ()))


def _tile_shapes(match: Match, epilogue: Epilogue | None, values: Values) -> list[Shape]:
    """For each operand of the epilogue, the shape of the value it meets first."""
    shapes = []
    for name in epilogue.operands if epilogue else ():
        reader = next(node for node in match.chain if name in node.uses)
        shapes.append(values.shape(reader.out.name))
    return shapes


@dataclass(frozen=True)
class Site:
    """Where a stage is built."""

    ctx: Iris
    group: Group
    values: Values


Launch = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor], tuple[Any, ...], int | Turns], None]


def _launch_gather(call: FusedCall, match: Match, site: Site) -> tuple[Launch, Workspace]:
    gathered = site.values.shape(match.collective.out.name)
    columns = [site.values.shape(p.right)[1] for p in match.products]
    dtype = site.values.dtype(match.products[0].left)
    config = default_config(rows(gathered), max(columns), dtype, site.ctx.device)
    if match.zipped:  # two weights' tiles take the room of one
        config = replace(config, block_n=max(16, config.block_n // 2))
    stage = AllGatherMatmul.create(
        site.ctx,
        site.group,
        M=rows(gathered),
        K=gathered[-1],
        columns=columns,
        dtype=dtype,
        epilogue=call.function,
        zipped=match.zipped,
        config=config,
    )

    def launch(x: Tensor, weights: Any, outs: Any, args: Any, dry: Any) -> None:
        flat = x.reshape(rows(x.shape), x.shape[-1])
        out, gathered = (outs[:-1], outs[-1]) if call.gathers else (outs, None)
        stage(flat, weights, out=out, args=[args], gathered=gathered, dry=dry)

    return launch, stage.workspace


def _launch_then(call: FusedCall, match: Match, site: Site) -> tuple[Launch, Workspace]:
    """A product whose rows, or columns as the transposed problem, are summed or gathered."""
    values, product = site.values, match.products[0]
    (m, k), n = values.shape(product.left), values.shape(product.right)[1]
    operand = values.shape(match.collective.uses[0])
    columns = int(match.collective.kwargs["dim"]) == len(operand) - 1 > 0  # type: ignore[arg-type]
    if match.stage == "matmul_all_gather":
        gathered = call.shapes[0]
        m, n = (m, gathered[-1]) if columns else (rows(gathered), n)
    make = THEN[match.stage]
    stage = make.create(
        site.ctx,
        site.group,
        M=n if columns else m,
        N=m if columns else n,
        K=k,
        dtype=values.dtype(product.left),
        epilogue=call.function,
    )

    def launch(x: Tensor, weights: Any, outs: Any, args: Any, dry: Any) -> None:
        left, right, out = (weights[0].T, x.T, outs[0].T) if columns else (x, weights[0], outs[0])
        stage(left, right, out=out, args=args, dry=dry)

    return launch, stage.workspace


THEN: Mapping[str, Any] = {
    "matmul_reduce_scatter": MatmulReduceScatter,
    "matmul_all_gather": MatmulAllGather,
}


def _launch_reduce(call: FusedCall, match: Match, site: Site) -> tuple[Launch, Workspace]:
    (m, k), n = (
        site.values.shape(match.products[0].left),
        site.values.shape(match.products[0].right)[1],
    )
    dtype = site.values.dtype(match.products[0].left)
    stage = MatmulAllReduce.create(
        site.ctx, site.group, M=m, N=n, K=k, dtype=dtype, after=call.function
    )

    def launch(x: Tensor, weights: Any, outs: Any, args: Any, dry: Any) -> None:
        stage(x, weights[0], out=outs[0], after_args=args, dry=dry)

    return launch, stage.workspace


LAUNCHERS: Mapping[str, Callable[[FusedCall, Match, Site], tuple[Launch, Workspace]]] = {
    "all_gather_matmul": _launch_gather,
    "matmul_reduce_scatter": _launch_then,
    "matmul_all_gather": _launch_then,
    "matmul_all_reduce": _launch_reduce,
}
