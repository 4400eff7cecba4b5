"""Makes ``backend="iris"`` known to torch.compile, without importing it: Dynamo takes a second to
load.

An installed iris is also found by its entry point in the group ``torch_dynamo_backends``; this
serves a checkout on ``PYTHONPATH``.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from typing import Any

REGISTRY = "torch._dynamo.backends.registry"
ENTRY = EntryPoint("iris", "iris.spmd.backend:compile_fx", "torch_dynamo_backends")


class _Announcer(MetaPathFinder):
    """Waits for Dynamo's registry to be imported, enters iris there, and goes."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader if spec else None
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                _enter(module)

            loader.exec_module = exec_module
        return spec


def _enter(registry: Any) -> None:
    getattr(registry, "_BACKENDS", {}).setdefault(ENTRY.name, ENTRY)


def announce() -> None:
    """Enter iris into Dynamo's registry, now or when it is loaded."""
    if REGISTRY in sys.modules:
        _enter(sys.modules[REGISTRY])
    elif not any(isinstance(finder, _Announcer) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Announcer())
