"""A rank's side of a local mesh: it keeps programs, and runs them on shards of global tensors."""

import copy
import functools
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from iris.errors import IrisError, UnsupportedError
from iris.graph.types import Mesh, TensorType, chunk_sizes
from iris.runtime import context
from iris.runtime.callsite import is_users
from iris.runtime.segments import Address
from iris.runtime.shared import SharedMemory
from iris.runtime.timeline import Timeline
from iris.runtime.transport import BITS, dumps
from iris.runtime.worker import failed
from iris.spmd.decorator import SpmdFunction
from iris.spmd.mesh import mesh as make_mesh
from iris.spmd.modules import held_leaves
from iris.spmd.options import Options
from iris.spmd.profiling import Profiler
from iris.spmd.program import Program, prepare
from iris.spmd.surroundings import Settings


@dataclass(frozen=True)
class Welcome:
    """What a fresh rank is told. ``names`` is None where programs name the one axis."""

    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    heap_size: int
    memory: Address
    settings: Settings


@dataclass(frozen=True)
class Hole:
    """Where tensor number ``index`` goes in a call."""

    index: int


@dataclass(frozen=True)
class Definition:
    """A decorated function, by value."""

    mesh: Mesh
    fn: Callable[..., Any]
    options: Options
    static: tuple[str, ...]
    instance: Any


@dataclass(frozen=True)
class Binding:
    """One signature: the call with holes, and the global type of the tensor in each."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mesh: Mesh
    types: tuple[TensorType, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Request:
    """One call: which program and signature, and where its global tensors lie.

    ``definition`` and ``binding`` are pickled, and there only while the rank does not have them.
    ``outputs`` is None while the shapes of the results are not known.
    """

    program: int
    signature: int
    definition: bytes | None
    binding: bytes | None
    settings: Settings | None
    forget: tuple[int, ...]
    inputs: tuple[tuple[int, tuple[int, ...]], ...]  # offset, strides
    outputs: tuple[int, ...] | None


@dataclass(frozen=True)
class Meta:
    """A tensor of a rank's result."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Returned:
    """Results that wait on the rank for ``store``, and which arguments the program wrote to."""

    value: Any  # with Meta in place of each tensor
    written: tuple[int, ...]


# A replicated result, by number, that is not the same here as on the first rank; and in words how.
Difference = tuple[int, str]


@dataclass(frozen=True)
class _Part:
    """What this rank holds of a global tensor.

    ``pieces`` are ``(dim, start, length)`` of each split dim. ``first``: no earlier rank holds the
    same. ``copied``: several ranks hold the same.
    """

    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]
    first: bool
    copied: bool

    @classmethod
    def of(cls, type_: TensorType, mesh: Mesh, place: dict[str, int]) -> "_Part":
        """The part of the rank at ``place``."""
        pieces = []
        for dim, (size, axes) in enumerate(zip(type_.shape, type_.spec, strict=True)):
            start = 0
            for axis in axes:
                sizes = chunk_sizes(size, mesh.size(axis))
                start, size = start + sum(sizes[: place[axis]]), sizes[place[axis]]
            if axes:
                pieces.append((dim, start, size))
        others = [axis for axis, _ in mesh.axes if axis not in type_.split_axes]
        first = not any(place[axis] for axis in others)
        copied = any(mesh.size(axis) > 1 for axis in others)
        return cls(type_.shape, tuple(pieces), first, copied)

    def view(self, whole: Tensor) -> Tensor:
        """The part of ``whole``; nothing is copied."""
        for piece in self.pieces:
            whole = whole.narrow(*piece)
        return whole


@dataclass
class _Signature:
    """A signature as this rank keeps it."""

    binding: Binding
    function: SpmdFunction  # its own: ranks whose shards of two signatures are alike must agree
    instance: Any
    holes: list[tuple[int, int]]  # place among the leaves, tensor number
    leaves: list[Any]
    tree: pytree.TreeSpec
    inputs: list[_Part]
    outputs: list[_Part] = field(default_factory=list)
    program: Program | None = None  # whose results ``outputs`` are
    # Of the call in progress:
    ran: Program | None = None
    results: list[Tensor] = field(default_factory=list)
    shards: list[Tensor] = field(default_factory=list)  # in shared memory
    written: dict[int, Tensor] = field(default_factory=dict)  # new values of arguments


@dataclass
class _Host:
    """All that this rank keeps for its mesh."""

    memory: SharedMemory | None = None
    mesh: DeviceMesh | None = None
    pinned: frozenset[str] = frozenset()  # knobs that the mesh's ``env`` sets
    running: bool = False
    profiler: Profiler | None = None
    definitions: dict[int, Definition] = field(default_factory=dict)
    signatures: dict[tuple[int, int], _Signature] = field(default_factory=dict)

    def coordinate(self, mesh: Mesh) -> dict[str, int]:
        """This rank's place along each axis; ranks are laid out row-major."""
        rank, place = context.current().cur_rank, {}
        for name, size in reversed(mesh.axes):
            rank, place[name] = divmod(rank, size)
        return place


@functools.cache
def _host() -> _Host:
    return _Host()


def rank_mesh() -> DeviceMesh | None:
    """What a pickled local mesh becomes on its ranks."""
    return _host().mesh


def _task(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``fn`` stop at the caller's Ctrl-C, and describe its failure by the user's frames."""

    @functools.wraps(fn)
    def task(*args: Any) -> Any:
        host = _host()
        try:
            host.running = True
            return fn(*args)
        except BaseException as error:
            return failed(error, _frames(error), isinstance(error, KeyboardInterrupt))
        finally:
            host.running = False

    return task


def _interrupt(number: int, frame: object) -> None:
    """Stop a task; between two tasks there is nothing to stop."""
    if _host().running:
        raise KeyboardInterrupt


def _frames(error: BaseException) -> str:
    """The user's frames of an error and of what it was raised from; all, where none is theirs."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename)]
    ours = isinstance(error, IrisError)
    text = "".join(traceback.format_list(own if own or ours else frames))
    text += "\n".join(getattr(error, "__notes__", ()))
    if error.__cause__ is None or ours:
        return text
    cause = error.__cause__
    return f"{text.rstrip()}\nraised from {context.describe(cause)}\n{_frames(cause)}"


@_task
def enter(welcome: Welcome) -> None:
    """Join the world of a mesh."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    host = _host()
    knobs = welcome.settings.knobs
    host.pinned = frozenset(name for name, value in knobs if os.environ.get(name) != value)
    context.iris(welcome.heap_size)
    signal.signal(signal.SIGINT, _interrupt)
    host.memory = SharedMemory.open(welcome.memory)
    if welcome.names is not None:
        host.mesh = make_mesh(welcome.shape, welcome.names)


@_task
def run_plain(name: str, settings: Settings | None, call: bytes) -> bytes:
    """Run a plain function, and pickle its result."""
    _apply(settings)
    memory, device = _host().memory, context.current().device
    assert memory is not None
    fn, args, kwargs = memory.loads(
        call, lambda tensor, on_gpu: tensor.to(device if on_gpu else "cpu", copy=True)
    )
    result = fn(*args, **kwargs)
    try:
        return dumps(result)
    except Exception as error:
        raise UnsupportedError(
            f"{name}: its result does not travel to the caller: {error}",
            help="return tensors, numbers, text, or containers of them",
        ) from error


@_task
def run_program(request: Request) -> Returned | list[Difference] | None:
    """Run a program. Its results are stored at once where the caller knew their shapes."""
    signature = _signature(request)
    with torch.no_grad():  # the caller refused whatever requires grad
        program, tensors = _bind(request, signature)
    if program.executable is None:
        prepare(program)
    names = [value.name for value in program.graph.inputs]
    written = [names.index(name) for name, _ in program.graph.writes]
    if any(index >= len(tensors) for index in written):
        raise UnsupportedError(
            f"{program.options.name}: writes to a buffer of its module, "
            "and the caller of a local mesh has the module",
            help="pass what it writes to as an argument: that reaches the caller",
        )
    signature.written = {index: tensors[index].clone() for index in written}
    result = program([signature.written.get(i, tensor) for i, tensor in enumerate(tensors)])
    signature.ran = program
    signature.results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    if request.outputs is not None and program is signature.program:
        return _store(signature, request.outputs)
    described = pytree.tree_map_only(Tensor, lambda t: Meta(t.dtype, tuple(t.shape)), result)
    return Returned(described, tuple(written))


@_task
def store(
    program: int, signature: int, types: tuple[TensorType, ...], outputs: tuple[int, ...]
) -> list[Difference]:
    """Write the results of the last call to the caller's tensors, and remember their types."""
    host, kept = _host(), _host().signatures[program, signature]
    mesh = kept.binding.mesh
    kept.program = kept.ran
    kept.outputs = [_Part.of(type_, mesh, host.coordinate(mesh)) for type_ in types]
    return _store(kept, outputs)


@_task
def trace_program(request: Request) -> tuple[Program, Any] | None:
    """Trace a call. Rank 0 returns the program, bare, and the structure of its result."""
    with torch.no_grad():
        program, _ = _bind(request, _signature(request))
    if context.current().cur_rank != 0:
        return None
    shown = copy.copy(program)
    shown.options = replace(program.options, mesh=None)
    shown.leaves = tuple(replace(leaf, value=None) for leaf in program.leaves)
    shown.captured, shown.executable = (), None
    shown.__dict__.pop("runner", None)
    del shown.out_tree  # does not pickle without a warning
    places = list(range(len(program.outputs)))
    return shown, pytree.tree_unflatten(places, program.out_tree)


@_task
def record(tracing: bool) -> None:
    """Note what programs do from now on."""
    profiler = _host().profiler = Profiler(context.current(), tracing)
    profiler.start()


@_task
def recorded() -> Timeline:
    """Stop, and return what was noted."""
    host = _host()
    profiler, host.profiler = host.profiler, None
    return Timeline() if profiler is None else profiler.stop()


def _apply(settings: Settings | None) -> None:
    if settings is not None:
        settings.apply(_host().pinned)


def _signature(request: Request) -> _Signature:
    """Take in what is new in a request."""
    host = _host()
    _apply(request.settings)
    for number in request.forget:
        host.definitions.pop(number, None)
        for key in [key for key in host.signatures if key[0] == number]:
            del host.signatures[key]
    if request.definition is not None:
        assert host.memory is not None
        device = context.current().device
        definition: Definition = host.memory.loads(request.definition, lambda x, _: x.to(device))
        host.definitions[request.program] = definition
        place = host.coordinate(definition.mesh)
        _split_module(definition.instance, definition.mesh, place)
    if request.binding is not None:
        binding: Binding = pickle.loads(request.binding)
        signature = _keep(binding, host.definitions[request.program], host)
        host.signatures[request.program, request.signature] = signature
    return host.signatures[request.program, request.signature]


def _keep(binding: Binding, definition: Definition, host: _Host) -> _Signature:
    leaves, tree = pytree.tree_flatten((binding.args, binding.kwargs))
    holes = [(place, leaf.index) for place, leaf in enumerate(leaves) if isinstance(leaf, Hole)]
    place = host.coordinate(binding.mesh)
    parts = [_Part.of(type_, binding.mesh, place) for type_ in binding.types]
    function = SpmdFunction(definition.fn, definition.options, definition.static)
    return _Signature(binding, function, definition.instance, holes, leaves, tree, parts)


def _split_module(instance: Any, mesh: Mesh, place: dict[str, int]) -> None:
    """Leave of a module's partitioned tensors the parts that the rank at ``place`` holds."""
    for leaf in held_leaves(instance):
        if leaf.spec is not None:
            shape = tuple(leaf.value.shape)
            dims = leaf.spec.padded(len(shape))
            part = _Part.of(TensorType("f32", shape, dims), mesh, place)
            leaf.value.data = part.view(leaf.value.data).clone()


def _bind(request: Request, signature: _Signature) -> tuple[Program, list[Tensor]]:
    """The program of a call, and this rank's shards of its tensors."""
    host, binding = _host(), signature.binding
    assert host.memory is not None
    device, leaves = context.current().device, list(signature.leaves)
    places = zip(request.inputs, signature.inputs, binding.dtypes, strict=True)
    signature.shards = [
        part.view(host.memory.tensor(offset, dtype, part.shape, stride))
        for (offset, stride), part, dtype in places
    ]
    for place, index in signature.holes:
        leaves[place] = signature.shards[index].to(device)
    args, kwargs = pytree.tree_unflatten(leaves, signature.tree)
    function, instance = signature.function, signature.instance
    binder, state = function._bindings(instance)
    bound = binder.bind(args, kwargs)
    _, program = function._find(instance, binder, bound, state)
    return program, list(bound.tensors)


def _store(signature: _Signature, outputs: Sequence[int]) -> list[Difference]:
    """Write this rank's parts of results and written arguments; compare what is replicated."""
    host, world = _host(), context.current().world
    assert host.memory is not None
    writes = []
    for local, offset, part in zip(signature.results, outputs, signature.outputs, strict=True):
        whole = host.memory.tensor(offset, local.dtype, part.shape)
        writes.append((part, part.view(whole), local))
    for index, local in signature.written.items():
        writes.append((signature.inputs[index], signature.shards[index], local))
    if signature.written:
        world.sync("read the arguments")
    for part, shared, local in writes:
        if part.first:
            shared.copy_(local)
    signature.results, signature.shards, signature.written = [], [], {}
    if not any(part.copied for part, _, _ in writes):
        return []
    world.sync("store the results")
    found = [
        _difference(number, shared, local)
        for number, (part, shared, local) in enumerate(writes)
        if part.copied
    ]
    return [difference for difference in found if difference is not None]


def _difference(leaf: int, there: Tensor, here: Tensor) -> Difference | None:
    """Compare bit for bit."""
    here = here.cpu()
    unequal = _bits(here) != _bits(there)
    if not unequal.any():
        return None
    where = unequal.nonzero()[0].tolist()[: here.dim()]
    pair = " and ".join(repr(tensor[tuple(where)].item()) for tensor in (here, there))
    return leaf, (
        f"on rank {context.current().cur_rank}: {int(unequal.sum())} of {here.numel()} elements "
        f"differ from the first rank's, at {where}: {pair}"
    )


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(BITS[tensor.itemsize])
