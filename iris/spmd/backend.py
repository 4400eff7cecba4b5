"""``torch.compile(model, backend="iris")``: Dynamo and AOTAutograd in front, programs behind.

AOTAutograd gives forward and backward as graphs of ATen ops and functional collectives, of plain
tensors: DTensors are their shards by then. Each such graph becomes one program (`iris.spmd`), which
is traced for each size that comes; sizes are rounded up where that changes no result
(`iris.spmd.buckets`).
"""

import functools
import itertools
import os
import re
import types
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from iris.errors import ConfigError, UnsupportedError
from iris.graph.types import Mesh
from iris.runtime.callsite import is_users
from iris.runtime.context import current
from iris.spmd.buckets import padding_of
from iris.spmd.context import tracing
from iris.spmd.decorator import SpmdFunction
from iris.spmd.mesh import ProgramMesh
from iris.spmd.options import Options

OPTIONS = ("mesh", "lowering", "fuse", "replay")
FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def compile_fx(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """The backend itself, ``torch.compile(model, backend="iris")``: what Dynamo calls with one
    graph.

    Collectives are those of ``torch.distributed._functional_collectives``, as DTensor and
    ``parallelize_module`` make them. Every rank compiles and calls the same model. Of the options
    of `iris.spmd` it takes mesh, lowering, fuse and replay:
    ``torch.compile(..., options={"lowering": "triton"})``.

    Raises, at the first call, ConfigError for another option, and UnsupportedError for collectives
    over groups of which no DeviceMesh is known.

    >>> model = torch.compile(parallelize_module(model, mesh), backend="iris")  # doctest: +SKIP
    """
    given = options.get("options") or {}
    unknown = sorted(set(given) - set(OPTIONS))
    if unknown:
        raise ConfigError(f"option {unknown[0]!r} is not one of {', '.join(OPTIONS)}")
    return _compile(module, inputs, Options("compiled", **given))


def compile_module(module: torch.nn.Module, options: Options) -> Any:
    """A forward method for one ``module`` that holds DTensors: compiled, its programs run as
    ``options`` say.
    """
    options = replace(options, name=type(module).__name__, in_specs=None, out_specs=None)
    backend = functools.partial(_compile, options=options)
    return torch.compile(types.MethodType(type(module).forward, module), backend=backend)


def _compile(module: torch.fx.GraphModule, inputs: Sequence[Any], options: Options) -> Any:
    mesh = options.mesh or next(_meshes(inputs), None)

    def compiler(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        where = mesh or _mesh_of_groups(graph.graph)
        program = Compiled(graph, replace(options, mesh=where, alike=False))
        COMPILED.add(program)
        return make_boxed_func(program)

    return aot_autograd(fw_compiler=compiler)(module, inputs)


def _meshes(inputs: Sequence[Any]) -> Iterator[ProgramMesh]:
    """Meshes among the inputs of a graph: given as such, or those of DTensors."""
    for value in inputs:
        mesh = value if isinstance(value, DeviceMesh) else getattr(value, "device_mesh", None)
        if mesh is not None:
            names = mesh.mesh_dim_names or tuple(f"dim{n}" for n in range(mesh.ndim))
            shape = Mesh(tuple(zip(names, map(int, mesh.mesh.shape), strict=True)))
            place = tuple(zip(names, mesh.get_coordinate() or (), strict=True))
            yield ProgramMesh(shape, tuple(mesh.mesh.flatten().tolist()), place)


class Compiled:
    """One graph of AOTAutograd as a program; ``program`` is the decorated function, ``number`` the
    order in which graphs were compiled.
    """

    def __init__(self, module: torch.fx.GraphModule, options: Options) -> None:
        self.module, self.padding = module, padding_of(module.graph)
        self.number = next(_NUMBERS)
        self.program = SpmdFunction(self._replay, options)
        self._read = [bool(node.users) for node in module.graph.find_nodes(op="placeholder")]
        self._opaque: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> Any:
        return self.padding(self._run, args) if self.padding else self._run(*args)

    def _run(self, *args: Any) -> Any:
        """Numbers and tensors are the program's arguments; meshes and groups are passed by."""
        given = [
            arg if read and isinstance(arg, torch.Tensor | int | float) else None
            for arg, read in zip(args, self._read, strict=True)
        ]
        self._opaque = tuple(
            arg if own is None else None for arg, own in zip(args, given, strict=True)
        )
        return self.program(given)

    def _replay(self, args: Sequence[Any]) -> Any:
        pairs = zip(args, self._opaque, strict=True)
        return _Lines(self.module).run(*(b if a is None else a for a, b in pairs))


_NUMBERS = itertools.count()
COMPILED: "weakref.WeakSet[Compiled]" = weakref.WeakSet()
"""Every graph compiled in this process that is still in use, for `iris.explain`."""


class _Lines(torch.fx.Interpreter):
    """Runs a graph and tells the trace which of the user's lines each node came from."""

    def run_node(self, n: torch.fx.Node) -> Any:
        trace = tracing()
        if trace is not None:
            frames = FRAME.findall(n.stack_trace or "")
            own = [f"{os.path.basename(path)}:{line}" for path, line in frames if is_users(path)]
            trace.recorder.loc = own[-1] if own else ""
        return super().run_node(n)


def _mesh_of_groups(graph: torch.fx.Graph) -> ProgramMesh | None:
    """The one group that the collectives of ``graph`` run over, as a mesh; None is all ranks."""
    names = {
        node.args[-1]
        for node in graph.nodes
        if getattr(node.target, "namespace", "") == "_c10d_functional" and len(node.args) > 1
    }
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    groups = {tuple(torch.distributed.get_process_group_ranks(resolve(name))) for name in names}
    if len(groups) > 1:
        raise UnsupportedError(
            f"compiled: collectives over {len(groups)} groups of ranks, and no mesh is known",
            help="make the groups by one DeviceMesh, and pass DTensors of it",
        )
    return ProgramMesh.of(current().group(groups.pop())) if groups else None
