"""Whether this process can run Gluon kernels."""

import importlib.util

from iris.errors import UnsupportedError


def check() -> None:
    """Raise ``UnsupportedError`` where Triton has no Gluon, or interprets kernels."""
    try:
        found = importlib.util.find_spec("triton.experimental.gluon")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UnsupportedError(
            "iris.gluon needs Gluon, which this Triton does not have",
            help="use a Triton from 3.6 on, or write the kernel with @triton.jit",
        )
    import triton

    if triton.knobs.runtime.interpret:
        raise UnsupportedError(
            "iris.gluon compiles kernels for a GPU, and Triton is set to interpret them",
            help="use the functions of iris in @triton.jit kernels, or unset TRITON_INTERPRET "
            "where there is a GPU",
        )
