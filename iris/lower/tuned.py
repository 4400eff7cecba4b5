"""What `iris.tune` and `iris.bench profile` measured, kept on disk for this hardware, as many
ranks share it, and these versions.

A group of ranks uses its first member's files, read once: no rank chooses alone.
"""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from iris.config import private_folder, write_private
from iris.errors import ConfigError
from iris.graph.nodes import Node
from iris.graph.types import Mesh, TensorType
from iris.lower.cost import Profile
from iris.runtime.context import Iris
from iris.runtime.groups import Group

# Microseconds by stage (its ``text_of``) and by algorithm.
Times = dict[str, dict[str, float]]

VERSION = 2  # of the kernels: what older ones took says nothing
_log = logging.getLogger("iris")
_KEPT = "tuned"


def text_of(stage: Node, types: Mapping[str, TensorType], mesh: Mesh) -> str:
    """What decides how long a stage takes: its operators, and local shapes of what they read."""
    inside = {value.name for node in stage.body for value in node.outputs}
    reads = [name for name in stage.uses if name not in inside]
    shapes = [
        f"{types[name].dtype}{[*types[name].local_shape(mesh, mesh.origin)]}" for name in reads
    ]
    return f"{' '.join(node.op for node in stage.body)} of {' '.join(shapes)} over {mesh}"


@dataclass(frozen=True)
class Measured:
    """What is known: times of stages, and what a rank has of its device if that was measured."""

    times: Times
    profile: Profile | None = None


def of_group(ctx: Iris, group: Group) -> Measured:
    """The group's measurements. Collective over the group the first time."""
    if _KEPT not in group.kept:
        mine = Measured({})
        if group.index == 0:
            mine = Measured(
                _read(_path(ctx, "tuned"), _times, {}), _read(_path(ctx, "profile"), _profile, None)
            )
        group.kept[_KEPT] = group.exchange_object("what was measured here", mine)[0]
    found: Measured = group.kept[_KEPT]
    return found


def save(ctx: Iris, group: Group) -> None:
    """Add the group's measurements to the file; its first member writes."""
    if group.index == 0:
        path = _path(ctx, "tuned")
        known = _read(path, _times, {}) | group.kept[_KEPT].times
        write_private(path, json.dumps(known, indent=1))


def save_profile(ctx: Iris, profile: Profile) -> None:
    """Keep what was measured of the device, for this rank's next programs and for later runs.

    Every rank calls it with the same profile; the world's first writes.
    """
    ctx.world.kept.pop(_KEPT, None)
    if ctx.cur_rank == 0:
        write_private(_path(ctx, "profile"), json.dumps(asdict(profile), indent=1))
    ctx.barrier()


def _path(ctx: Iris, what: str) -> Path:
    """The file of this hardware, as many ranks share it, and these versions."""
    import triton  # which a program of torch ops does not need

    on_gpu = ctx.device.type == "cuda"
    device = torch.cuda.get_device_name(ctx.device) if on_gpu else "CPU ranks"
    units = (ctx.get_cu_count(), ctx.get_usable_units(), ctx.ranks_on_device)
    text = repr((device, units, VERSION, torch.__version__, triton.__version__))
    return private_folder(what) / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _read(path: Path, check: Callable[[Any], Any], none: Any) -> Any:
    """What a file has; ``none``, and a warning, where it is another user's or not as written."""
    try:
        with path.open() as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise ConfigError("it belongs to another user")
            return check(json.load(file))
    except FileNotFoundError:
        return none
    except Exception as error:  # there may be anything in it
        _log.warning("%s is ignored: %s", path, error)
        return none


def _times(found: Any) -> Times:
    return {str(k): {str(a): float(t) for a, t in v.items()} for k, v in found.items()}


def _profile(found: Any) -> Profile:
    rates = {int(size): float(rate) for size, rate in found["rates"].items()}
    profile = Profile(**found | {"rates": rates})
    rest = {name: number for name, number in found.items() if name not in ("name", "rates")}
    for name, number in (rest | {f"rate of {size}": rate for size, rate in rates.items()}).items():
        if not (math.isfinite(number) and number >= 0 and (number or name == "straggle")):
            raise ValueError(f"{name} is {number}")
    if set(found) != set(asdict(profile)) or set(rates) != {1, 2, 4}:
        raise ValueError("parts of a profile are missing")
    return profile
