"""Whether Triton interprets kernels in this process: yes, by default, where the machine shows no
GPU.
"""

import os
import sys
from pathlib import Path

from iris.errors import ConfigError

VARIABLE = "TRITON_INTERPRET"


def machine_has_gpu() -> bool:
    """Whether the machine shows a GPU, by its device files: no driver is started."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    return Path("/dev/kfd").exists()


def choose() -> None:
    """Set ``TRITON_INTERPRET=1`` where there is no GPU and the user has not set it. Runs before
    triton is imported.
    """
    if VARIABLE in os.environ or machine_has_gpu():
        return
    os.environ[VARIABLE] = "1"
    check()


def check() -> None:
    """Raise ConfigError where triton was imported earlier in the other mode: kernels defined since
    cannot run.
    """
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    if knobs is None or interpreting():
        return
    raise ConfigError(
        "triton was imported before iris, on a machine without a GPU, and is set to compile",
        help="import iris before triton, or set TRITON_INTERPRET=1 in the environment",
    )


def interpreting() -> bool:
    """Whether kernels are interpreted."""
    return os.environ.get(VARIABLE, "0") == "1"
