"""Makes ``backend="iris"`` known to torch.compile, and our own code left alone by it, without
importing Dynamo, which takes a second to load.

An installed iris is also found by its entry point in the group ``torch_dynamo_backends``; this
serves a checkout on ``PYTHONPATH``.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from typing import Any

ENTRY = EntryPoint("iris", "iris.spmd.backend:compile_fx", "torch_dynamo_backends")
# Calls into these break a graph; models and layers are compiled like the user's own.
LEFT_ALONE = ("iris.spmd", "iris.lower", "iris.runtime", "iris.graph", "iris.ops", "iris.device")


def _enter(registry: Any) -> None:
    getattr(registry, "_BACKENDS", {}).setdefault(ENTRY.name, ENTRY)


def _leave_alone(rules: Any) -> None:
    for name in LEFT_ALONE:
        rules.add(name)


WAITING = {"torch._dynamo.backends.registry": _enter, "torch._dynamo.trace_rules": _leave_alone}


class _Announcer(MetaPathFinder):
    """Waits for modules of Dynamo to be imported, and tells each what it should know."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        tell = WAITING.get(name)
        if tell is None or name in sys.modules:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        loader: Any = spec.loader if spec else None
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                tell(module)

            loader.exec_module = exec_module
        return spec


def announce() -> None:
    """Tell Dynamo, now or when it is loaded."""
    for name, tell in WAITING.items():
        if name in sys.modules:
            tell(sys.modules[name])
    if not any(isinstance(finder, _Announcer) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Announcer())
