"""A parallelized model's weights, whole again, under the names that transformers has for them."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from iris.nn import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelEmbedding,
    ParallelMLP,
    RowParallelLinear,
)
from iris.runtime.context import current
from iris.spmd.collectives import all_gather, all_reduce

PIECE = 1 << 24  # bytes that ranks gather at once


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Every weight of a parallelized model, whole, on the CPU of every rank. Collective.

    ``model.state_dict()`` has this rank's shards; this is what transformers would load.

    >>> torch.save(whole_state_dict(model), "weights.pt")                   # doctest: +SKIP
    """
    return _gathered(model, keep=True)


def save_pretrained(
    self: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    *args: Any,
    ranks: Sequence[int],
    **kwargs: Any,
) -> None:
    """As transformers' own, of the whole model: the first of ``ranks`` writes, all of them wait."""
    group = current().group(ranks)
    writes = group.index == 0 and is_main_process
    if state_dict is None:
        state_dict = _gathered(self, writes)
    if writes:
        type(self).save_pretrained(self, save_directory, True, state_dict, *args, **kwargs)
    group.sync(f"{type(self).__name__} is saved")


@torch.no_grad()
def _gathered(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    inner: set[nn.Module] = set()
    tied: set[Tensor] = set()
    for path, module in model.named_modules():
        if isinstance(module, ParallelAttention | ParallelMLP):
            inner |= {module.out} if isinstance(module, ParallelAttention) else {*module.children()}
        if module in inner or module._parameters.get("weight") in tied:
            continue
        tied |= {module.weight} if isinstance(module, ParallelEmbedding) else set()
        whole = _whole(module)
        if keep:
            state |= {f"{path}.{name}": tensor for name, tensor in whole.items()}
    return state


def _whole(module: nn.Module) -> dict[str, Tensor]:
    """What transformers holds in the place of a module, but for those inside of it."""
    if isinstance(module, ParallelAttention):
        return _attention(module)
    if isinstance(module, ParallelMLP):
        parts = _columns(module.up, "up_proj.") | _rows(module.down, 1, "down_proj.")
        return parts if module.gate is None else parts | _columns(module.gate, "gate_proj.")
    if isinstance(module, ParallelEmbedding | ColumnParallelLinear):
        return _columns(module)
    return {name: t.detach().cpu() for name, t in module._parameters.items() if t is not None}


def _columns(
    layer: ParallelEmbedding | ColumnParallelLinear, prefix: str = ""
) -> dict[str, Tensor]:
    held = layer._parameters.items()
    return {prefix + name: _gather(layer, t, 0) for name, t in held if t is not None}


def _rows(layer: RowParallelLinear, dims: int, prefix: str) -> dict[str, Tensor]:
    whole = {f"{prefix}weight": _gather(layer, layer.weight, 1).flatten(1, dims)}
    return whole if layer.bias is None else whole | {f"{prefix}bias": layer.bias.detach().cpu()}


def _attention(layer: ParallelAttention) -> dict[str, Tensor]:
    parts = _rows(layer.out, 2, "o_proj.")
    for name, held in (("weight", layer.qkv), ("bias", layer.bias)):
        if held is not None:
            groups = _gather(layer.out, held, 0)
            q, k, v = groups.split([layer.queries * layer.width, layer.width, layer.width], 1)
            parts[f"q_proj.{name}"] = q.flatten(0, 1)
            parts[f"k_proj.{name}"] = k[:: layer.copies].flatten(0, 1)
            parts[f"v_proj.{name}"] = v[:: layer.copies].flatten(0, 1)
    return parts


def _gather(layer: Any, part: Tensor, dim: int) -> Tensor:
    """The ranks' parts joined along ``dim``, on the CPU; some columns after the other."""
    where: dict[str, Any] = {"axis": layer.axis, "mesh": layer.mesh}
    rows = part.movedim(dim, 0)
    rest = rows.shape[1:]
    most = int(all_reduce(torch.tensor([len(rows)], device=part.device), op="max", **where))
    flat = rows.reshape(len(rows), rest.numel())
    step = max(1, PIECE // (most * part.element_size()))
    pieces = [all_gather(piece.contiguous(), **where).cpu() for piece in flat.split(step, 1)]
    whole = torch.cat(pieces, 1)
    return whole.reshape(len(whole), *rest).movedim(0, dim)
