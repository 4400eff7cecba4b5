"""Every ``IRIS_*`` environment variable, declared once.

``config.timeout()`` reads the environment each time it is called, so a test or a notebook may
change a knob while it runs. ``knobs()`` lists them all (the documentation is made from it).
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Generic, TypeVar

from iris.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One environment variable: its name, how its text is read, and what it means.

    ``allowed`` says in words which values are good; ``parse`` raises ``ValueError`` on any other.
    ``in_cache_key`` is true where a program compiled under one value must not be used under
    another.
    """

    name: str
    parse: Callable[[str], T]
    default: Callable[[], T]
    allowed: str
    doc: str
    in_cache_key: bool = False

    def is_set(self) -> bool:
        """Say whether the environment gives a value."""
        return bool(os.environ.get(self.name, "").strip())

    def __call__(self) -> T:
        """Return the value in force now. Raises ``ConfigError`` that lists the allowed values."""
        text = os.environ.get(self.name, "").strip()
        return self.read(text, self.name) if text else self.default()

    def read(self, text: str, source: str) -> T:
        """Return the value of ``text``, or raise ``ConfigError`` that names its ``source``."""
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigError(
                f"{source}={text!r} is not allowed", help=f"set it to {self.allowed}"
            ) from None


def whole(name: str, value: Any, least: int) -> int:
    """Return an argument that is to be a whole number from ``least`` to 2**62."""
    number = isinstance(value, Real)
    if number and least <= value <= 1 << 62 and value % 1 == 0:
        return int(value)
    raise ConfigError(f"{name}={value!r} must be a whole number from {least} to 2**62")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1e9:  # kernels count nanoseconds in 64 bits
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return parse


def _choice(name: str, names: tuple[str, ...], doc: str, in_cache_key: bool = False) -> Knob[str]:
    """Return a knob that takes one of ``names``; the first is the default."""
    allowed = "one of: " + ", ".join(names)
    return Knob(name, _one_of(*names), lambda: names[0], allowed, doc, in_cache_key)


def _flag(text: str) -> bool:
    return _one_of("0", "1")(text) == "1"


LOG_TOPICS = ("cache", "heap")


def _topics(text: str) -> frozenset[str]:
    topics = frozenset(part.strip() for part in text.split(",") if part.strip())
    if not topics <= set(LOG_TOPICS):
        raise ValueError(text)
    return topics


def _directory(text: str) -> Path:
    return Path(text).expanduser()


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "iris"


timeout = Knob(
    "IRIS_TIMEOUT",
    _seconds,
    lambda: 60.0,
    "a number of seconds above 0, at most 1e9",
    "Longest time a rank waits for its peers, in seconds.",
)
slow = Knob(
    "IRIS_SLOW",
    _seconds,
    lambda: 10.0,
    "a number of seconds above 0, at most 1e9",
    "Time in seconds after which a wait for a peer is logged, with where every rank is.",
)
allocator = _choice(
    "IRIS_ALLOCATOR",
    ("torch", "vmem", "symm_mem"),
    "What the symmetric heap is made of; overrides the allocator_type argument.",
)
device = _choice(
    "IRIS_DEVICE", ("auto", "cpu", "cuda"), "Where ranks put their heap.", in_cache_key=True
)
lowering = _choice(
    "IRIS_LOWERING",
    ("auto", "torch", "triton"),
    "How stages run: as torch ops over the heap, or as Triton kernels.",
    in_cache_key=True,
)
log: Knob[frozenset[str]] = Knob(
    "IRIS_LOG",
    _topics,
    frozenset,
    "a comma list out of: " + ", ".join(LOG_TOPICS),
    "Topics to log: why a program is traced again (cache), every allocation (heap).",
)
dump: Knob[Path | None] = Knob(
    "IRIS_DUMP",
    _directory,
    lambda: None,
    "a folder",
    "Folder that receives every graph, plan and generated kernel.",
)
check = Knob(
    "IRIS_CHECK",
    _flag,
    lambda: False,
    "0 or 1",
    "1 looks for races, and for writes beside heap blocks (slow); see docs/checking.md.",
    in_cache_key=True,
)
copy_queue = Knob(
    "IRIS_COPY_QUEUE",
    _count,
    lambda: 1024,
    "a whole number above 0",
    "Requests that a kernel can have in flight to a peer's copy engine before it waits.",
)
cache_dir = Knob(
    "IRIS_CACHE_DIR",
    _directory,
    _default_cache,
    "a folder",
    "Folder for generated kernels and tuning results; made with mode 0700.",
)


def private_folder(name: str) -> Path:
    """Return a folder of this user's in the cache folder, made with mode 0700.

    Raises ``ConfigError`` where it belongs to another user: what is in it is trusted.
    """
    folder = Path(cache_dir()) / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise ConfigError(
            f"the cache folder {folder} belongs to another user",
            help="set IRIS_CACHE_DIR to a folder of your own",
        )
    return folder


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600 whole, in place of what is there: others read one or the other."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)


def knobs() -> tuple[Knob[object], ...]:
    """Return every knob, by name."""
    found = [value for value in globals().values() if isinstance(value, Knob)]
    return tuple(sorted(found, key=lambda knob: knob.name))
