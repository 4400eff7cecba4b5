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

from iris.gluon import availability

availability.check()

import copyreg  # noqa: E402

from triton.experimental.gluon._runtime import GluonJITFunction  # noqa: E402

from iris.device.atomics import (  # noqa: E402
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
from iris.device.context import DeviceContext as DeviceContext  # noqa: E402
from iris.device.copy_engine import quiet as quiet  # noqa: E402
from iris.device.ops import (  # noqa: E402
    copy as copy,
    get as get,
    load as load,
    put as put,
    store as store,
    translate as translate,
)
from iris.device.pickling import reduce_kernel  # noqa: E402
from iris.device.signals import signal as signal, wait as wait  # noqa: E402
from iris.gluon import tma as tma  # noqa: E402

copyreg.pickle(GluonJITFunction, reduce_kernel)  # kernels of scripts travel to ranks
