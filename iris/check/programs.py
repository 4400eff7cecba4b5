"""Hooks into Triton's interpreter: accesses are noted, and programs of a launch take turns.

Triton's own loop runs one program after the other, so the first takes all work and nothing is
ordered between programs. Here a few are under way at a time, and change at every atomic.
"""

import contextvars
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
from triton._C.libtriton import ir
from triton.runtime import interpreter

from iris.check.log import HOST, LOOK, READ, WRITE
from iris.check.recorder import Recorder
from iris.device import target

_RESIDENT = 4  # programs under way at a time
_ACQUIRES = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)

_builder = interpreter.interpreter_builder


class Hooks:
    """While installed, every launch in this process is noted by ``recorder``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._turns: _Turns | None = None
        self._noted = True
        self._executor = interpreter.GridExecutor
        self._plain = {name: getattr(_builder, name) for name in _HOOKED if hasattr(_builder, name)}

    def install(self) -> None:
        """Begin."""
        for name in self._plain:
            setattr(_builder, name, getattr(self, f"_{name}"))
        interpreter.GridExecutor = self._launch
        target.observer = self

    def remove(self) -> None:
        """End."""
        for name in self._plain:
            delattr(_builder, name)
        interpreter.GridExecutor = self._executor
        target.observer = None

    def waited(self, pointer: Any, epoch: Any, mask: Any) -> None:
        """A wait has ended (see `iris.device.target.observer`)."""
        self._recorder.waited(pointer, epoch, mask)

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Around the looks of a wait, which do not count."""
        with self._recorder.silence():
            yield
        self._switch()

    def _switch(self) -> None:
        if self._turns is not None and not self._recorder.muted:
            self._turns.switch()

    def _launch(self, fn: Callable[..., Any], *rest: Any) -> Callable[..., None]:
        executor = self._executor(fn, *rest)
        executor.fn = _Together(fn, self._run)

        def launch(*args: Any, **options: Any) -> None:
            self._noted = not self._recorder.muted
            with self._recorder.silence():  # the interpreter copies arguments onto themselves
                executor(*args, **options)

        return launch

    def _run(self, fn: Callable[..., Any], args: dict[str, Any]) -> None:
        """Run all programs of the grid that the interpreter is about to go through."""
        places = list(product(*map(range, _builder.grid_dim)))
        self._recorder.muted = not self._noted
        self._recorder.fork(len(places), fn.__name__)
        self._turns = _Turns(self._recorder)
        try:
            self._turns.run([(place, lambda: fn(**args)) for place in places])
        finally:
            self._turns = None
            self._recorder.slot = HOST
            self._recorder.join()
            self._recorder.muted = True

    def _create_masked_load(self, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        result = self._plain["create_masked_load"](pointers, mask, *rest, **options)
        volatile = options["is_volatile"] if "is_volatile" in options else rest[-1]
        self._touch(LOOK if volatile else READ, pointers, mask)
        return result

    def _create_masked_store(self, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        result = self._plain["create_masked_store"](pointers, value, mask, *rest)
        self._touch(WRITE, pointers, mask)
        return result

    def _create_atomic_rmw(
        self, op: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        args = op, pointers, value, mask, sem, scope
        return self._atomic("create_atomic_rmw", args, pointers, mask.data)

    def _create_atomic_cas(
        self, pointers: Any, compare: Any, value: Any, sem: Any, scope: Any
    ) -> Any:
        args = pointers, compare, value, sem, scope
        return self._atomic("create_atomic_cas", args, pointers, True)

    def _create_atomic_load(self, pointers: Any, mask: Any, sem: Any, scope: Any) -> Any:
        args = pointers, mask, sem, scope
        return self._atomic("create_atomic_load", args, pointers, mask.data)

    def _create_atomic_store(
        self, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        args = pointers, value, mask, sem, scope
        return self._atomic("create_atomic_store", args, pointers, mask.data)

    def _atomic(self, name: str, args: tuple[Any, ...], pointers: Any, mask: Any) -> Any:
        """Do and note an atomic; ``args`` end with its order and its scope."""
        *_, sem, scope = args
        chosen = np.broadcast_to(mask, pointers.data.shape)
        addresses = pointers.data[chosen]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        with self._recorder.ordered(addresses) as ticket:
            with self._recorder.silence():
                result = self._plain[name](*args)
            self._recorder.change(
                ticket,
                addresses,
                _words(addresses, size),
                size,
                acquires=sem in _ACQUIRES,
                releases=sem in _RELEASES,
                system=scope == ir.MEM_SYNC_SCOPE.SYSTEM,
            )
        self._switch()
        return result

    def _touch(self, kind: str, pointers: Any, mask: Any) -> None:
        chosen = np.broadcast_to(mask.data, pointers.data.shape)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        self._recorder.touch(kind, pointers.data[chosen], size)


_HOOKED = (
    "create_masked_load",
    "create_masked_store",
    "create_atomic_rmw",
    "create_atomic_cas",
    "create_atomic_load",
    "create_atomic_store",
)


def _words(addresses: np.ndarray, size: int) -> np.ndarray:
    """The integers that are at ``addresses`` now."""
    dtype = np.dtype(f"i{size}")
    whole = np.ones(addresses.shape, bool)
    words: np.ndarray = interpreter._interpreter.load(
        addresses, whole, np.zeros(addresses.shape, dtype), dtype
    )
    return words


class _Together:
    """A kernel's function whose first call runs all programs, and whose other calls do nothing."""

    def __init__(
        self, fn: Callable[..., Any], run: Callable[[Callable[..., Any], dict[str, Any]], None]
    ) -> None:
        self.__name__ = fn.__name__
        self.__globals__ = fn.__globals__
        self.__signature__ = inspect.signature(fn)
        self._fn, self._run, self._done = fn, run, False

    def __call__(self, **args: Any) -> None:
        if not self._done:
            self._done = True
            self._run(self._fn, args)


class _Stopped(BaseException):
    """Ends a program because another one of the launch has failed."""


class _Turns:
    """Runs programs in threads of which one has the turn."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting: list[_Program] = []  # under way, the next one first
        self._error: BaseException | None = None
        self._ended = threading.Semaphore(0)

    def run(self, work: list[tuple[tuple[int, ...], Callable[[], Any]]]) -> None:
        """Run every program of ``work`` = (place in the grid, what to do)."""
        self._left = [_Program(slot, *item) for slot, item in enumerate(work, 1)]
        self._left.reverse()
        while len(self._waiting) < _RESIDENT and self._left:
            self._start()
        self._give()
        self._ended.acquire()
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        program = self._left.pop()
        body = contextvars.copy_context()
        thread = threading.Thread(target=body.run, args=(self._play, program), daemon=True)
        self._waiting.append(program)
        thread.start()

    def _give(self) -> None:
        """Let the next program go on; with none left, the launch has ended."""
        if not self._waiting:
            self._ended.release()
            return
        self._now = program = self._waiting.pop(0)
        _builder.grid_idx = program.place
        self._recorder.slot = program.slot
        program.turn.release()

    def switch(self) -> None:
        """Give the turn to the next program, and wait until it is this one's again."""
        program = self._now
        if self._waiting:
            self._waiting.append(program)
            self._give()
            program.turn.acquire()
        if self._error is not None:
            raise _Stopped

    def _play(self, program: "_Program") -> None:
        program.turn.acquire()
        try:
            if self._error is None:
                program.work()
        except _Stopped:
            pass
        except BaseException as error:
            self._error = self._error or error
        if self._left:
            self._start()
        self._give()


class _Program:
    """One program of a launch."""

    def __init__(self, slot: int, place: tuple[int, ...], work: Callable[[], Any]) -> None:
        self.slot, self.place, self.work = slot, place, work
        self.turn = threading.Semaphore(0)
