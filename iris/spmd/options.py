"""What a decorated function was told."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """What the decorator was told."""

    name: str
    mesh: Any = None
    in_specs: Any = None
    out_specs: Any = None
    lowering: str | None = None
    fuse: bool = True
    replay: bool = True
    outputs: str = "fresh"
    config: Any = None
    alike: bool = True  # whether all ranks trace the same text
