"""Send one rank's value to the others."""

import pickle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from iris.errors import IrisError
from iris.runtime.groups import Group


def broadcast(group: Group, value: Any, src: int, as_tensor: bool, device: torch.device) -> Any:
    """Return rank ``src``'s value on every member; see ``Iris.broadcast``."""
    if src not in group.ranks:
        raise IrisError(
            f"broadcast: src={src} is not a rank of the group {group.ranks}",
            help="src is a global rank",
        )
    root = group.ranks.index(src)
    payload = _packed(value) if group.index == root else b""
    received = pickle.loads(group.exchange(f"broadcast(src={src})", payload)[root])
    if not isinstance(received, Tensor | np.ndarray):
        return received
    if as_tensor:
        return torch.as_tensor(received).to(device)
    return received if isinstance(received, np.ndarray) else _to_numpy(received)


def _packed(value: Any) -> bytes:
    if isinstance(value, Tensor):
        value = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return pickle.dumps(value)


def _to_numpy(tensor: Tensor) -> "np.ndarray[Any, Any]":
    try:
        return tensor.numpy()
    except TypeError:  # numpy has no bfloat16 and no fp8; float32 holds their values exactly
        return tensor.float().numpy()
