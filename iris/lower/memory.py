"""How many bytes a program needs."""

from collections.abc import Mapping
from dataclasses import dataclass

from iris.graph.nodes import Graph, walk
from iris.graph.types import DTYPES, TensorType
from iris.lower.program import Executable


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank: ``heap`` is symmetric workspace, ``local`` the most that values take at
    one time.
    """

    heap: int
    local: int


def memory_of(graph: Graph, executable: Executable | None, coord: Mapping[str, int]) -> Memory:
    """Bytes of ``graph`` at ``coord``: inputs are the caller's and do not count."""

    def size(type_: TensorType) -> int:
        total = DTYPES[type_.dtype]
        for n in type_.local_shape(graph.mesh, coord):
            total *= n
        return total

    nodes = [node for node in walk(graph.nodes) if not node.body]
    last = {name: i for i, node in enumerate(nodes) for name in node.uses}
    last.update(dict.fromkeys(graph.live_out, len(nodes)))
    alive = peak = 0
    ending: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for value in node.outputs:
            alive += size(value.type)
            end = max(last.get(value.name, index), index)
            ending[end] = ending.get(end, 0) + size(value.type)
        peak = max(peak, alive)
        alive -= ending.get(index, 0)
    return Memory(executable.workspace if executable else 0, peak)
