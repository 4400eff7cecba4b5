"""The local mesh: ranks on this host for a caller that is not one of them, such as a notebook."""

import itertools
import math
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from iris.errors import IrisError, LaunchError, SpecError, UnsupportedError
from iris.graph.types import Mesh, TensorType
from iris.lower.dtypes import dtype_name
from iris.runtime.pool import Environment
from iris.runtime.session import Session
from iris.runtime.shared import SharedArena
from iris.runtime.timeline import CALLER, Event, Timeline
from iris.runtime.transport import dumps
from iris.spmd import local_rank
from iris.spmd.agreement import resolve_types
from iris.spmd.arguments import Arguments
from iris.spmd.binding import Bound, alias_key, overlaps
from iris.spmd.control import Controller
from iris.spmd.decorator import CACHED_PROGRAMS, SpmdFunction
from iris.spmd.local_checks import check_claims, check_constants, check_equal, check_grad
from iris.spmd.local_rank import Binding, Definition, Hole, Meta, Request, Returned
from iris.spmd.mesh import AbstractMesh, ProgramMesh
from iris.spmd.program import Program
from iris.spmd.specs import Leaf, axes_in, match
from iris.spmd.stages import Signature, Traced
from iris.spmd.surroundings import Settings, version_of


@dataclass(frozen=True)
class _Results:
    """How a signature's results are put together: leaves with a Meta in place of each tensor."""

    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec
    types: tuple[TensorType, ...]
    dtypes: tuple[torch.dtype, ...]
    written: tuple[int, ...]  # arguments

    def allocate(self, arena: SharedArena) -> list[Tensor]:
        pairs = zip(self.types, self.dtypes, strict=True)
        return [arena.empty(type_.shape, dtype) for type_, dtype in pairs]

    def assemble(self, tensors: Sequence[Tensor]) -> Any:
        waiting = iter(tensors)
        leaves = [next(waiting) if isinstance(leaf, Meta) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.tree)


@dataclass
class _Signature:
    number: int
    binding: Binding
    sent: bool = False
    results: _Results | None = None


@dataclass
class _Entry:
    """A decorated function (on one instance) as the ranks have it."""

    number: int
    version: object = None
    sent: bool = False
    kept: list[Tensor] = field(default_factory=list)  # what it closes over, in shared memory
    signatures: dict[object, _Signature] = field(default_factory=dict)


class LocalMesh(Controller):
    """Ranks of this host, kept alive between calls. Made by :func:`local_mesh`.

    A function decorated with ``@iris.spmd(mesh=mesh, in_specs=..., out_specs=...)`` takes and
    returns global tensors: each rank gets its shards by ``in_specs``, and results are put together
    by ``out_specs``. Tensors that the mesh returned are in shared memory and go to the ranks
    without a copy.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        names: tuple[str, ...] | None,
        session: Session,
        arena: SharedArena,
        heap_size: int,
    ) -> None:
        self.shape, self.names = shape, names
        self._session, self._arena, self._heap_size = session, arena, heap_size
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._forget: list[int] = []
        self._settings: Settings | None = None
        self._timeline: Timeline | None = None
        self._closed = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each rank; empty while none runs."""
        return self._session.pids

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank, where ``iris.current()`` is its context.

        Returns the results in rank order. Arguments and results are copied. Raises LaunchError with
        the frames of every rank that fails.

        >>> mesh.run(lambda: iris.current().get_rank())      # doctest: +SKIP
        [0, 1, 2, 3]
        """
        __tracebackhide__ = True
        name = getattr(fn, "__name__", type(fn).__name__)
        with self._lock:
            call, _kept = self._dumps(name, (fn, args, kwargs))
            told = self._changed_settings()
            return list(map(pickle.loads, self._call(name, local_rank.run_plain, name, told, call)))

    def share(self, value: Any) -> Any:
        """Return ``value`` with its tensors in memory that the ranks see: later calls copy nothing.

        For weights, which are passed again and again. Takes any tree of tensors.
        """
        self._check_open()
        with self._lock:
            put = self._arena.share
            return pytree.tree_map_only(Tensor, lambda tensor: put(tensor.detach()), value)

    @contextmanager
    def profile(self, tracing: bool = False) -> Iterator[Timeline]:
        """Record when each rank does what, step by step, until the ``with`` block ends.

        What is recorded, and what ``tracing`` adds, is said in :func:`iris.profile`.

        >>> with mesh.profile() as timeline:                 # doctest: +SKIP
        ...     mlp(x, w_up, w_down)
        >>> timeline.save("trace.json")                      # doctest: +SKIP
        """
        self._call("profile", local_rank.record, tracing)
        timeline = self._timeline = Timeline()
        try:
            yield timeline
        finally:
            self._timeline = None
            for part in self._call("profile", local_rank.recorded):
                timeline.events += part.events
                timeline.about |= part.about

    def restart(self) -> None:
        """End all ranks and start new ones. What functions kept on the old ones is lost."""
        self._check_open()
        with self._lock:
            self._session.restart()
            self._entries.clear()
            self._forget.clear()
            self._settings = None
            self._enter()

    def close(self) -> None:
        """End the ranks. Tensors that the mesh returned stay valid."""
        self._closed = True
        self._session.close()
        self._entries.clear()
        self._arena.free_dropped()

    def __enter__(self) -> "LocalMesh":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = self.names or ("ranks",)
        axes = ", ".join(f"{name}={n}" for name, n in zip(names, self.shape, strict=True))
        state = "closed" if self._closed else f"{len(self.pids)} running"
        return f"LocalMesh({axes}: {state})"

    def __reduce__(self) -> tuple[Any, ...]:
        return local_rank.rank_mesh, ()

    def call_program(
        self, function: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Split the arguments, run on the ranks, and put the results together."""
        __tracebackhide__ = True
        with self._lock:
            entry, signature, bound = self._prepare(function, instance, args, kwargs)
            inputs = [self._arena.share(tensor.detach()) for tensor in bound.tensors]
            results = signature.results
            tensors = results.allocate(self._arena) if results else None
            task = local_rank.run_program
            answers = self._send(task, function, instance, entry, signature, inputs, tensors)
            if isinstance(answers[0], Returned):
                signature.results = results = self._results(function, signature, answers)
                tensors = results.allocate(self._arena)
                where = self._offsets(tensors)
                numbers = entry.number, signature.number
                answers = self._call("store", local_rank.store, *numbers, results.types, where)
        assert results is not None
        assert tensors is not None
        differences = [difference for answer in answers for difference in answer]
        check_equal(function._options.name, len(results.types), results.written, differences)
        _write_back(function._options.name, results, bound, inputs)
        device = next((t.device for t in bound.tensors if t.is_cuda), None)
        return results.assemble([t.to(device) for t in tensors] if device else tensors)

    def trace_program(
        self, function: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Traced:
        """Trace on the ranks; the program is the one that a call would run."""
        __tracebackhide__ = True
        with self._lock:
            entry, signature, bound = self._prepare(function, instance, args, kwargs)
            inputs = [self._arena.share(tensor.detach()) for tensor in bound.tensors]
            task = local_rank.trace_program
            answers = self._send(task, function, instance, entry, signature, inputs, None)
        program, structure = answers[0]
        program.out_tree = pytree.tree_structure(structure)
        binder, _ = function._bindings(instance)
        return Traced(program, Signature(binder, bound.key, _refuse))

    def _call(self, name: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
        __tracebackhide__ = True  # a notebook shows the user's frames only
        self._check_open()
        start = time.perf_counter_ns()
        try:
            answers = self._session.call(name, fn, *args)
        except BaseException:
            self._settings = None  # perhaps not all ranks have heard
            raise
        if self._timeline is not None:
            event = Event(CALLER, f"call {name}", start, time.perf_counter_ns(), kind="call")
            self._timeline.events.append(event)
        return answers

    def _dumps(self, name: str, value: object) -> tuple[bytes, list[Tensor]]:
        try:
            return self._arena.dumps(value)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise UnsupportedError(
                f"{name}: it, or what it reads from outside, does not travel to ranks: {error}",
                help="make such an object on the ranks, inside the function",
            ) from error

    def _check_open(self) -> None:
        if self._closed:
            raise IrisError("the local mesh is closed", help="make a new one: iris.local_mesh(...)")

    def _enter(self) -> None:
        address = self._arena.segment.address
        settings = Settings.now()
        welcome = local_rank.Welcome(self.shape, self.names, self._heap_size, address, settings)
        self._call("local_mesh", local_rank.enter, welcome)

    def _changed_settings(self) -> Settings | None:
        """What programs depend on in this process, where the ranks have not heard of it."""
        now = Settings.now()
        if now == self._settings:
            return None
        self._settings = now
        return now

    def _prepare(
        self, function: SpmdFunction, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Entry, _Signature, Bound]:
        """The entry and the signature of a call, made where they are new."""
        binder, _ = function._bindings(instance)
        bound = binder.bind(args, kwargs)
        check_grad(function._options.name, bound, instance)
        entry = self._entry(function, instance)
        if len(entry.signatures) > CACHED_PROGRAMS:
            self._drop((id(function), id(instance)))
            entry = self._entry(function, instance)
        signature = entry.signatures.get(bound.key)
        if signature is None:
            binding = self._binding(function, instance, bound)
            signature = _Signature(len(entry.signatures), binding)
            entry.signatures[bound.key] = signature
        return entry, signature, bound

    def _entry(self, function: SpmdFunction, instance: Any) -> _Entry:
        """What the ranks have of a function; a new one where it, or what it reads, has changed."""
        key = id(function), id(instance)
        entry, version = self._entries.get(key), version_of(function, instance)
        if entry is not None and entry.version == version:
            return entry
        if entry is None:
            mortal = function if instance is None else instance
            weakref.finalize(mortal, self._drop, key).atexit = False
        else:
            self._drop(key)
        function._find_accesses(instance, function._bindings(instance)[1])
        entry = _Entry(next(self._numbers), version_of(function, instance))
        self._entries[key] = entry
        return entry

    def _drop(self, key: tuple[int, int]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._forget.append(entry.number)

    def _binding(self, function: SpmdFunction, instance: Any, bound: Bound) -> Binding:
        """Check the specs of a call and resolve its global types."""
        options, (binder, _) = function._options, function._bindings(instance)
        if options.out_specs is None:
            raise SpecError(
                f"{options.name}: a local mesh joins results by out_specs, and there are none",
                help="give @iris.spmd(out_specs=...) a P for each result",
            )
        mesh = self._mesh(function)
        leaves = Arguments(options, binder, bound).leaves(_places(mesh))
        check_claims(options.name, leaves)
        holes: list[Any] = [Hole(index) for index in range(len(bound.tensors))]
        args, kwargs = binder.rebuild(bound.values, holes)
        dtypes = tuple(tensor.dtype for tensor in bound.tensors)
        return Binding(args, kwargs, mesh, tuple(map(_typed, leaves)), dtypes)

    def _mesh(self, function: SpmdFunction) -> Mesh:
        """The axes of a program; a mesh without names takes the one that the specs use."""
        names = self.names
        if names is None:
            names = axes_in((function._options.in_specs, function._options.out_specs)) or ("ranks",)
            if len(names) > 1:
                raise SpecError(
                    f"{function._options.name}: specs use axes {', '.join(map(repr, names))}, "
                    f"the local mesh has one",
                    help="name the axes: iris.local_mesh((2, 2), ('dp', 'tp'))",
                )
        return Mesh(tuple(zip(names, self.shape, strict=True)))

    def _send(
        self,
        task: Callable[[Request], Any],
        function: SpmdFunction,
        instance: Any,
        entry: _Entry,
        signature: _Signature,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None,
    ) -> list[Any]:
        """Run ``task`` on every rank for one call, with what the ranks do not have yet."""
        __tracebackhide__ = True
        name = function._options.name
        definition = binding = None
        if not entry.sent:
            parts = function._fn, function._options, function._static, instance
            whole = Definition(signature.binding.mesh, *parts)
            definition, entry.kept = self._dumps(name, whole)
        if not signature.sent:
            binding = dumps(signature.binding)
        forget, self._forget = tuple(self._forget), []
        strides = [tensor.stride() for tensor in inputs]
        request = Request(
            entry.number,
            signature.number,
            definition,
            binding,
            self._changed_settings(),
            forget,
            tuple(zip(self._offsets(inputs), strides, strict=True)),
            None if outputs is None else self._offsets(outputs),
        )
        answers = self._call(name, task, request)
        entry.sent = signature.sent = True
        return answers

    def _offsets(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(self._arena.find(tensor) or 0 for tensor in tensors)

    def _results(
        self, function: SpmdFunction, signature: _Signature, answers: Sequence[Returned]
    ) -> _Results:
        """Check what the ranks returned against the out-specs, and find the global types."""
        options, first, mesh = function._options, answers[0], signature.binding.mesh
        rows = [pytree.tree_leaves(answer.value) for answer in answers]
        check_constants(options.name, rows)
        tree = pytree.tree_structure(first.value)
        numbered = pytree.tree_unflatten(list(range(len(rows[0]))), tree)
        leaves = [
            leaf
            for leaf in match(options.out_specs, numbered, mesh, "result")
            if isinstance(rows[0][leaf.value], Meta)
        ]
        check_claims(options.name, leaves)
        metas = [[row[leaf.value] for leaf in leaves] for row in rows]
        shapes = [[(dtype_name(meta.dtype), meta.shape) for meta in row] for row in metas]
        types = resolve_types(options.name, leaves, _places(mesh), shapes)
        dtypes = tuple(meta.dtype for meta in metas[0])
        return _Results(tuple(rows[0]), tree, tuple(types), dtypes, first.written)


def local_mesh(
    shape: int | Sequence[int],
    names: str | Sequence[str] | None = None,
    *,
    heap_size: int = 1 << 30,
    env: Environment = None,
) -> LocalMesh:
    """Start ranks on this host, and keep them, for programs that take and return global tensors.

    Args:
        shape: the number of ranks, or ranks along each axis.
        names: one name an axis; one axis needs none and is called as the specs call it.
        heap_size: bytes of symmetric heap on each rank.
        env: adds to the ranks' environment: a mapping, or a function from rank to mapping.

    Raises SpecError where names and shape do not fit. Ranks are CPU processes where there is no
    GPU; otherwise they take the GPUs in turn, or share one.

    >>> mesh = iris.local_mesh(4)                            # doctest: +SKIP
    >>> @iris.spmd(mesh=mesh, in_specs=P("tp"), out_specs=P())
    ... def total(x):
    ...     return iris.all_reduce(x.sum(0), "tp")
    >>> total(torch.ones(8, 2))
    tensor([8., 8.])
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    several = isinstance(names, Sequence) and not isinstance(names, str)
    axes: Any = names and (tuple(names) if several else (names,))
    if not sizes or not all(type(n) is int and n >= 1 for n in sizes):
        raise SpecError(
            f"local_mesh: shape {shape!r} has no ranks", help="every axis has at least 1"
        )
    wanted = 1 if axes is None else len(axes)
    named = all(isinstance(name, str) for name in axes or ())
    if len(sizes) != wanted or len(set(axes or ())) != len(axes or ()) or not named:
        raise SpecError(
            f"local_mesh: shape {sizes} needs {len(sizes)} different names, got {axes or ()}",
            help='write iris.local_mesh((2, 2), ("dp", "tp"))',
        )
    session = Session(math.prod(sizes), env)
    mesh = LocalMesh(sizes, axes, session, SharedArena.create(), heap_size)
    try:
        mesh._enter()
    except BaseException:
        session.restart()
        raise
    weakref.finalize(mesh, _end, session)
    return mesh


def _end(session: Session) -> None:
    with suppress(LaunchError):  # at exit, what forks and reaps ranks may be gone already
        session.close()


def _refuse(program: Program) -> None:
    raise UnsupportedError(
        f"{program.options.name}: its ranks are other processes, so it cannot be compiled here",
        help="call it, or trace, lower and compile it in a function that mesh.run runs",
    )


def _places(mesh: Mesh) -> ProgramMesh:
    sizes = tuple(n for _, n in mesh.axes)
    return ProgramMesh.of(AbstractMesh(sizes, mesh.names))


def _typed(leaf: Leaf) -> TensorType:
    assert leaf.spec is not None
    value: Tensor = leaf.value
    return TensorType(dtype_name(value.dtype), tuple(value.shape), leaf.spec.padded(value.dim()))


def _write_back(name: str, results: _Results, bound: Bound, inputs: Sequence[Tensor]) -> None:
    """Give the caller's tensors what the program wrote to their copies."""
    if results.written and overlaps(alias_key(bound.tensors)):
        raise UnsupportedError(
            f"{name}: writes to an argument, and arguments share memory",
            help="pass copies, or return the new value",
        )
    for index in results.written:
        if inputs[index].data_ptr() != bound.tensors[index].data_ptr():
            bound.tensors[index].detach().copy_(inputs[index])
