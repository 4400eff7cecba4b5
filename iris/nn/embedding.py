"""The two ends of a language model, split by the vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from iris.graph.types import chunk_sizes
from iris.nn.linear import ColumnParallelLinear, add_up
from iris.nn.shards import Place, Source, parameter
from iris.spmd.collectives import axis_index, axis_size
from iris.spmd.modules import partition
from iris.spmd.specs import P

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ParallelHead = ColumnParallelLinear
"""The vocabulary-parallel head: outputs are words. ``gather_output=True`` gives every rank all
logits.
"""


class ParallelEmbedding(nn.Module):
    """Rows of a table split by its words: ``i64[...] -> [..., width]``, the same on every rank.

    Each rank looks up the words that it holds, and the sum over ranks is the result. With
    ``sequence_parallel`` the indices are ``[M]`` and the result ``[M/axis, width]``. An index
    outside the table gives zeros.

    >>> embed = iris.nn.ParallelEmbedding.from_weight(nn.Embedding(49152, 576).weight)   # doctest:
    +SKIP
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        words: int,
        axis: str = "tp",
        mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        scale: float = 1.0,
    ) -> None:
        """Hold this rank's rows of a table of ``words`` rows; see `from_weight` to cut them.

        The result is ``scale`` (in the dtype of the table) times what was found.
        """
        super().__init__()
        self.words, self.axis, self.mesh = words, axis, mesh
        self.sequence_parallel = sequence_parallel
        self.scales = {dtype: torch.tensor(scale, dtype=dtype).item() for dtype in FLOATS}
        self.weight = parameter(weight)
        partition(self, P(axis))

    @classmethod
    def from_weight(
        cls, weight: Source, *, axis: str = "tp", mesh: DeviceMesh | None = None, **options: Any
    ) -> "ParallelEmbedding":
        """Copy this rank's rows of an unsharded table, or read them from a `Checkpoint`;
        ``options`` are those of the class.
        """
        rows, words = Place.of(axis, mesh).take(weight, 0), weight.shape[0]
        return cls(rows, words=words, axis=axis, mesh=mesh, **options)

    def forward(self, index: Tensor, sequence_parallel: bool | None = None) -> Tensor:
        """``sequence_parallel`` here is for this call only."""
        spread = self.sequence_parallel if sequence_parallel is None else sequence_parallel
        y = add_up(self._found(index), self.axis, self.mesh, spread)
        scale = self.scales[y.dtype]
        return y if scale == 1 else y * scale

    def _found(self, index: Tensor) -> Tensor:
        """The rows that this rank holds, and zeros for others."""
        largest = chunk_sizes(self.words, axis_size(self.axis, mesh=self.mesh))[0]
        here = index - axis_index(self.axis, mesh=self.mesh) * largest
        held = len(self.weight)
        known = (here >= 0) & (here < held)
        table = self.weight if held else F.pad(self.weight, (0, 0, 0, 1))
        found = F.embedding(here.clamp(0, len(table) - 1), table)
        return torch.where(known.unsqueeze(-1), found, 0.0)
