"""iris: declarative SPMD programs for PyTorch.

Decorate a function over sharded tensors with ``@iris.spmd``; it is traced into a small dataflow
graph, fused into stages that compute and communicate at once, and replayed. ``iris.iris()`` gives
the symmetric heap underneath.
"""

from iris.runtime import interpreter as _interpreter

_interpreter.choose()  # before anything imports triton

import importlib  # noqa: E402
from typing import Any  # noqa: E402

from iris.config import knobs as knobs  # noqa: E402
from iris.errors import (  # noqa: E402
    CheckError as CheckError,
    CollectiveMismatchError as CollectiveMismatchError,
    ConfigError as ConfigError,
    GraphError as GraphError,
    HeapExhaustedError as HeapExhaustedError,
    IrisError as IrisError,
    LaunchError as LaunchError,
    PeerError as PeerError,
    SpecError as SpecError,
    TimeoutError as TimeoutError,
    TraceError as TraceError,
    TypeRuleError as TypeRuleError,
    UnsupportedError as UnsupportedError,
)
from iris.logging import (  # noqa: E402
    DEBUG as DEBUG,
    ERROR as ERROR,
    INFO as INFO,
    WARNING as WARNING,
    set_logger_level as set_logger_level,
)
from iris.lower.choices import StageConfig as StageConfig  # noqa: E402
from iris.runtime.benching import do_bench as do_bench  # noqa: E402
from iris.runtime.context import (  # noqa: E402
    Iris as Iris,
    current as current,
    iris as iris,
    synchronize as synchronize,
)
from iris.runtime.launch import launch as launch  # noqa: E402
from iris.spmd.announce import announce as _announce  # noqa: E402
from iris.spmd.collectives import (  # noqa: E402
    all_gather as all_gather,
    all_reduce as all_reduce,
    all_to_all as all_to_all,
    axis_index as axis_index,
    axis_size as axis_size,
    broadcast as broadcast,
    ppermute as ppermute,
    reduce_scatter as reduce_scatter,
)
from iris.spmd.decorator import spmd as spmd  # noqa: E402
from iris.spmd.mesh import AbstractMesh as AbstractMesh, mesh as mesh  # noqa: E402
from iris.spmd.namespaces import Ccl, Ops  # noqa: E402
from iris.spmd.specs import P as P  # noqa: E402

__version__ = "0.1.0"

_announce()

# The class's own module lies below the programs that these two are made of.
Iris.ops = property(Ops, doc=Ops.__doc__)  # type: ignore[attr-defined]
Iris.ccl = property(Ccl, doc=Ccl.__doc__)  # type: ignore[attr-defined]

_LAZY = {
    **dict.fromkeys(("load", "store", "get", "put", "copy", "translate"), "iris.device.ops"),
    **dict.fromkeys(
        (
            f"atomic_{name}"
            for name in ("add", "sub", "cas", "xchg", "and", "or", "xor", "min", "max")
        ),
        "iris.device.atomics",
    ),
    **dict.fromkeys(("signal", "wait"), "iris.device.signals"),
    "DeviceContext": "iris.device.context",
    "quiet": "iris.device.copy_engine",
    "draw": "iris.graph.draw",
    "local_mesh": "iris.spmd.local",
    "explain": "iris.spmd.summary",
    "parallelize": "iris.hf",
    "profile": "iris.spmd.profiling",
    "tune": "iris.spmd.tuning",
    **dict.fromkeys(("Provider", "TorchSymmetricMemory"), "iris.runtime.providers"),
}


def __getattr__(name: str) -> Any:
    """Names whose modules are slow to import; ``iris.nn`` and ``iris.gluon`` too."""
    if name in ("nn", "gluon"):
        return importlib.import_module(f"iris.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'iris' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
