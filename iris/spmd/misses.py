"""Why a call was traced again: its difference from the closest one (``IRIS_LOG=cache``)."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from iris import config
from iris.logging import logger

TENSOR_FIELDS = ("dtype", "shape", "stride", "device", "requires_grad", "conj and neg")
DTENSOR_FIELDS = (*TENSOR_FIELDS, "placements", "mesh", "global shape")
RETRACES_BEFORE_WARNING = 8

Key = Sequence[object]


@dataclass
class Misses:
    """What has made one function trace again so far."""

    values: dict[str, set[object]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def note(self, name: str, labels: Sequence[str], key: Key, known: Iterable[Key]) -> None:
        """``name`` was called with ``key``, not among ``known``; ``labels`` name its entries."""
        changes = min((differences(labels, key, other) for other in known), key=len, default=None)
        if "cache" in config.log():
            reason = (
                "first call"
                if changes is None
                else "; ".join(changes.values()) or "what it reads from outside"
            )
            logger().debug("%s: traced: %s", name, reason)
        for label, text in (changes or {}).items():
            self._count(name, label, text)

    def _count(self, name: str, label: str, text: str) -> None:
        seen = self.values.setdefault(label, set())
        seen.add(text)
        if len(seen) >= RETRACES_BEFORE_WARNING and label not in self.warned and "value" in text:
            self.warned.add(label)
            warnings.warn(
                f"{name} has been traced {len(seen) + 1} times because {label} keeps changing "
                f"({text}): pass it as a tensor to trace once",
                stacklevel=2,
            )


def differences(labels: Sequence[str], key: Key, other: Key) -> dict[str, str]:
    """What each differing entry of two keys means, by label."""
    if len(key) != len(other):
        return {"arguments": "the arguments have another structure"}
    found = {}
    for label, new, old in zip(labels, key, other, strict=True):
        if new != old:
            found[label] = f"{label}: {_change(new, old)}"
    return found


def _change(new: object, old: object) -> str:
    if isinstance(new, tuple) and isinstance(old, tuple):
        if len(new) == len(old) >= len(TENSOR_FIELDS):
            parts = zip(DTENSOR_FIELDS, new, old, strict=False)
            return ", ".join(f"{name} {_show(b)} -> {_show(a)}" for name, a, b in parts if a != b)
        if len(new) == len(old) == 2 and new[0] == old[0]:
            return f"value {old[1]!r} -> {new[1]!r}"
    return "another kind of value"


def _show(value: object) -> str:
    return str(tuple(value)) if isinstance(value, tuple) else str(value)
