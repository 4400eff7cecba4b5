"""``@iris.spmd``: a function over sharded tensors, traced once a signature, then replayed."""

import copy
import functools
import inspect
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame

from iris import config
from iris.errors import CollectiveMismatchError, ConfigError, SpecError
from iris.lower.choices import StageConfig
from iris.runtime.context import current
from iris.spmd.binding import Binder, Bound, alias_key
from iris.spmd.context import TraceContext, tracing
from iris.spmd.control import Controller
from iris.spmd.guards import Access, find_accesses, instance_key, key_of, modes
from iris.spmd.hits import MOST_HITS, Hit
from iris.spmd.mesh import AbstractMesh
from iris.spmd.misses import Misses
from iris.spmd.modules import buffers_of, decorate_module, held_leaves, is_module
from iris.spmd.options import Options
from iris.spmd.statics import Same

if TYPE_CHECKING:
    from iris.spmd.explain import Explanation
    from iris.spmd.program import Program
    from iris.spmd.stages import Traced

CACHED_PROGRAMS = 64
LOWERINGS = ("auto", "torch", "triton")
OUTPUTS = ("fresh", "reuse")


@dataclass
class _State:
    """Programs of one function, or of a method on one instance, and what they read outside."""

    accesses: dict[str, Access] = field(default_factory=dict)
    programs: "OrderedDict[object, Program]" = field(default_factory=OrderedDict)
    writing: set[object] = field(default_factory=set)  # keys whose programs write to arguments
    variants: dict[object, "list[Program]"] = field(
        default_factory=dict
    )  # by key: NOTE [Same shard]
    signatures: dict[tuple[object, ...], None] = field(default_factory=dict)
    doubtful: bool = False  # some rank cannot tell two of its sizes apart
    misses: Misses = field(default_factory=Misses)
    hits: "list[Hit]" = field(default_factory=list)  # the newest first


class SpmdFunction:
    """A decorated function; see :func:`spmd`. Calls are collective over the program's mesh."""

    def __init__(
        self, fn: Callable[..., Any], options: Options, static_argnames: Sequence[str] = ()
    ) -> None:
        functools.update_wrapper(self, fn)
        self.__wrapped_spmd__ = fn
        self._fn = fn
        self._options = options
        self._static = tuple(static_argnames)
        self._binder: Binder | None = None
        self._method_binder: Binder | None = None
        self._state = _State()
        self._states: dict[int, tuple[weakref.ref[Any], _State]] = {}

    def __getstate__(self) -> tuple[Any, ...]:
        """What another process needs of it: programs stay behind."""
        return self._fn, self._options, self._static

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        SpmdFunction.__init__(self, *state)

    @property
    def programs(self) -> "tuple[Program, ...]":
        """Every program traced and still kept, the oldest first; not those of methods."""
        return tuple(self._state.programs.values())

    def fresh(self) -> "SpmdFunction":
        """The same function without any program."""
        return SpmdFunction(*self.__getstate__())

    def forget(self) -> None:
        """Drop every program: the next call traces again. All ranks do so together."""
        self._state, self._states = _State(), {}

    def __get__(self, instance: Any, owner: type | None = None) -> "SpmdFunction | SpmdMethod":
        return self if instance is None else SpmdMethod(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # a notebook shows the user's frames only
        hits = self._state.hits
        if hits and not kwargs and tracing() is None and get_eval_frame_callback() is None:
            for hit in hits:
                if hit.takes(args):
                    return hit.program(args)
        return self._call(None, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> "Traced":
        """Trace a call without running it. Collective, like a call."""
        return self._trace(None, args, kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> "Explanation":
        """Every stage of the call's program, its algorithm and why, and what was not fused and why
        not.
        """
        return self._trace(None, args, kwargs).lower().explain()

    def _call(self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        compiling = set_eval_frame(None)  # a torch.compile around the call is not meant
        try:
            return self._run_or_nest(instance, args, kwargs)
        finally:
            set_eval_frame(compiling)

    def _run_or_nest(self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        outer = tracing()
        if outer is not None:
            return self._nested(outer, instance, args, kwargs)
        if isinstance(self._options.mesh, Controller):
            return self._options.mesh.call_program(self, instance, args, kwargs)
        binder, state = self._bindings(instance)
        bound = binder.bind(args, kwargs)
        try:
            for hit in state.hits:
                if hit.fits(bound, instance):
                    return hit.program(bound.tensors)
            return self._run(self._find(instance, binder, bound, state), instance, bound, state)
        except CollectiveMismatchError as error:
            from iris.spmd.agreement import one_rank_retraces

            if not one_rank_retraces(error, self._options.name):
                raise
        return self._run(self._compile(instance, binder, bound, state), instance, bound, state)

    def _run(
        self, found: "tuple[object, Program]", instance: Any, bound: Bound, state: _State
    ) -> Any:
        """A call that is not like the last ones, which it joins."""
        from iris.spmd.program import prepare  # brings in the tracer, which is slow to import

        key, program = found
        if state.doubtful:
            program.meet()
        prepare(program)
        result = program(bound.tensors)
        state.hits = [hit for hit in state.hits if hit.key != key][: MOST_HITS - 1]
        if not (state.doubtful and program.meets):
            state.hits.insert(0, Hit(key, program, bound, state.accesses.values(), instance))
        return result

    def _nested(
        self, outer: TraceContext, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call inside another trace: part of that program."""
        binder, state = self._bindings(instance)
        with torch._C.DisableTorchFunction():  # metadata only
            bound = binder.bind(args, kwargs)
        key = self._nested_key(instance, bound, state)
        if key not in outer.signatures:
            self._find_accesses(instance, state)
            key = self._nested_key(instance, bound, state)
        from iris.spmd.inlining import call_inline

        return call_inline(self._function(instance), binder, bound, key, outer)

    def _nested_key(self, instance: Any, bound: Bound, state: _State) -> object:
        outside = tuple(key_of(access) for access in state.accesses.values())
        return (id(self), bound.key, outside, instance_key(instance))

    def _function(self, instance: Any) -> Callable[..., Any]:
        return self._fn if instance is None else types.MethodType(self._fn, instance)

    def _find_accesses(self, instance: Any, state: _State) -> None:
        """Look again for what the function reads from outside: its callees may have changed."""
        function = inspect.unwrap(self._fn)
        if isinstance(function, types.FunctionType):
            for access in find_accesses(function, instance):
                state.accesses.setdefault(f"{id(access.space)} {access.text}", access)

    def _trace(self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Traced":
        if isinstance(self._options.mesh, Controller):
            mesh: Any = self._options.mesh
            return mesh.trace_program(self, instance, args, kwargs)  # type: ignore[no-any-return]
        binder, state = self._bindings(instance)
        bound = binder.bind(args, kwargs)
        _, program = self._find(instance, binder, bound, state, meet=True)
        from iris.spmd.program import prepare
        from iris.spmd.stages import Signature, Traced

        return Traced(program, Signature(binder, bound.key, prepare))

    def _find(
        self, instance: Any, binder: Binder, bound: Bound, state: _State, meet: bool = False
    ) -> "tuple[object, Program]":
        """The program of a call. With ``meet`` ranks agree on it: see NOTE [Same shard]."""
        key = self._key(instance, bound, state)
        program = state.programs.get(key)
        if program is None or (meet and program.sizes_differ):
            key, program = self._compile(instance, binder, bound, state)
        state.programs.move_to_end(key)
        return key, program

    def _compile(
        self, instance: Any, binder: Binder, bound: Bound, state: _State
    ) -> "tuple[object, Program]":
        fn = self._function(instance)
        known = len(state.accesses)
        self._find_accesses(instance, state)
        if len(state.accesses) > known:  # every key is longer now
            state.hits.clear()
        check_lowering(self._options.lowering or config.lowering())
        held = held_leaves(instance)
        labels = binder.labels(bound.values)
        state.misses.note(self._options.name, labels, bound.key, state.signatures)
        state.signatures[bound.key] = None
        if len(state.signatures) > CACHED_PROGRAMS:
            state.signatures.pop(next(iter(state.signatures)))
        watched = tuple(state.accesses.values())
        from iris.spmd.arguments import Arguments
        from iris.spmd.compiling import Compiler

        variants = state.variants.setdefault(self._key(instance, bound, state), [])
        claimed = [leaf for leaf in held if leaf.spec is not None]
        arguments = Arguments(self._options, binder, bound, claimed, buffers_of(instance))
        compiler = Compiler(fn, arguments, watched, variants)
        program = compiler.run()
        if compiler.doubtful and not state.doubtful:
            state.doubtful = True
            state.hits.clear()
        if program not in variants:
            variants.append(program)
        base = self._key(instance, bound, state, aliases=False)
        if program.graph.writes:
            state.writing.add(base)
        key = self._key(instance, bound, state)
        state.programs[key] = program
        for hit in reversed(state.hits):
            if hit.key in state.programs:
                state.programs.move_to_end(hit.key)
        state.programs.move_to_end(key)
        while len(state.programs) > CACHED_PROGRAMS:
            old, _ = state.programs.popitem(last=False)
            state.variants.pop(old, None)
            state.hits = [hit for hit in state.hits if hit.key != old]
        return key, program

    def _bindings(self, instance: Any) -> tuple[Binder, _State]:
        if instance is None:
            if self._binder is None:
                self._binder = Binder(self._fn, self._options.name, self._static, skip=0)
            return self._binder, self._state
        if self._method_binder is None:
            self._method_binder = Binder(self._fn, self._options.name, self._static, skip=1)
        found = self._states.get(id(instance))
        if found is None or found[0]() is not instance:
            number = id(instance)
            reference = weakref.ref(instance, lambda _: self._states.pop(number, None))
            found = self._states[number] = (reference, _State())
        return self._method_binder, found[1]

    def _key(self, instance: Any, bound: Bound, state: _State, aliases: bool = True) -> object:
        outside = tuple(key_of(access) for access in state.accesses.values())
        mesh = self._options.mesh
        where = mesh if isinstance(mesh, AbstractMesh) else Same(current())
        key = (bound.key, outside, where, modes(), instance_key(instance))
        if aliases and key in state.writing:
            return (key, alias_key(bound.tensors))
        return key


class SpmdMethod:
    """A decorated method bound to its instance."""

    def __init__(self, function: SpmdFunction, instance: Any) -> None:
        self._function, self._instance = function, instance
        self.__wrapped_spmd__ = types.MethodType(function._fn, instance)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._function, self._instance

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        SpmdMethod.__init__(self, *state)

    @property
    def programs(self) -> "tuple[Program, ...]":
        """Every program traced for this instance and still kept, the oldest first."""
        return tuple(self._function._bindings(self._instance)[1].programs.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> "SpmdMethod":
        return SpmdMethod(self._function, copy.deepcopy(self._instance, memo))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return self._function._call(self._instance, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> "Traced":
        """See :meth:`SpmdFunction.trace`."""
        return self._function._trace(self._instance, args, kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> "Explanation":
        """See :meth:`SpmdFunction.explain`."""
        return self.trace(*args, **kwargs).lower().explain()


def check_lowering(name: str) -> None:
    if name not in LOWERINGS:
        raise ConfigError(f"lowering {name!r} is not one of {', '.join(LOWERINGS)}")


@overload
def spmd(fn: Callable[..., Any], /) -> SpmdFunction: ...
@overload
def spmd(
    *,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnames: Sequence[str] = (),
    lowering: str | None = None,
    fuse: bool = True,
    replay: bool = True,
    outputs: str = "fresh",
    config: StageConfig | str | None = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], SpmdFunction]: ...
def spmd(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnames: Sequence[str] = (),
    lowering: str | None = None,
    fuse: bool = True,
    replay: bool = True,
    outputs: str = "fresh",
    config: StageConfig | str | None = None,
    name: str | None = None,
) -> SpmdFunction | Callable[[Callable[..., Any]], SpmdFunction]:
    """Make a function over sharded tensors one program: traced, fused, compiled and replayed.

    Of a torch module, or a class of them, ``forward`` becomes the program, and the decorator
    returns the module or class itself. Its parameters and buffers are inputs by reference: a call
    sees whatever they are then.

    Every rank calls the function with its own shards. The first call of a signature traces it;
    later calls replay. A call is collective: all ranks of the mesh make the same calls in the same
    order.

    Args:
        mesh: a ``DeviceMesh`` (`iris.mesh`), an `AbstractMesh`, or an `iris.local_mesh`, with
            which the caller passes and gets global tensors; None is all ranks as one axis.
        in_specs: a `P` (or DTensor placements) for each parameter, or a tree of them; None claims
            nothing. A DTensor brings its own; the function gets its local part.
        out_specs: the same for the result; a result that does not fit is an error.
        static_argnames: parameters taken as constants, compared by value.
        lowering: "torch" | "triton" | "auto"; None reads ``IRIS_LOWERING``.
        fuse: False keeps every collective apart.
        replay: False runs a program on a GPU node by node, without a CUDA graph.
        outputs: "fresh" returns new tensors; "reuse" returns the same ones at every call of a
            signature on a GPU, which the next call overwrites.
        config: an `iris.StageConfig` or an algorithm's name, in place of the cost model's choice.
        name: how messages call the program; the function's name by default.

    Gradients go back through a call whose arguments or parameters require grad, by a program of
    their own; see docs/concepts/programs.md for whose gradient it is. A call raises one of
    `iris.errors`, the same on all ranks; see docs/errors.md.

    >>> total = iris.spmd(in_specs=P("tp"), out_specs=P())(add_up)          # doctest: +SKIP
    """
    if lowering is not None:
        check_lowering(lowering)
    if outputs not in OUTPUTS:
        raise ConfigError(f"outputs {outputs!r} is not one of {', '.join(OUTPUTS)}")
    stages = StageConfig.of(config)

    def wrap(function: Callable[..., Any], title: str) -> SpmdFunction:
        options = Options(
            name or title, mesh, in_specs, out_specs, lowering, fuse, replay, outputs, stages
        )
        return SpmdFunction(function, options, static_argnames)

    decorate = functools.partial(_decorated, wrap)
    return decorate if fn is None else decorate(fn)


def _decorated(wrap: Callable[[Callable[..., Any], str], SpmdFunction], function: Any) -> Any:
    if not callable(function):
        raise SpecError(f"@iris.spmd decorates a function, not a {type(function).__name__}")
    if is_module(function):
        return decorate_module(function, wrap)
    return wrap(function, getattr(function, "__name__", type(function).__name__))
