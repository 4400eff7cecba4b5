"""Layers whose weights are spread over ranks, built from unsharded ones.

Each is an ordinary ``nn.Module`` that holds this rank's shards and says, by specs, how they are
spread. Inside a program their collectives are fused with the matmuls beside them; outside, they
run at once.
"""

from iris.nn.attention import KVCache as KVCache, ParallelAttention as ParallelAttention
from iris.nn.embedding import ParallelEmbedding as ParallelEmbedding, ParallelHead as ParallelHead
from iris.nn.linear import (
    ColumnParallelLinear as ColumnParallelLinear,
    RowParallelLinear as RowParallelLinear,
)
from iris.nn.mlp import ParallelMLP as ParallelMLP
from iris.nn.norm import RMSNorm as RMSNorm
from iris.nn.shards import Checkpoint as Checkpoint
from iris.spmd.modules import partition as partition
