"""The thread that serves a rank's copy engine, and the queues through which kernels reach it.

See NOTE [Copy queues] in iris/device/copy_queue.py.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from iris import config
from iris.device.copy_queue import ADD, COPY, OP, ROW, SET, WORDS
from iris.errors import IrisError, PeerError
from iris.runtime.board import fence
from iris.runtime.copy_lanes import DEVICE, Key, Lanes, Mark, Op, StreamLanes, patiently
from iris.runtime.devices import synchronize
from iris.runtime.rectangles import Rectangle

if TYPE_CHECKING:
    from iris.runtime.context import Iris

_BATCH = 64  # descriptors that are taken before their end is made known
# The thread looks often while there is work, then ever more seldom: kernels cannot wake it. While
# none may ask it hardly looks at all.
_PEERS_SECONDS = 0.1
_PR_SET_TIMERSLACK = 29  # in nanoseconds, of the calling thread
_BUSY_SECONDS, _OFTEN, _PENDING, _SELDOM, _ASLEEP = 0.05, 2e-5, 2e-4, 2e-3, 0.1


class Engine:
    """What ``engines=("sdma",)`` adds to a rank. Collective to create; ``close`` ends its thread.

    ``context`` is the tensor that kernels take (NOTE [Copy queues]). An error on the thread ends
    it, and the waits of this rank's kernels; every later use raises that error.
    """

    def __init__(self, ctx: "Iris") -> None:
        world, slots = ctx.num_ranks, config.copy_queue()
        on_gpu = ctx.device.type == "cuda"
        self._ctx = ctx
        self._slots = slots
        # READ, DONE and WRITE of every peer, which kernels poll, and words to try things on.
        words = ctx.heap.allocate(8 * (3 * world + 4), internal=True).tensor.view(torch.int64)
        words.zero_()
        self._read, self._done, self._tickets = words[:-4].view(3, world)
        self._done_at = [word.data_ptr() for word in self._done]
        host = torch.zeros(world * (slots * WORDS + 2), dtype=torch.int64, pin_memory=on_gpu)
        self.memory = host.data_ptr(), host.data_ptr() + host.nbytes  # the host's part of queues
        self._rings = host[2 * world :].view(world, slots, WORDS)
        self._bells, self._taken = host[: 2 * world].view(world, 2).unbind(1)
        self._ring_words, self._bell_words = self._rings.numpy(), self._bells.numpy()
        self._taken_words = self._taken.numpy()
        self._rung = b""
        self._next = [0] * world  # ticket that is taken next from a queue
        self._taken_ops: list[deque[list[Rectangle | Mark]]] = [deque() for _ in range(world)]
        self.context = self._rows()
        self.exposed = False  # whether kernels may use the queues
        self.lanes: Lanes | StreamLanes
        if on_gpu:
            self.lanes = StreamLanes(ctx, self.wake)
            torch.cuda.synchronize(ctx.device)
            self.lanes.prepare(words[-4:].data_ptr())
        else:
            self.lanes = Lanes(self.wake)
        self.looks = 0  # times the thread looked for work
        self._empty = 0  # times there was none
        self._wake = threading.Event()
        self._start()
        ctx.world.sync("start the copy engine")

    def submit(self, key: Key, ops: Sequence[Op], used: Sequence[Tensor]) -> None:
        """Append to a lane (see copy_lanes.py)."""
        self.check()
        self.lanes.submit(key, ops, used)

    def finish(self, key: Key) -> None:
        """Wait for a lane."""
        self.lanes.finish(key, self.check)
        self.check()
        self._ctx.watch.check()  # where a kernel did the waiting

    def settle(self) -> None:
        """Wait for what finished kernels have asked for, and for every lane."""
        self.check()
        if self.exposed:
            before = self._empty
            self.wake()
            patiently(lambda: self._empty > before + 1, self.check)
        for key in self.lanes.keys():  # noqa: SIM118
            self.finish(key)

    def check(self) -> None:
        """Raise if the engine cannot work any more."""
        self._ctx.check_usable()
        if self.error is None and not self._stop and not self._thread.is_alive():
            self._fail(IrisError(f"{self._name()} stopped", help=_WAY_OUT))
        if self.error is not None:
            raise type(self.error)(self.error.message, self.error.help)

    def wake(self) -> None:
        """Make the thread look now."""
        self._wake.set()

    def close(self, abandon: bool = False) -> None:
        """End the thread, by default after all that was asked for."""
        if self._thread.is_alive() and not abandon:
            synchronize(self._ctx.device)
            with suppress(IrisError):
                self.settle()
            if self.error is not None:
                self._ctx.warning(f"closed before all copies were done: {self.error.message}")
        self._end()
        if not abandon:
            self.lanes.close()

    def renew(self) -> None:
        """Forget what was asked for and what went wrong, while no kernel runs."""
        self._end()
        if self._thread.is_alive():
            raise IrisError(f"{self._name()} does not stop", help=_WAY_OUT)
        synchronize(self._ctx.device)
        self._rings.zero_()
        for batches in self._taken_ops:
            batches.clear()
        self.restart(0)
        synchronize(self._ctx.device)
        self._start()

    def restart(self, ticket: int) -> None:
        """Let every queue go on with number ``ticket``, when none is in use."""
        self._next = [ticket] * len(self._next)
        for counters in (self._taken, self._read, self._done, self._tickets):
            counters.fill_(ticket)

    def _rows(self) -> Tensor:
        watch, world = self._ctx.watch, self._ctx.num_ranks
        stage = watch.stage("the copy engine's queue", range(world))
        rows = torch.zeros(world, ROW, dtype=torch.int64)
        for peer in range(world):
            tables = self._rings, self._read, self._tickets, self._bells
            addresses = [table[peer].data_ptr() for table in tables]
            others = self._slots, watch.record.data_ptr(), stage, self._done_at[peer]
            rows[peer] = torch.tensor([*addresses, *others])
        return rows.to(self._ctx.device)

    def _start(self) -> None:
        self.error: IrisError | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="iris-copy-engine", daemon=True)
        self._thread.start()

    def _end(self) -> None:
        self._stop = True
        self.wake()
        self._thread.join(config.timeout())
        self.lanes.give_up()

    def _run(self) -> None:
        try:
            with suppress(AttributeError):  # Linux only: sleeps as short as they are meant to be
                ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)
            self.lanes.enter_thread()
            self._serve()
        except IrisError as error:
            self._fail(error)
        except BaseException as error:  # whatever ends the thread
            self._fail(
                IrisError(f"{self._name()} stopped: {type(error).__name__}: {error}", help=_WAY_OUT)
            )

    def _serve(self) -> None:
        active = looked = time.monotonic()
        while not self._stop:
            self.looks += 1
            worked = self.lanes.advance()
            rung = self._bell_words.tobytes()
            if self.exposed and (rung != self._rung or not worked):
                self._rung = rung
                for peer in range(len(self._next)):
                    worked |= self._drain(peer)
            now = time.monotonic()
            if worked:
                active = now
                continue
            pending = self.lanes.pending() or any(self._taken_ops)
            if pending and now - looked > _PEERS_SECONDS:
                looked = now
                self._look_for_lost_peers()
            self._empty += not any(self._taken_ops)
            idle = now - active
            longest = _PENDING if pending else _SELDOM if self.exposed else _ASLEEP
            if self._wake.wait(_OFTEN if idle < _BUSY_SECONDS else min(idle / 50, longest)):
                self._wake.clear()
                active = time.monotonic()

    def _look_for_lost_peers(self) -> None:
        board = self._ctx.world.board
        reasons = [reason for rank in board.pages if (reason := board.loss(rank)) is not None]
        if reasons:
            waiting = f"{self._name()} was waiting for a flag"
            raise PeerError("; ".join(reasons) + f"\n  {waiting}")

    def _drain(self, peer: int) -> bool:
        """Take a batch of what is in a queue, and issue batches that fit. Return whether any did.

        What is taken frees its places at once: programs that wait for room may hold the SMs that
        copies need.
        """
        batches, key = self._taken_ops[peer], (peer, DEVICE)
        if ops := self._take(peer):
            batches.append(ops)
        issued = False
        while batches and not self.lanes.full(key):
            self.lanes.perform(key, batches.popleft())
            issued = True
        return issued or bool(ops)

    def _take(self, peer: int) -> list[Rectangle | Mark]:
        """Decode what is in a queue, up to a batch, and the mark that says so when it is done."""
        ring, first = self._ring_words[peer], self._next[peer]
        ops: list[Rectangle | Mark] = []
        while len(ops) < _BATCH:
            words = ring[(first + len(ops)) % self._slots]
            if words[0] != first + len(ops) + 1:
                break
            fence()
            ops.append(self._decode(peer, words[OP:].tolist()))
        if not ops:
            return ops
        self._next[peer] = last = first + len(ops)
        fence()
        self._taken_words[peer] = last
        return [*ops, Mark(self._done_at[peer], last, wide=True, add=False)]

    def _decode(self, peer: int, words: list[int]) -> Rectangle | Mark:
        kind, dst, src, width, height, dst_pitch, src_pitch = words
        copy = Rectangle(dst, src, width, height, dst_pitch, src_pitch)
        end = copy.dst_end
        if kind not in (COPY, ADD, SET) or not self._ctx.heap.holds(peer, dst, end):
            raise IrisError(
                f"{self._name()} was asked for what is not on the heap of rank {peer}: "
                f"operation {kind}, {end - dst} bytes at {dst:#x}",
                help="pass pointers to tensors of this context, and its own get_copy_engine_ctx()",
            )
        return copy if kind == COPY else Mark(dst, src, wide=width == 8, add=kind == ADD)

    def _fail(self, error: IrisError) -> None:
        """Note why, and let no wait of this rank's kernels go on."""
        if self.error is None:
            self.error = error
            self.lanes.give_up()
            self._ctx.watch.abort(error.message)

    def _name(self) -> str:
        return f"the copy engine of rank {self._ctx.cur_rank}"


_WAY_OUT = "call ctx.reset() on every rank, or close this context and create another"
