"""Running a program: node by node, or captured once into a CUDA graph and replayed.

NOTE [First calls]
Loading a kernel or allocating memory can block behind a kernel that waits for a peer, under MPS
even a peer's kernel. So the first call of a program on a GPU runs it *dry* first, twice: ranks
share out the compiling of its kernels, then each loads all of them (memory is allocated, nothing
waits). They meet on the host after either. The second call captures the program, and ranks meet
again; every later call is one graph launch and no meeting.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from iris.errors import UnsupportedError
from iris.lower.pieces import Piece, cut, host_steps, run_noticing, run_pieces
from iris.lower.program import Executable, Part
from iris.runtime.context import Iris
from iris.runtime.groups import Group


class Turn:
    """The order of a rank's programs on its GPU: that of their calls, whichever streams they use.

    Ranks call programs in one order, so no two of them can wait for each other's kernels while
    their own keep the peer's off the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index
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

    def take(self) -> bool:
        """Make the current stream wait for the program before, if that is on another stream.

        Return True, and order nothing, if the caller captures a graph.
        """
        if torch._C._cuda_getCurrentRawStream(self._index) != self._last:
            if torch.cuda.is_current_stream_capturing():
                return True
            event = torch.cuda.Event()
            event.record(self._stream)
            self._stream = torch.cuda.current_stream(self._device)
            self._last = self._stream.cuda_stream
            self._stream.wait_event(event)
        return False


class Runner:
    """Runs an executable on one rank. ``group`` is all ranks of the program, ``what`` says which
    program it is: on all of them alike, and otherwise than any other. ``written`` are the inputs
    that get the values after the outputs.
    """

    def __init__(
        self,
        executable: Executable,
        ctx: Iris,
        group: Group,
        what: str,
        replay: bool,
        reuse: bool,
        written: Sequence[int] = (),
    ) -> None:
        self._written = written
        self.executable, self.ctx, self.group, self.what = executable, ctx, group, what
        self.signature = group.know(what)
        self.used = 0  # the number of its last call
        self._has_kernels = bool(executable.fused)
        self._noted = self._has_kernels and group.size > 1
        self.on_gpu = ctx.device.type == "cuda"
        self._copied = 0 if reuse else executable.outputs  # values that the caller gets to keep
        self.replays = replay and self.on_gpu
        self.calls = 0
        self.captured: Capture | Pieces | None = None
        self.on_host: dict[int, str] = {}  # steps outside the graph, and why
        self._addresses: list[int] = []
        self._turn = Turn.of(ctx) if self.on_gpu else None
        self._tracing, self._traced = ctx.tracing, ctx.tracing.enabled

    @property
    def outside(self) -> list[tuple[str, str, str]]:
        """Text, line and reason of the steps outside the graph, so far as is known."""
        steps = [(self.executable.steps[number], why) for number, why in self.on_host.items()]
        return [(step.text, step.loc, why) for step, why in steps]

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """Outputs of one call, and after them what it wrote."""
        if self._noted:
            self.used = self.group.launch(self.signature)
        if self._turn is not None and self._turn.take():
            return self._inside(inputs)
        if self._tracing.enabled is not self._traced:  # other kernels: load and capture again
            self.calls, self.captured, self._traced = 0, None, self._tracing.enabled
        if self.captured is not None:
            values = self.captured(inputs)
        else:
            with torch.no_grad():
                values = self._early(inputs) if self.on_gpu else self._plain(inputs)
        if self._has_kernels:
            self.ctx.watch.check(synchronized=not self.on_gpu)
        if self.ctx.checks is not None:
            self.ctx.checks.look(self.group)
        return values

    def _early(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """A call on a GPU before there is a graph."""
        if self.calls == 0:
            return self._first(inputs)
        if self.replays:
            return self._capture(inputs)
        return self._plain(inputs)

    def _plain(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        return write(self.executable.run(*inputs), inputs, self._written)

    def _first(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        executable = self.executable
        self._addresses = addresses(inputs)
        if executable.fused:
            self._load(inputs)
        names = zip(executable.inputs, inputs, strict=True)
        on_cpu = [name for name, x in names if x.device.type == "cpu"]
        on_host = host_steps(executable.steps, on_cpu)
        values, waits = run_noticing(executable, inputs, on_host)
        self.on_host = dict(sorted((waits | on_host).items()))
        self.calls = 1
        return write(values, inputs, self._written)

    def _inside(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """A call that the caller captures: its kernels become part of the caller's graph."""
        if self.calls == 0:
            raise UnsupportedError(
                f"{self.what} is not loaded, and nothing can be loaded in a capture",
                help="call it once before the capture",
            )
        if self.on_host:
            text, line, why = self.outside[0]
            raise UnsupportedError(
                f"{self.what}: {text} {why}, which a CUDA graph cannot hold\n  at {line}",
                help="capture what comes before and after it",
            )
        with torch.no_grad():
            return self._plain(inputs)

    def _load(self, inputs: Sequence[Tensor]) -> None:
        """See NOTE [First calls]."""
        from iris.lower.kernels.host import Turns  # brings in triton

        fused = self.executable.fused
        makers = [call.empty for call in fused]
        for dry, step in ((Turns(self.group), "compiled"), (1, "loaded")):
            with torch.random.fork_rng([self.ctx.device]):
                for call in fused:
                    call.dry = dry
                    call.empty = torch.zeros  # nothing is computed, and torch ops read it
                self.executable.run(*inputs)
            torch.cuda.synchronize(self.ctx.device)
            self._meet(step)
        for call, empty in zip(fused, makers, strict=True):
            call.dry, call.empty = 0, empty

    def _capture(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        now = zip(self._addresses, addresses(inputs), strict=True)
        moved = {i for i, (before, after) in enumerate(now) if before != after}
        if self.on_host:
            pieces = cut(self.executable, self.on_host)
            self.captured, values = Pieces.create(
                self.executable, pieces, inputs, moved, self._copied, self._written
            )
        else:
            self.captured, values = (
                Capture(self.executable.run, inputs, moved, self._copied, self._written),
                None,
            )
        torch.cuda.synchronize(self.ctx.device)
        self._meet("captured")
        return self.captured(inputs) if values is None else values

    def _meet(self, step: str) -> None:
        self.group.sync(f"{self.what}: kernels {step}")


_data_ptr, _clone = Tensor.data_ptr, Tensor.clone


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where the tensors are."""
    return [*map(_data_ptr, tensors)]


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all captures, as torch has."""
    return torch.cuda.Stream(device)


class Capture:
    """One CUDA graph of a program, and what binds its inputs.

    Inputs in ``moved`` have a buffer of their own, and are copied there before each launch; the
    others are read where they were. When such a one comes from elsewhere, it is given a buffer and
    the program is captured again, into the same memory. The first ``copied`` results are copies,
    the others are overwritten by the next call.
    """

    def __init__(
        self,
        run: Callable[..., Sequence[Any]],
        inputs: Sequence[Tensor],
        moved: Iterable[int],
        copied: int = 0,
        written: Sequence[int] = (),
        pool: Any = None,
    ) -> None:
        self.run, self.copied, self.written = run, copied, written
        self.pool = pool or torch.cuda.graph_pool_handle()
        self.stream = _capture_stream(torch.cuda.current_device())
        self.moved = set(moved)
        self._record(inputs)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _record(self, inputs: Sequence[Tensor]) -> None:
        moved = sorted(self.moved)
        self.buffers = [torch.empty_like(inputs[i]) for i in moved]
        bound = [*inputs]
        for i, buffer in zip(moved, self.buffers, strict=True):
            bound[i] = buffer
        still = [i for i in range(len(inputs)) if i not in self.moved]
        # Of inputs, those that are read where they were.
        self._still: Callable[[Any], tuple[Any, ...]] = _picker(still) if moved else tuple
        self._fixed = addresses(self._still(bound))
        self._copy_in = _copier(moved, self.buffers, any(x.requires_grad for x in inputs))
        pairs = zip(moved, self.buffers, strict=True)
        self._written_buffers = [(i, buffer) for i, buffer in pairs if i in self.written]
        self.graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with warnings.catch_warnings(), torch.cuda.stream(self.stream):
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # only views
            # cuBLAS keeps a workspace (up to 32 MB) for each stream. A graph gets its own: two may
            # run at once, and it is to go with the graph.
            torch._C._cuda_clearCublasWorkspaces()
            self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                values = write(self.run(*bound), bound, self.written)
            finally:
                self.graph.capture_end()
                torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.current_stream().wait_stream(self.stream)
        self.values = values
        self._results = _results(values, self.copied)
        self._replay = self.graph.replay

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        if [*map(_data_ptr, self._still(inputs))] != self._fixed:
            self._move(inputs)
        if self._copy_in is not None:
            self._copy_in(inputs)
        self._replay()
        for place, buffer in self._written_buffers:
            inputs[place].copy_(buffer)
        return self._results()

    def _move(self, inputs: Sequence[Tensor]) -> None:
        """Give buffers to inputs that do not stay where they were."""
        still = [i for i in range(len(inputs)) if i not in self.moved]
        now = addresses(self._still(inputs))
        pairs = zip(still, now, self._fixed, strict=True)
        self.moved.update(i for i, address, bound in pairs if address != bound)
        # The old graph must not be running when it goes.
        torch.cuda.current_stream().synchronize()
        self._record(inputs)


def write(values: Sequence[Any], inputs: Sequence[Tensor], written: Sequence[int]) -> Sequence[Any]:
    """The values, the last of them written to the inputs at ``written``."""
    for place, value in zip(written, values[len(values) - len(written) :], strict=True):
        inputs[place].copy_(value)
    return values


def copies(values: Sequence[Any], number: int) -> Sequence[Any]:
    """The values, the first ``number`` of them copied where they are tensors."""
    first = [value.clone() if isinstance(value, Tensor) else value for value in values[:number]]
    return [*first, *values[number:]]


def _copier(
    places: Sequence[int], buffers: list[Tensor], detached: bool
) -> Callable[[Sequence[Tensor]], object] | None:
    """A function that copies inputs at ``places`` to their buffers; None where there are none."""
    if not buffers:
        return None
    pick = _picker(places)
    if detached:  # a tensor may require grad, and a buffer is no part of that
        return lambda inputs: torch._foreach_copy_(buffers, [x.detach() for x in pick(inputs)])
    if len(buffers) > 1:
        return lambda inputs: torch._foreach_copy_(buffers, pick(inputs))
    copy, place = buffers[0].copy_, places[0]
    return lambda inputs: copy(inputs[place])


def _results(values: Sequence[Any], copied: int) -> Callable[[], Sequence[Any]]:
    """A function that returns the values, the first ``copied`` as copies of what is there then."""
    if not copied:
        return lambda: values
    if copied < len(values) or not all(isinstance(value, Tensor) for value in values):
        return lambda: copies(values, copied)
    if copied > 1:
        return lambda: [*map(_clone, values)]
    clone = values[0].clone
    return lambda: [clone()]


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function from a sequence to its items at ``places``."""
    if len(places) > 1:
        return itemgetter(*places)
    first, last = (places[0], places[0] + 1) if places else (0, 0)
    return lambda items: tuple(items[first:last])


class Pieces:
    """A plan as captured pieces and the steps on the host between them."""

    def __init__(
        self, executable: Executable, calls: "Sequence[Call]", copied: int, written: Sequence[int]
    ) -> None:
        self.executable, self.calls = executable, calls
        self.copied, self.written = copied, written

    @classmethod
    def create(
        cls,
        executable: Executable,
        pieces: Sequence[Piece],
        inputs: Sequence[Tensor],
        moved: set[int],
        copied: int,
        written: Sequence[int],
    ) -> "tuple[Pieces, Sequence[Any]]":
        """Run the pieces as they are, then capture those that can be; with the run's result."""
        eager = [(piece.part, _unpacked(piece.part.run)) for piece in pieces]
        values, known = run_pieces(executable, eager, inputs)
        torch.cuda.synchronize()  # no kernel of this rank waits while it captures
        elsewhere = {executable.inputs[i] for i in moved}
        static, calls, pool = dict(known), [], torch.cuda.graph_pool_handle()
        for piece, (part, run) in zip(pieces, eager, strict=True):
            if piece.on_host:
                elsewhere.update(part.makes)
                calls.append((part, run))
                continue
            places = [i for i, name in enumerate(part.uses) if name in elsewhere]
            given = [static[name] for name in part.uses]
            capture = Capture(part.run, given, places, pool=pool)
            static.update(zip(part.makes, capture.values, strict=True))
            calls.append((part, capture))
        return cls(executable, calls, copied, written), write(values, inputs, written)

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Any]:
        values, _ = run_pieces(self.executable, self.calls, inputs)
        return write(copies(values, self.copied), inputs, self.written)


Call = tuple[Part, Callable[[Sequence[Any]], Sequence[Any]]]


def _unpacked(run: Callable[..., Sequence[Any]]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    return lambda values: run(*values)
