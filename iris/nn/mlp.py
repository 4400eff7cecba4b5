"""The feed-forward block, split by its hidden features."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from iris.nn.linear import ColumnParallelLinear, RowParallelLinear
from iris.nn.shards import LinearSource
from iris.spmd.collectives import all_gather


class ParallelMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate: ``[..., K] -> [...,
    K]``.

    With ``sequence_parallel`` x and y are ``[M/axis, K]``, split by rows.

    >>> mlp = iris.nn.ParallelMLP.from_linear(up, down, gate)                # doctest: +SKIP
    """

    def __init__(
        self,
        up: ColumnParallelLinear,
        down: RowParallelLinear,
        gate: ColumnParallelLinear | None = None,
        activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        super().__init__()
        self.up, self.gate, self.down = up, gate, down
        self.activation = activation

    @classmethod
    def from_linear(
        cls,
        up: LinearSource,
        down: LinearSource,
        gate: LinearSource | None = None,
        *,
        activation: Callable[[Tensor], Tensor] = F.silu,
        axis: str = "tp",
        mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
    ) -> "ParallelMLP":
        """Cut three (or, without ``gate``, two) unsharded layers."""
        column = ColumnParallelLinear.from_linear
        return cls(
            column(up, axis=axis, mesh=mesh),
            RowParallelLinear.from_linear(
                down, axis=axis, mesh=mesh, sequence_parallel=sequence_parallel
            ),
            None if gate is None else column(gate, axis=axis, mesh=mesh),
            activation,
        )

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        """``rows``: for this call, x and y are this rank's shards of so many rows."""
        spread = self.down.sequence_parallel or rows is not None
        if spread:
            x = all_gather(x, self.down.axis, 0, size=rows, mesh=self.down.mesh)
        h = self.activation(self.up(x) if self.gate is None else self.gate(x))
        y: Tensor = self.down(h if self.gate is None else h * self.up(x), spread)
        return y
