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
from iris.lower.choices import Choice
from iris.lower.dtypes import TORCH_DTYPES
from iris.lower.epilogue import Epilogue, generate
from iris.lower.kernels.all_gather_matmul import AllGatherMatmul
from iris.lower.kernels.all_reduce_norm import AllReduceNorm
from iris.lower.kernels.config import GemmConfig, default_config
from iris.lower.kernels.gemm import identity
from iris.lower.kernels.host import Stage, Turns
from iris.lower.kernels.matmul_all_gather import MatmulAllGather
from iris.lower.kernels.matmul_all_reduce import MatmulAllReduce
from iris.lower.kernels.matmul_reduce_scatter import MatmulReduceScatter
from iris.lower.kernels.product import ProductStage
from iris.lower.kernels.selector import selected_config
from iris.lower.stages import Chain, Match
from iris.runtime.context import Iris
from iris.runtime.groups import Group
from iris.runtime.guards import nans

Shape = tuple[int, ...]
Args = tuple[Any, ...]


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

    def matrix(self, name: str) -> Shape:
        """Rows and columns of a value."""
        shape = self.shape(name)
        return rows(shape), shape[-1]

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a value."""
        return TORCH_DTYPES[self.types[name].dtype]


@dataclass(frozen=True)
class Site:
    """Where a stage is built, and how."""

    ctx: Iris
    group: Group
    values: Values
    match: Match
    choice: Choice

    def gemm(self, M: int, N: int, K: int, dtype: torch.dtype) -> GemmConfig:
        """The configuration of a [M, K] @ [K, N] product."""
        device = self.ctx.device
        config = self.choice.gemm or default_config(M, N, dtype, device)
        if self.choice.gemm is None and torch.version.hip:
            config = selected_config(M, N, K, dtype, device, config)
        communication = self.choice.communication or config.communication
        return replace(config, fast=self.match.fast, communication=communication)


class _Operands:
    """An epilogue, and the shapes that its operands are spread to."""

    def __init__(self, chain: Chain, values: Values) -> None:
        self.epilogue: Epilogue | None = generate(chain)
        self.names = self.epilogue.operands if self.epilogue else ()
        readers = [next(node for node in chain.nodes if name in node.uses) for name in self.names]
        self.shapes = [values.shape(node.out.name) for node in readers]
        self.function = self.epilogue.load() if self.epilogue else identity

    def args(self, tensors: Sequence[Tensor], turned: bool) -> Args:
        """The epilogue's arguments; ``turned`` where the kernel's rows are the result's columns."""
        args: list[Any] = []
        for tensor, shape in zip(tensors, self.shapes, strict=True):
            tile = tensor.expand(shape).reshape(rows(shape), shape[-1])
            args += [tile, *(tile.stride()[::-1] if turned else tile.stride())]
        return tuple(args)


class FusedCall:
    """Calls a kernel stage on its operands (`operands_of`) and returns `results_of` it.

    With ``dry`` set, kernels are loaded or compiled, and nothing is computed or waited for.
    """

    def __init__(
        self, match: Match, choice: Choice, ctx: Iris, group: Group, values: Values
    ) -> None:
        self.dry: int | Turns = 0
        self.match, self.device = match, ctx.device
        self.empty: Callable[..., Tensor] = torch.empty if ctx.checks is None else nans
        made = {value.name: value.type for value in match.values}
        values = replace(values, types={**made, **values.types})
        self.operands = [_Operands(chain, values) for chain in match.chains]
        self.results = [(values.shape(name), values.dtype(name)) for name in results_of(match)]
        site = Site(ctx, group, values, match, choice)
        self.stage, self.turned = BUILDERS[match.stage](
            site, [operands.function for operands in self.operands]
        )
        self.work = self.stage.workspace
        self.workspace = self.work.nbytes

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        # A number may be on the CPU, and a part of a complex tensor yet to be negated.
        tensors = iter([tensor.to(self.device).resolve_neg() for tensor in given])
        left = next(tensors)
        weights = [next(tensors) for _ in self.match.products]
        args = [
            operands.args([next(tensors) for _ in operands.names], self.turned)
            for operands in self.operands
        ]
        outs = [self.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.results]
        flat = [out.view(rows(out.shape), out.shape[-1]) for out in outs]
        with np.errstate(all="ignore"):  # the interpreter warns where a GPU is silent
            self._launch(left, weights, flat, args, next(tensors, None))
        return tuple(outs)

    def _launch(
        self,
        left: Tensor,
        weights: Sequence[Tensor],
        outs: Sequence[Tensor],
        args: Sequence[Args],
        scale: Tensor | None,
    ) -> None:
        """Launch the kernel; ``scale`` is the weight of a norm."""
        match, dry = self.match, self.dry
        late: dict[str, Any] = {"after_args": args[-1]} if match.late else {}
        scale = None if scale is None else scale.contiguous()
        if match.stage == "all_gather_matmul":
            kept = outs[-1] if match.gathered else None
            outs = outs[: len(match.early)]
            x = left.reshape(rows(left.shape), left.shape[-1])
            self.stage(x, weights, out=outs, args=args, gathered=kept, dry=dry)
        elif match.stage == "all_reduce_norm":
            x = left.reshape(outs[0].shape).contiguous()
            self.stage(x, scale, out=outs[1], summed=outs[0], args=args[0], dry=dry)
        else:
            x, w, out = left, weights[0], outs[0]
            if self.turned:
                x, w, out = w.T, x.T, out.T
            if match.norm is not None:
                late |= {"weight": scale, "eps": match.norm.eps, "normed": outs[1]}
            self.stage(x, w, out=out, args=args[0], **late, dry=dry)


def results_of(match: Match) -> tuple[str, ...]:
    """Values that a fused call returns, in order: a gathered value that others read comes last."""
    return (*match.results, *([match.gathered] if match.gathered else []))


def operands_of(match: Match) -> tuple[str, ...]:
    """Values that a fused call takes, in order."""
    sent_first = match.stage in ("all_gather_matmul", "all_reduce_norm")
    left = match.collective.uses[0] if sent_first else match.products[0].left
    epilogues = [generate(chain) for chain in match.chains]
    extra = [name for epilogue in epilogues if epilogue for name in epilogue.operands]
    scale = [match.norm.weight] if match.norm and match.norm.weight else []
    return (left, *(p.right for p in match.products), *extra, *scale)


Functions = Sequence[Any]


def _build_gather(site: Site, functions: Functions) -> tuple[Stage, bool]:
    match, values = site.match, site.values
    (M, K), dim = values.matrix(match.collective.out.name), match.collective.kwargs["dim"]
    columns = [values.shape(p.right)[1] for p in match.products]
    dtype = values.dtype(match.products[0].left)
    config = site.gemm(M, max(columns), K, dtype)
    if match.zipped and site.choice.gemm is None:  # two weights' tiles take the room of one
        config = replace(config, block_n=max(16, config.block_n // 2))
    shape = values.shape(match.collective.out.name)
    stage = AllGatherMatmul.create(
        site.ctx,
        site.group,
        M=M,
        K=K,
        columns=columns,
        dtype=dtype,
        epilogue=list(functions),
        zipped=match.zipped,
        dim=1 if dim == len(shape) - 1 else 0,
        config=config,
        engine=site.choice.algorithm == "copy engine",
    )
    return stage, False


def _build_product(site: Site, functions: Functions) -> tuple[Stage, bool]:
    """A product that is summed, or whose rows, or columns as the transposed problem, are summed
    and split, or gathered.
    """
    match, values, make = site.match, site.values, PRODUCTS[site.match.stage]
    product, sent = match.products[0], match.collective.uses[0]
    (m, k), n = values.shape(product.left), values.shape(product.right)[1]
    options: dict[str, Any] = {}
    if make is MatmulAllReduce:
        norm = None if match.norm is None else "weighted" if match.norm.weight else "plain"
        options = {"one_shot": site.choice.algorithm == "one-shot", "norm": norm}
    turned = match.collective.kwargs.get("dim") == len(values.shape(sent)) - 1
    M, N = (n, m) if turned else (m, n)
    if make is MatmulAllGather:
        M = values.matrix(match.collective.out.name)[turned]
    dtype = values.dtype(product.left)
    stage = make.create(
        site.ctx,
        site.group,
        M=M,
        N=N,
        K=k,
        dtype=dtype,
        part_dtype=values.dtype(sent),
        epilogue=functions[0],
        after=functions[-1] if match.late else identity,
        config=site.gemm(make.tile_rows(M, site.group), N, k, dtype),
        **options,
    )
    return stage, turned


def _build_norm(site: Site, functions: Functions) -> tuple[Stage, bool]:
    match, values = site.match, site.values
    assert match.norm is not None
    M, N = values.matrix(match.collective.out.name)
    stage = AllReduceNorm.create(
        site.ctx,
        site.group,
        M=M,
        N=N,
        dtype=values.dtype(match.collective.uses[0]),
        summed_dtype=values.dtype(match.results[0]),
        eps=match.norm.eps,
        after=functions[0],
    )
    return stage, False


PRODUCTS: Mapping[str, type[ProductStage]] = {
    "matmul_reduce_scatter": MatmulReduceScatter,
    "matmul_all_gather": MatmulAllGather,
    "matmul_all_reduce": MatmulAllReduce,
}
BUILDERS: Mapping[str, Callable[[Site, Functions], tuple[Stage, bool]]] = {
    "all_gather_matmul": _build_gather,
    "all_reduce_norm": _build_norm,
    **dict.fromkeys(PRODUCTS, _build_product),
}
