"""Linear layers split over ranks by their outputs (columns) or by their inputs (rows)."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from iris.nn.shards import LinearSource, Place, linear_source, parameter
from iris.spmd.collectives import all_gather, all_reduce, reduce_scatter
from iris.spmd.modules import partition
from iris.spmd.specs import P


class ColumnParallelLinear(nn.Module):
    """``y = x W^T + b`` with the outputs split: ``[..., K] -> [..., N/axis]``.

    With ``sequence_parallel`` x is ``[M/axis, K]``, split by rows, and gathered first. With
    ``gather_output`` y is whole on every rank. Outputs that do not divide are split as torch.chunk
    does.

    >>> up = iris.nn.ColumnParallelLinear.from_linear(nn.Linear(576, 1536))  # doctest: +SKIP
    """

    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        out_features: int,
        axis: str = "tp",
        mesh: DeviceMesh | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        """Hold this rank's rows of ``weight`` and ``bias``; see `from_linear` to cut them."""
        super().__init__()
        self.out_features, self.axis, self.mesh = out_features, axis, mesh
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        self.weight = parameter(weight)
        self.register_parameter("bias", None if bias is None else parameter(bias))
        partition(self, P(axis))

    @classmethod
    def from_linear(
        cls,
        linear: LinearSource,
        *,
        axis: str = "tp",
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> "ColumnParallelLinear":
        """Copy this rank's rows of an unsharded layer, or read them from a `Checkpoint`;
        ``options`` are those of the class.
        """
        place, features = Place.of(axis, mesh), linear_source(linear).weight.shape[0]
        bias = None if linear.bias is None else place.take(linear.bias, 0)
        weight = place.take(linear.weight, 0)
        return cls(weight, bias, out_features=features, axis=axis, mesh=mesh, **options)

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence_parallel:
            x = all_gather(x, self.axis, 0, mesh=self.mesh)
        y = F.linear(x, self.weight, self.bias)
        if self.gather_output:
            return all_gather(y, self.axis, -1, size=self.out_features, mesh=self.mesh)
        return y


class RowParallelLinear(nn.Module):
    """``y = x W^T + b`` with the inputs split: ``[..., K/axis] -> [..., N]``, summed over ranks.

    With ``sequence_parallel`` x is ``[M, K/axis]`` and y is ``[M/axis, N]``: each rank keeps its
    rows of the sum. The bias is added once, after the sum. Inputs that do not divide are split as
    torch.chunk does.

    >>> down = iris.nn.RowParallelLinear.from_linear(nn.Linear(1536, 576))   # doctest: +SKIP
    """

    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        axis: str = "tp",
        mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        """Hold this rank's columns of ``weight`` and the whole ``bias``; see `from_linear` to cut
        them.
        """
        super().__init__()
        self.axis, self.mesh, self.sequence_parallel = axis, mesh, sequence_parallel
        self.weight = parameter(weight)
        self.register_parameter("bias", None if bias is None else parameter(bias))
        partition(self, {"weight": P(None, axis), "bias": P()})

    @classmethod
    def from_linear(
        cls,
        linear: LinearSource,
        *,
        axis: str = "tp",
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> "RowParallelLinear":
        """Copy this rank's columns of an unsharded layer, or read them from a `Checkpoint`;
        ``options`` are those of the class.
        """
        place, whole = Place.of(axis, mesh), linear_source(linear).bias
        bias = None if whole is None else whole[:].detach().clone()
        weight = place.take(linear.weight, 1)
        return cls(weight, bias, axis=axis, mesh=mesh, **options)

    def forward(self, x: Tensor, sequence_parallel: bool | None = None) -> Tensor:
        """``sequence_parallel`` here is for this call only."""
        spread = self.sequence_parallel if sequence_parallel is None else sequence_parallel
        return self.summed(F.linear(x, self.weight), spread)

    def summed(self, part: Tensor, sequence_parallel: bool) -> Tensor:
        """Add the ranks' parts up, then the bias; keep this rank's rows or all of them."""
        y = add_up(part, self.axis, self.mesh, sequence_parallel)
        return y if self.bias is None else y + self.bias


def add_up(part: Tensor, axis: str, mesh: DeviceMesh | None, sequence_parallel: bool) -> Tensor:
    """The sum of the ranks' parts: this rank's rows of it, or all of it."""
    if sequence_parallel:
        return reduce_scatter(part, axis, 0, mesh=mesh)
    return all_reduce(part, axis, mesh=mesh)
