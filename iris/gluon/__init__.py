"""The memory operations of iris for kernels written with ``@gluon.jit``.

    import iris
    import iris.gluon
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    @gluon.jit
    def pull(x, y, words, rank: gl.constexpr, peer: gl.constexpr, N: gl.constexpr):
        ctx = iris.gluon.DeviceContext.initialize(words, rank, 2)
        i = gl.arange(0, N, layout=gl.BlockedLayout([4], [32], [4], [0]))
        gl.store(y + i, ctx.load(x + i, from_rank=peer))

These are the functions that ``@triton.jit`` kernels use, so they take the same arguments and mean
the same; results have the layout of the pointers. Call them from all warps of a program: the ones
that synchronise (signals, waits, barriers, the copy engine) do not know ``warp_specialize``. The
``tma`` part moves whole tiles of tensors that descriptors name.

Importing this module raises ``UnsupportedError`` where Triton has no Gluon, or interprets kernels.
"""

import copyreg

from iris.errors import UnsupportedError

try:
    import triton.experimental.gluon
    from triton.experimental.gluon._runtime import GluonJITFunction
except ImportError:
    raise UnsupportedError(
        "iris.gluon needs Gluon, which this Triton does not have",
        help="use a Triton from 3.6 on, or write the kernel with @triton.jit",
    ) from None
if triton.knobs.runtime.interpret:
    raise UnsupportedError(
        "iris.gluon compiles kernels for a GPU, and Triton is set to interpret them",
        help="use the functions of iris in @triton.jit kernels, or unset TRITON_INTERPRET where "
        "there is a GPU",
    )

from iris.device.atomics import (
    atomic_add as atomic_add,
    atomic_and as atomic_and,
    atomic_cas as atomic_cas,
    atomic_max as atomic_max,
    atomic_min as atomic_min,
    atomic_or as atomic_or,
    atomic_sub as atomic_sub,
    atomic_xchg as atomic_xchg,
    atomic_xor as atomic_xor,
)
from iris.device.context import DeviceContext as DeviceContext
from iris.device.copy_engine import quiet as quiet
from iris.device.ops import (
    copy as copy,
    get as get,
    load as load,
    put as put,
    store as store,
    translate as translate,
)
from iris.device.pickling import reduce_kernel
from iris.device.signals import signal as signal, wait as wait
from iris.gluon import tma as tma

copyreg.pickle(GluonJITFunction, reduce_kernel)  # kernels of scripts travel to ranks
