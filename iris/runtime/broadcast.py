"""Send one rank's value to the others."""

import pickle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from iris.errors import IrisError
from iris.runtime.groups import Group
from iris.runtime.segments import Address, Segment
from iris.runtime.transport import dumps

_LARGE = 1 << 16  # bytes from which a value goes through a segment, and not chunk by chunk


def broadcast(group: Group, value: Any, src: int, as_tensor: bool, device: torch.device) -> Any:
    """Return rank ``src``'s value on every member; see ``Iris.broadcast``."""
    if src not in group.ranks:
        raise IrisError(
            f"broadcast: src={src!r} is not a rank of the group {group.ranks}",
            help="src is a global rank",
        )
    received = _send(group, value, group.ranks.index(src), f"broadcast(src={src})")
    if not isinstance(received, Tensor | np.ndarray):
        return received
    if as_tensor:
        return torch.as_tensor(received).to(device)
    return received if isinstance(received, np.ndarray) else _to_numpy(received)


def _send(group: Group, value: Any, root: int, what: str) -> Any:
    sent: bytes | Address | IrisError = b""
    own = None
    if group.index == root:
        sent = _packed(value, what)
        if isinstance(sent, bytes) and len(sent) > _LARGE:
            own = Segment.create(len(sent), "broadcast")
            own.memory[: len(sent)] = sent
            sent = own.address
    received = group.exchange_object(what, sent)[root]
    if isinstance(received, IrisError):
        raise received
    if isinstance(received, bytes):
        return pickle.loads(received)
    segment = own or Segment.open(received, f"rank {group.ranks[root]}")
    group.sync(what)  # all have opened it: the root may let go
    return pickle.loads(segment.memory)


def _packed(value: Any, what: str) -> bytes | IrisError:
    """Pickle the value. All ranks are to raise an error that is returned."""
    try:
        if isinstance(value, Tensor):
            value = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return dumps(value)
    except Exception as error:
        return IrisError(f"{what}: a {type(value).__name__} cannot be sent: {error}")


def _to_numpy(tensor: Tensor) -> "np.ndarray[Any, Any]":
    try:
        return tensor.numpy()
    except TypeError:  # numpy has no bfloat16 and no fp8; float32 holds their values exactly
        return tensor.float().numpy()
