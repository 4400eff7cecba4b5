"""How many bytes a program needs."""

from dataclasses import dataclass

from iris.lower.program import Executable


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank: ``heap`` is symmetric workspace, ``local`` the most that values take at
    one time; inputs are the caller's and do not count.
    """

    heap: int
    local: int


def memory_of(executable: Executable) -> Memory:
    """Bytes that a run needs."""
    roots: dict[str, str] = {}  # of views: in which value they lie
    sizes: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, step in enumerate(executable.steps):
        if step.view:
            roots.update(dict.fromkeys(step.makes, roots.get(step.uses[0], step.uses[0])))
        else:
            sizes.update(zip(step.makes, step.nbytes, strict=True))
        last.update((roots.get(name, name), number) for name in (*step.uses, *step.makes))
    last.update((roots.get(name, name), len(executable.steps)) for name in executable.result.uses)
    alive = peak = 0
    ending: dict[int, int] = {}
    for name, size in sizes.items():
        ending[last[name]] = ending.get(last[name], 0) + size
    for number, step in enumerate(executable.steps):
        alive += 0 if step.view else sum(step.nbytes)
        peak = max(peak, alive)
        alive -= ending.get(number, 0)
    return Memory(executable.workspace, peak)
