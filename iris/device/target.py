"""The few places where Triton's interpreter, NVIDIA and AMD differ."""

import functools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import triton
import triton.language as tl
from triton.language.extra import cuda, hip
from triton.runtime.interpreter import InterpretedFunction

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# The default scope of what a peer can see. Triton 3.6 takes no plain string as a default argument.
SYSTEM = tl.constexpr("sys")

# Looks at a flag between two looks at the clock and at the abort flag.
POLLS_PER_CHECK = tl.constexpr(1 if INTERPRETED.value else 512)

_POLL_NS = 1000  # how long a look takes, about, where the GPU offers no clock in nanoseconds
_PAUSE_SECONDS = 2e-5
_AMD_TICK_NS = 10

# What follows waits in the interpreter: ``polling()`` is a context around their looks at flags,
# ``waited(ptr, epoch, mask)`` comes after the last one. See `iris.check.programs`.
observer: Any = None

_LOAD_ACQUIRE = "ld.acquire.sys.global.b32 $0, [$1];"


@tl.core.extern
def _compiled_clock(polls: Any, _semantic: Any = None) -> Any:
    if _semantic.builder.options.backend_name == "cuda":
        return cuda.globaltimer(_semantic=_semantic)
    return _semantic.mul(_semantic.cast(polls, tl.int64), _semantic.to_tensor(_POLL_NS), False)


@tl.core.extern
def _compiled_now(_semantic: Any = None) -> Any:
    if _semantic.builder.options.backend_name == "cuda":
        return cuda.globaltimer(_semantic=_semantic)
    ticks = hip.memrealtime(_semantic=_semantic)
    return _semantic.mul(ticks, _semantic.to_tensor(_AMD_TICK_NS), False)


@tl.core.extern
def _compiled_multiprocessor(_semantic: Any = None) -> Any:
    if _semantic.builder.options.backend_name == "cuda":
        return cuda.smid(_semantic=_semantic)
    return _semantic.to_tensor(-1)


@tl.core.extern
def _compiled_load_acquire(ptr: Any, mask: Any, _semantic: Any = None) -> Any:
    """One look at flags, at system scope, that is the same in every thread of the program.

    An atomic is: one thread performs it and tells the others. A plain ``ld.acquire`` is quicker,
    but each thread that holds a copy of an element loads for itself; so it serves only where no
    element has two holders (one warp, 32 lanes or more).
    """
    options = _semantic.builder.options
    one_holder = ptr.type.is_block() and ptr.type.numel % 32 == 0 and options.num_warps == 1
    if options.backend_name == "cuda" and one_holder and ptr.dtype.element_ty == tl.int32:
        return tl.inline_asm_elementwise(
            _LOAD_ACQUIRE, "=r,l", [ptr], tl.int32, is_pure=False, pack=1, _semantic=_semantic
        )
    address = _semantic.cast(ptr, tl.int64)
    zero = _semantic.cast(_semantic.sub(address, address, False), ptr.dtype.element_ty)
    return tl.atomic_add(ptr, zero, mask=mask, sem="acquire", scope="sys", _semantic=_semantic)


def _instruction(text: str, semantic: Any) -> Any:
    """An instruction without operands, in every thread; nothing moves across it."""
    return tl.inline_asm_elementwise(
        f"{text}; mov.u32 $0, $1;",
        "=r,r,~{memory}",
        [semantic.to_tensor(0)],
        tl.int32,
        is_pure=False,
        pack=1,
        _semantic=semantic,
    )


@tl.core.extern
def _compiled_together(_semantic: Any = None) -> Any:
    if _semantic.builder.options.backend_name != "cuda":
        return tl.debug_barrier(_semantic=_semantic)
    return _instruction("bar.sync 0", _semantic)


@tl.core.extern
def _compiled_fence_bulk(_semantic: Any = None) -> Any:
    if _semantic.builder.options.backend_name != "cuda":
        return None
    return _instruction("fence.proxy.async.global", _semantic)


@tl.core.extern
def _compiled_publish(ptr: Any, value: Any, _semantic: Any = None) -> Any:
    """Store to a word that the host reads, after all that this program's threads stored before.

    An atomic would do on AMD. NVIDIA GPUs may carry out one on host memory as a read and a write.
    """
    _compiled_together(_semantic=_semantic)
    if _semantic.builder.options.backend_name != "cuda":
        return tl.atomic_xchg(ptr, value, sem="release", scope="sys", _semantic=_semantic)
    _instruction("fence.acq_rel.sys", _semantic)
    return tl.store(ptr, value, _semantic=_semantic)


@tl.core.extern
def _compiled_carry_over(ptr: Any, source: Any, _semantic: Any = None) -> Any:
    """Raise the word at ``ptr`` to what the host wrote at ``source``; return what it was.

    The same in every thread, though each loads for itself: one of them performs the atomic. On what
    the host writes there may be none (see ``_compiled_publish``).
    """
    value = tl.load(source, volatile=True, _semantic=_semantic)
    return tl.atomic_max(ptr, value, sem="acq_rel", scope="sys", _semantic=_semantic)


@tl.core.extern
def _compiled_places(like: Any, _semantic: Any = None) -> Any:
    """0, 1, 2 ... in the shape of a 1-D block and, in Gluon, in its layout."""
    layout = getattr(like.type, "layout", None)
    if layout is None:
        return tl.arange(0, like.shape[0], _semantic=_semantic)
    return _semantic.arange(0, tl.core._unwrap_if_constexpr(like.shape[0]), layout)


@tl.core.extern
def _compiled_bulk_done(_semantic: Any = None) -> Any:
    return _instruction("cp.async.bulk.wait_group 0", _semantic)


def _interpreted_nothing() -> None:
    pass


def _interpreted_places(like: Any) -> Any:
    return tl.arange(0, like.shape[0])


def _interpreted_publish(ptr: Any, value: Any) -> None:
    tl.atomic_xchg(ptr, value, sem="release", scope="sys")


def _interpreted_clock(polls: Any) -> Any:
    time.sleep(_PAUSE_SECONDS)  # a waiting rank leaves its core to the rank it waits for
    return _interpreted_now()


def _interpreted_now() -> Any:
    return tl.cast(time.perf_counter_ns(), tl.int64)


def _interpreted_multiprocessor() -> Any:
    return tl.cast(-1, tl.int32)


def _polling() -> Any:
    return nullcontext() if observer is None else observer.polling()


def _interpreted_load_acquire(ptr: Any, mask: Any) -> Any:
    with _polling():
        return tl.atomic_add(ptr, 0, mask=mask, sem="acquire", scope="sys")


def _interpreted_carry_over(ptr: Any, source: Any) -> Any:
    with _polling():
        return tl.atomic_max(ptr, tl.load(source), sem="acq_rel", scope="sys")


def _interpreted_jot(ptr: Any, value: Any) -> None:
    with _polling():
        tl.store(ptr, value)


@tl.core.extern
def _compiled_waited(ptr: Any, epoch: Any, mask: Any, state: Any, _semantic: Any = None) -> Any:
    return None


def _interpreted_waited(ptr: Any, epoch: Any, mask: Any, state: Any) -> None:
    if observer is not None and state == 0:  # else some rank's wait ran out
        observer.waited(ptr, epoch, mask)


# All threads of the program meet. Unlike `tl.debug_barrier`, it does not keep Triton from
# pipelining the loop that holds it.
together = _interpreted_nothing if INTERPRETED.value else _compiled_together
# What was acquired by a wait is seen by loads through tensor descriptors too.
fence_bulk = _interpreted_nothing if INTERPRETED.value else _compiled_fence_bulk
# What this thread stored through tensor descriptors has arrived.
bulk_done = _compiled_bulk_done
places = _interpreted_places if INTERPRETED.value else _compiled_places
publish = _interpreted_publish if INTERPRETED.value else _compiled_publish
clock = _interpreted_clock if INTERPRETED.value else _compiled_clock
# Nanoseconds: of the GPU's own clock, or of the host's monotonic one. Not moved by the compiler.
now = _interpreted_now if INTERPRETED.value else _compiled_now
# The multiprocessor that the program is on; -1 where there is none, or none that can be told.
multiprocessor = _interpreted_multiprocessor if INTERPRETED.value else _compiled_multiprocessor
waited = _interpreted_waited if INTERPRETED.value else _compiled_waited
carry_over = _interpreted_carry_over if INTERPRETED.value else _compiled_carry_over
# Store what a wait says of itself.
jot = _interpreted_jot if INTERPRETED.value else tl.store
load_acquire = _interpreted_load_acquire if INTERPRETED.value else _compiled_load_acquire


def device_function(fn: Callable[..., Any]) -> Any:
    """``@triton.jit`` for a function or method that kernels call."""
    return _Interpreted(triton.jit(fn)) if INTERPRETED.value else triton.jit(fn)


def device_class(cls: type) -> Any:
    """Make a class with device functions as methods usable in kernels."""
    return cls if INTERPRETED.value else tl.core._aggregate(cls)


class _Interpreted:
    """A device function in the interpreter, called from a kernel that runs.

    Triton's own wrapper patches ``triton.language`` on each call, which takes most of the time of a
    short function, and which the kernel has done already. And it binds no methods.
    """

    def __init__(self, function: InterpretedFunction[Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function.rewrite()(*args, **kwargs)

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else functools.partial(self, instance)


@device_function
def spread(value, ptr):
    """Return ``value`` as what ``ptr`` points to: in its shape and, in Gluon, in its layout."""
    value = tl.cast(value, ptr.dtype.element_ty)
    if ptr.type.is_block():
        address = ptr.to(tl.int64)
        value = tl.where(address == address, value, value)
    return value
