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


class Turn:
    """The order of a rank's programs on its GPU: that of their calls, whichever streams they use.

    Ranks call programs in one order, so no two of them can wait for each other's kernels while
    their own keep the peer's off the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._last = self._stream.cuda_stream

    @classmethod
    def of(cls, ctx: Iris) -> "Turn":
        """The one of this context."""
        kept = ctx.world.kept
        if "turn" not in kept:
            kept["turn"] = cls(ctx.device)
        turn: Turn = kept["turn"]
        return turn

    def take(self) -> None:
        """Make the current stream wait for the program before, if that is on another stream."""
        if torch._C._cuda_getCurrentRawStream(self._device.index) != self._last:
            event = torch.cuda.Event()
            event.record(self._stream)
            self._stream = torch.cuda.current_stream(self._device)
            self._last = self._stream.cuda_stream
            self._stream.wait_event(event)


class Runner:
    """Runs an executable on one rank. ``group`` is all ranks of the program, ``what`` says which
    program it is: on all of them alike, and otherwise than any other.
    """

    def __init__(
        self, executable: Executable, ctx: Iris, group: Group, what: str, replay: bool, reuse: bool
    ) -> None:
        self.executable, self.ctx, self.group, self.what = executable, ctx, group, what
        self.signature = group.know(what)
        self._noted = bool(executable.fused) and group.size > 1
        self.on_gpu = ctx.device.type == "cuda"
        self.reuse = reuse
        self.replays = replay and self.on_gpu and not executable.on_host
        self.calls = 0
        self.captured: Capture | None = None
        self._addresses: list[int] = []
        self._turn = Turn.of(ctx) if self.on_gpu else None
        self._traced = ctx.tracing.enabled

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """Outputs and written values of one call."""
        if self._noted:
            self.group.launch(self.signature)
        if self._turn is not None:
            self._turn.take()
        if self.ctx.tracing.enabled is not self._traced:  # other kernels: load and capture again
            self.calls, self.captured, self._traced = 0, None, self.ctx.tracing.enabled
        if self.captured is not None:
            values = self.captured(inputs)
        else:
            with torch.no_grad():
                values = self._early(inputs) if self.on_gpu else self.executable.run(*inputs)
        if self.executable.fused:
            self.ctx.watch.check(synchronized=not self.on_gpu)
        if self.ctx.checks is not None:
            self.ctx.checks.look(self.group)
        return values

    def _early(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """A call on a GPU before there is a graph."""
        if self.calls == 0:
            self._load(inputs)
        elif self.replays and self.calls >= CALLS_BEFORE_CAPTURE:
            return self._capture(inputs)
        self.calls += 1
        self._addresses = addresses(inputs)
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
        now = zip(self._addresses, addresses(inputs), strict=True)
        moved = {i for i, (before, after) in enumerate(now) if before != after}
        self.captured = Capture(self.executable, inputs, moved, self.reuse)
        torch.cuda.synchronize(self.ctx.device)
        self._meet("captured")
        return self.captured(inputs)

    def _meet(self, step: str) -> None:
        what = f"{self.what}: kernels {step}"
        self.group.sync(zlib.crc32(what.encode()) & 0x7FFFFFFF, what)


_data_ptr = Tensor.data_ptr


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where the tensors are."""
    return [*map(_data_ptr, tensors)]


class Capture:
    """One CUDA graph of a program, and what binds its inputs.

    Inputs in ``moved`` have a buffer of their own, and are copied there before each launch; the
    others are read where they were. When such a one comes from elsewhere, it is given a buffer and
    the program is captured again, into the same memory.
    """

    def __init__(
        self, executable: Executable, inputs: Sequence[Tensor], moved: set[int], reuse: bool
    ) -> None:
        self.executable, self.reuse = executable, reuse
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.moved = set(moved)
        self._record(inputs)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _record(self, inputs: Sequence[Tensor]) -> None:
        self.buffers = {i: torch.empty_like(inputs[i]) for i in self.moved}
        bound = [self.buffers.get(i, x) for i, x in enumerate(inputs)]
        self.addresses = addresses(bound)
        self.graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                values = self.executable.run(*bound)
            finally:
                self.graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        self.values = values
        self._replay = self.graph.replay

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        now = addresses(inputs)
        if now != self.addresses:
            self._bind(inputs, now)
        self._replay()
        if self.reuse:
            return self.values
        return [value.clone() if isinstance(value, Tensor) else value for value in self.values]

    def _bind(self, inputs: Sequence[Tensor], now: Sequence[int]) -> None:
        """Bring inputs that are elsewhere to where the graph reads them."""
        pairs = enumerate(zip(now, self.addresses, strict=True))
        moved = [i for i, (address, bound) in pairs if address != bound]
        if not self.buffers.keys() >= set(moved):
            self.moved.update(moved)
            # The old graph must not be running when it goes.
            torch.cuda.current_stream().synchronize()
            self._record(inputs)
        sources = [inputs[i].detach() if inputs[i].requires_grad else inputs[i] for i in moved]
        if len(moved) == 1:
            self.buffers[moved[0]].copy_(sources[0])
        else:
            torch._foreach_copy_([self.buffers[i] for i in moved], sources)
