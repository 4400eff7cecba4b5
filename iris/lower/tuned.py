"""What `iris.tune` measured, kept on disk for this hardware and these versions.

A group of ranks uses its first member's file, read once: no rank chooses alone.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import triton

from iris.config import private_folder
from iris.errors import ConfigError
from iris.graph.nodes import Node
from iris.graph.types import Mesh, TensorType
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


def of_group(ctx: Iris, group: Group) -> Times:
    """The group's measurements. Collective over the group the first time."""
    if _KEPT not in group.kept:
        mine = _read(_path(ctx)) if group.index == 0 else {}
        group.kept[_KEPT] = group.exchange_object("what iris.tune measured", mine)[0]
    times: Times = group.kept[_KEPT]
    return times


def save(ctx: Iris, group: Group) -> None:
    """Add the group's measurements to the file; its first member writes."""
    if group.index == 0:
        path = _path(ctx)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".json")
        with os.fdopen(handle, "w") as file:
            json.dump(_read(path) | group.kept[_KEPT], file, indent=1)
        os.replace(temporary, path)


def _path(ctx: Iris) -> Path:
    """The file of this hardware, as many ranks share it, and these versions."""
    on_gpu = ctx.device.type == "cuda"
    device = torch.cuda.get_device_name(ctx.device) if on_gpu else "CPU ranks"
    units = (ctx.get_cu_count(), ctx.get_usable_units(), ctx.ranks_on_device)
    text = repr((device, units, VERSION, torch.__version__, triton.__version__))
    return private_folder("tuned") / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> Times:
    """The file's measurements; none, and a warning, where it is not what ``save`` writes."""
    try:
        found = json.loads(path.read_text())
        return {str(k): {str(a): float(t) for a, t in v.items()} for k, v in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ConfigError, ValueError, TypeError, AttributeError) as error:
        _log.warning("%s is ignored: %s", path, error)
        return {}
