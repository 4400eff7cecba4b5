"""Running a program: node by node, or captured once into a CUDA graph and replayed.

NOTE [First calls]
Loading a kernel or allocating memory can block behind a kernel that waits for a peer, under MPS
even a peer's kernel. So the first call of a program on a GPU runs it *dry* first, twice: ranks
share out the compiling of its kernels, then each loads all of them (memory is allocated, nothing
waits). They meet on the host after either. The second call captures the program, and ranks meet
again; every later call is one graph launch and no meeting.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from iris.lower.program import Executable
from iris.runtime.context import Iris
from iris.runtime.groups import Group

CALLS_BEFORE_CAPTURE = 1


class Runner:
    """Runs an executable on one rank. ``group`` is all ranks of the program."""

    def __init__(
        self, executable: Executable, ctx: Iris, group: Group, name: str, replay: bool, reuse: bool
    ) -> None:
        self.executable, self.ctx, self.group, self.name = executable, ctx, group, name
        self.on_gpu = ctx.device.type == "cuda"
        self.reuse = reuse
        self.replays = replay and self.on_gpu and not executable.on_host
        self.calls = 0
        self.captured: Capture | None = None
        self._addresses: list[int] = []

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """Outputs and written values of one call."""
        if self.captured is not None:
            values: Sequence[Any] = self.captured(inputs, self.reuse)
        elif self.on_gpu:
            values = self._early(inputs)
        else:
            values = self.executable.run(*inputs)
        if self.executable.fused:
            self.ctx.watch.check(synchronized=not self.on_gpu)
        return values

    def _early(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """A call on a GPU before there is a graph."""
        if self.calls == 0:
            self._load(inputs)
        elif self.replays and self.calls >= CALLS_BEFORE_CAPTURE:
            return self._capture(inputs)
        self.calls += 1
        self._addresses = [x.data_ptr() for x in inputs]
        return self.executable.run(*inputs)

    def _load(self, inputs: Sequence[Tensor]) -> None:
        """See NOTE [First calls]."""
        if not self.executable.fused:
            return
        from iris.lower.kernels.host import Turns  # brings in triton

        for dry, step in ((Turns(self.group), "compiled"), (1, "loaded")):
            with torch.random.fork_rng([self.ctx.device]):
                for call in self.executable.fused:
                    call.dry = dry
                self.executable.run(*inputs)
            torch.cuda.synchronize(self.ctx.device)
            self._meet(step)
        for call in self.executable.fused:
            call.dry = 0

    def _capture(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        moved = {i for i, x in enumerate(inputs) if x.data_ptr() != self._addresses[i]}
        self.captured = Capture(self.executable, inputs, moved)
        torch.cuda.synchronize(self.ctx.device)
        self._meet("captured")
        return self.captured(inputs, self.reuse)

    def _meet(self, step: str) -> None:
        what = f"program {self.name}: kernels {step}"
        self.group.sync(zlib.crc32(what.encode()) & 0x7FFFFFFF, what)


class Capture:
    """One CUDA graph of a program, and what binds its inputs.

    Inputs in ``moved`` have a buffer of their own, and are copied there before each launch; the
    others are read where they were. When such a one comes from elsewhere, it is given a buffer and
    the program is captured again, into the same memory.
    """

    def __init__(self, executable: Executable, inputs: Sequence[Tensor], moved: set[int]) -> None:
        self.executable = executable
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.event = torch.cuda.Event()
        self.moved = set(moved)
        self._record(inputs)

    def _record(self, inputs: Sequence[Tensor]) -> None:
        buffers = {i: torch.empty_like(inputs[i]) for i in self.moved}
        self.inputs = [buffers.get(i, x) for i, x in enumerate(inputs)]
        self.buffers = list(buffers.items())
        self.bound = [(i, x.data_ptr()) for i, x in enumerate(inputs) if i not in self.moved]
        self.graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                self.values = self.executable.run(*self.inputs)
            finally:
                self.graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)

    def __call__(self, inputs: Sequence[Tensor], reuse: bool) -> Sequence[Any]:
        elsewhere = {i for i, address in self.bound if inputs[i].data_ptr() != address}
        if elsewhere:
            self.moved |= elsewhere
            # The old graph must not be running when it goes.
            torch.cuda.current_stream().synchronize()
            self._record(inputs)
        stream = torch.cuda.current_stream()
        stream.wait_event(self.event)  # the last launch may have been on another stream
        for index, buffer in self.buffers:
            buffer.copy_(inputs[index])
        self.graph.replay()
        if reuse:
            self.event.record(stream)
            return self.values
        values = [value.clone() if isinstance(value, Tensor) else value for value in self.values]
        self.event.record(stream)
        return values
