"""RMSNorm, the same on every rank."""

from torch import nn

from iris.nn.shards import Source, parameter
from iris.spmd.modules import partition
from iris.spmd.specs import P


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` with its weight claimed to be replicated; fused into the sum over ranks
    before it.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    >>> norm = iris.nn.RMSNorm.from_weight(module.weight, eps=1e-5)         # doctest: +SKIP
    """

    @classmethod
    def from_weight(cls, weight: Source, eps: float) -> "RMSNorm":
        """The norm with a given weight ``[width]``."""
        norm = cls(weight.shape[0], eps=eps, device="meta")
        norm.weight = parameter(weight[:].detach())
        return partition(norm, P())
