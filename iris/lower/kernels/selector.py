"""The tile of a product as tritonBLAS chooses it, where that is installed (on ROCm)."""

from dataclasses import replace

import torch

from iris.lower.kernels.config import GemmConfig


def selected_config(
    M: int, N: int, K: int, dtype: torch.dtype, device: torch.device, config: GemmConfig
) -> GemmConfig:
    """``config`` with the tile and grouping that tritonBLAS gives for [M, K] @ [K, N].

    ``config`` itself without tritonBLAS, or where its tile is none that our kernels have.
    """
    try:
        import tritonblas
    except ImportError:
        return config
    problem = (M, N, K, dtype, dtype, dtype)
    if hasattr(tritonblas, "OrigamiMatmulSelector"):
        found = tritonblas.OrigamiMatmulSelector(*problem, device)
        tile = found.block_m, found.block_n, found.block_k, found.group_m
    else:
        tile = tritonblas.MatmulHeuristicResult(*problem).get_config()
    if any(size < 16 or size & (size - 1) for size in tile[:3]):
        return config
    names = ("block_m", "block_n", "block_k", "group_m")
    return replace(config, **dict(zip(names, map(int, tile), strict=True)))
