"""Torch's creation functions, with the result on the symmetric heap.

Each runs torch's own function twice: on the meta device, where it only checks the arguments and
says shape and dtype, and then with ``out=`` a tensor on the heap. So arguments, errors and values
are torch's.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from iris.errors import IrisError
from iris.runtime.groups import Group
from iris.runtime.heap import Block, Heap

Ranks = Sequence[int] | dist.ProcessGroup | None
Device = torch.device | str | int | None
Make = Callable[..., Tensor]


class Creation:
    """Creation methods of the Iris class, all collective.

    Every rank calls them with the same shape and dtype. They take torch's arguments: sizes as
    integers, a tuple or a ``torch.Size``; ``dtype``, ``requires_grad``, ``generator``, and ``out=``
    for a tensor that is on the heap already. On return the tensor is usable by every peer.
    """

    heap: Heap
    device: torch.device
    world: Group
    group: Callable[[Ranks], Group]

    def zeros(self, *size: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        """Return zeros, like ``torch.zeros``: ``ctx.zeros(2, 3)`` or ``ctx.zeros((2, 3))``."""
        return self._make(torch.zeros, size, out, options)

    def ones(self, *size: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        """Return a tensor of ones, like ``torch.ones``."""
        return self._make(torch.ones, size, out, options)

    def full(
        self, size: Any, fill_value: Any, *, out: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Return a tensor filled with ``fill_value``, like ``torch.full``."""
        size = (size,) if isinstance(size, int) else size
        return self._make(torch.full, (size, fill_value), out, options)

    def empty(self, *size: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        """Return an uninitialised tensor, like ``torch.empty``."""
        return self._make(torch.empty, size, out, options, fill=False)

    def zeros_like(self, input: Tensor, **options: Any) -> Tensor:
        """Return zeros shaped like ``input``, with its strides and dtype."""
        requires_grad = options.pop("requires_grad", False)
        self._check_device(options.pop("device", None))
        meta = torch.zeros_like(input, device="meta", **options)
        return self._finish(self._place(meta, None).zero_(), requires_grad)

    def rand(self, *size: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        """Return uniform random numbers from [0, 1), like ``torch.rand``.

        Each rank draws from its own generator.
        """
        return self._make(torch.rand, size, out, options)

    def randn(self, *size: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        """Return normal random numbers, like ``torch.randn``.

        Each rank draws from its own generator.
        """
        return self._make(torch.randn, size, out, options)

    def randint(self, *args: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        """Return random integers, like ``torch.randint``: ``ctx.randint(0, 10, (2, 3))``."""
        return self._make(torch.randint, args, out, options)

    def uniform(
        self,
        size: Any,
        low: float = 0.0,
        high: float = 1.0,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return uniform random numbers from [low, high), of shape ``size``."""
        size = (size,) if isinstance(size, int) else size
        tensor = self._place(torch.empty(size, dtype=dtype, device="meta"), None)
        return self._finish(tensor.uniform_(low, high, generator=generator), False)

    def arange(self, *args: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        """Return evenly spaced numbers, like ``torch.arange``: ``ctx.arange(start, end, step)``."""
        return self._make(torch.arange, args, out, options)

    def linspace(self, *args: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        """Return ``steps`` numbers from start to end, like ``torch.linspace``."""
        return self._make(torch.linspace, args, out, options)

    def as_symmetric(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` itself if it is on every rank's heap, else a copy there.

        Collective.
        """
        if all(self.world.exchange_object("as_symmetric", self.is_symmetric(tensor))):
            return tensor
        copy = self._place(torch.empty_like(tensor, device="meta"), None)
        with torch.no_grad():
            copy.copy_(tensor)
        return self._finish(copy, tensor.requires_grad)

    def is_symmetric(self, tensor: Tensor) -> bool:
        """Say whether ``tensor`` is on this rank's heap. An empty tensor made elsewhere is not."""
        return self.heap.find(tensor) is not None

    def allocate_symmetric(
        self, *size: Any, dtype: torch.dtype | None = None, group: Ranks = None
    ) -> tuple[Tensor, Tensor]:
        """Return an uninitialised tensor and its peer table, int64[num_ranks].

        Entry r of the table is the tensor's address on rank r, as mapped here; entry ``cur_rank``
        is its own ``data_ptr()``. Collective over ``group``, the world by default; of a smaller
        group the table has an entry for each member, in its order.

        Example::

            x, peers = ctx.allocate_symmetric(1024, dtype=torch.float32)
        """
        meta = torch.empty(*size, dtype=dtype, device="meta")
        block = self._block(meta, self.group(group))
        table = torch.tensor(block.peers, dtype=torch.int64, device=self.device)
        return _view(block, meta), table

    def _make(
        self,
        make: Make,
        args: Sequence[Any],
        out: Tensor | None,
        options: dict[str, Any],
        fill: bool = True,
    ) -> Tensor:
        self.world.board.check_usable()
        requires_grad = options.pop("requires_grad", False)
        generator = options.pop("generator", None)
        self._check_device(options.pop("device", None))
        if isinstance(out, Tensor):
            options.setdefault("dtype", out.dtype)
        meta = make(*args, device="meta", **options)
        tensor = self._place(meta, out)
        if not fill:
            return tensor.requires_grad_() if requires_grad else tensor
        drawn = {} if generator is None else {"generator": generator}
        with torch.no_grad():
            make(*args, out=tensor, **{**options, **drawn})
        return self._finish(tensor, requires_grad)

    def _place(self, meta: Tensor, out: Any) -> Tensor:
        """Return a heap tensor like ``meta``: ``out`` if it fits, else a new one."""
        if out is None:
            return _view(self._block(meta), meta)
        here = self.is_symmetric(out)
        if not here or out.shape != meta.shape or out.dtype != meta.dtype:
            given = type(out).__name__
            if isinstance(out, Tensor):
                given = f"{out.dtype} of shape {tuple(out.shape)}{'' if here else ', elsewhere'}"
            raise IrisError(
                f"out= must be a {meta.dtype} tensor of shape {tuple(meta.shape)} on the heap, "
                f"and is {given}",
                help="create it with ctx.empty(...)",
            )
        return cast(Tensor, out)

    def _block(self, meta: Tensor, group: Group | None = None) -> Block:
        if meta.layout is not torch.strided:
            raise IrisError(f"the heap has no {meta.layout} tensors", help="use torch.strided")
        spans = ((n - 1) * step for n, step in zip(meta.shape, meta.stride(), strict=True))
        elements = sum(spans) + 1 if meta.numel() else 0
        what = f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"
        if not meta.is_contiguous():
            what += f" with strides {list(meta.stride())}"
        return self.heap.allocate(elements * meta.element_size(), group, what=what)

    def _finish(self, tensor: Tensor, requires_grad: bool) -> Tensor:
        """Wait until all ranks have filled theirs, so that a peer's store is not overwritten."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.world.sync("fill a new tensor")
        return tensor.requires_grad_() if requires_grad else tensor

    def _check_device(self, device: Device) -> None:
        if device is None:
            return
        wanted = torch.device(device)
        if wanted.type != self.device.type or wanted.index not in (None, self.device.index or 0):
            raise IrisError(
                f"device={device!r}, but the heap of this rank is on {self.device}",
                help="leave device= out",
            )


def _view(block: Block, meta: Tensor) -> Tensor:
    """Return the block as a tensor like ``meta``, with a storage of its own."""
    tensor = torch.empty(0, dtype=meta.dtype, device=block.tensor.device)
    storage = block.tensor.untyped_storage()
    return tensor.set_(storage, 0, meta.size(), meta.stride())
