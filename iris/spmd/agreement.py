"""What ranks agree on before a program runs: arguments that fit, one graph, no failure."""

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from iris.errors import CollectiveMismatchError, SpecError, TraceError
from iris.graph.nodes import Graph, Node, Ref
from iris.graph.ops import get_op
from iris.graph.ops.groups import coordinates
from iris.graph.ops.rules import axes_of
from iris.graph.types import TensorType
from iris.lower.choices import Choice
from iris.runtime.context import current
from iris.runtime.groups import Group
from iris.spmd.mesh import ProgramMesh
from iris.spmd.specs import Leaf

if TYPE_CHECKING:
    from iris.spmd.program import Program

T = TypeVar("T")

NO_BRANCH = "do not branch on the rank in Python: use iris.axis_index and torch.where"
SAME_SHAPE = "give every rank the same shape: a dim that is folded into another has to split evenly"


def group_of(mesh: ProgramMesh | None) -> Group | None:
    """The group of all ranks of a program; None where there is nobody to agree with."""
    if mesh is not None and mesh.abstract:
        return None
    ctx = current()
    return ctx.world if mesh is None else ctx.group(mesh.ranks)


def shared_text(graph: Graph, alike: bool = True) -> str:
    """The part of a graph's text that all ranks must share: all of it, or its effects where shards
    are uneven, or the program takes this rank's part of values by number (not ``alike``).
    """
    if alike and all(type_.is_even(graph.mesh) for type_ in graph.types.values()):
        return str(graph)
    effects = [node for node in graph.nodes if get_op(node.op).effects]
    lines = [
        f"{node.op}({', '.join([*_sent(graph, node), *(f'{k}={v}' for k, v in node.attrs)])})"
        f"  # {node.loc}"
        for node in effects
    ]
    returned = sum(isinstance(arg, Ref) for arg in graph.outputs)
    return "\n".join([*lines, f"return {returned} values"])


def _sent(graph: Graph, node: Node) -> list[str]:
    """Types of what a collective sends that only this rank's shape tells."""
    axes = axes_of(node.kwargs.get("axis", ()))  # type: ignore[arg-type]
    types = [graph.types[name] for name in node.uses]
    return [str(type_) for type_ in types if not set(axes).isdisjoint(type_.varying)]


def title(name: str, graph: Graph, paths: Sequence[str], types: Sequence[TensorType]) -> str:
    """A program's name, a number made of what ranks agreed on, and its arguments' types (empty
    where those need not agree).
    """
    identity = "\n".join([shared_text(graph, bool(types)), *map(str, types)])
    arguments = ", ".join(f"{path}: {type_}" for path, type_ in zip(paths, types, strict=False))
    return f"program {name} {zlib.crc32(identity.encode()):08x} of ({arguments})"


def one_rank_retraces(error: CollectiveMismatchError, name: str) -> bool:
    """Whether ranks met at the start of one call of program ``name``, not all in the same program.

    NOTE [Same shard]
    A rank's shard does not tell the global size: of 8 and of 7 rows over 4 ranks the first three
    hold 2. So some ranks may find a program of another size while others find none, or another.
    They notice where they first meet, before anything was written; then all compare shapes again.
    A program of kernels meets nobody on the host: once a function has been traced for two sizes
    that some rank cannot tell apart, its calls meet first. Until then there is NOTE [Calls].
    """
    mine = f" in program {name} "
    return bool(error.calls) and all(
        call == f"arguments of {name}" or (mine in call and " #0 " in f"{call} ")
        for call in error.calls
    )


def agreed(group: Group | None, what: str, make: Callable[[], T]) -> T:
    """``make()`` on every rank of ``group``: if it fails on one rank, every rank raises."""
    if group is None or group.size == 1:
        return make()
    try:
        value = make()
    except Exception as error:
        group.exchange_object(what, f"{type(error).__name__}: {error}")
        raise
    reports = zip(group.ranks, group.exchange_object(what, ""), strict=True)
    if lines := "\n".join(f"  rank {rank}: {text}" for rank, text in reports if text):
        raise TraceError(f"{what} failed on another rank\n{lines}")
    return value


def agree_on_choices(program: "Program", group: Group | None) -> None:
    """Where ranks, by shards that differ in size, chose differently, a collective is a kernel of
    its own if one of them does not fuse it, and else runs as the first rank chose.
    """
    if group is None or group.size == 1:
        return
    parts = program.parts or (program,)
    mine = [[_way(choice) for choice in part.choices.values()] for part in parts]
    found: Any = group.exchange_object(f"choices of {program.options.name}", mine)
    if all(other == mine for other in found):
        return
    if any([*map(len, other)] != [*map(len, mine)] for other in found):
        return  # they traced different programs, and will be told so
    for part, chosen in zip(parts, zip(*found, strict=True), strict=True):
        ways = map(set, zip(*chosen, strict=True))
        again = [
            first if len(way) == 1 or way.isdisjoint(ALONE) else "kernel"
            for first, way in zip(chosen[0], ways, strict=True)
        ]
        part.choose_again(again)


ALONE = ("kernel", "unfused", "norm")


def _way(choice: Choice) -> str:
    """The algorithm; "norm" where the sum alone is in a kernel with the norm of it."""
    return "norm" if choice.algorithm == "unfused" and choice.match else choice.algorithm


def agree_on_graph(program: "Program", group: Group | None) -> None:
    """All ranks traced one graph and chose alike, or all raise with the first line that differs."""
    if group is None or group.size == 1:
        return
    parts = program.parts or (program,)
    chosen = ", ".join(str(choice) for part in parts for choice in part.choices.values())
    text = f"{shared_text(program.graph, program.options.alike)}\nstages run as: {chosen}"
    texts = group.exchange_object(f"graph of {program.graph.name}", text)
    sent = not text.startswith("graph ")  # only effects are compared
    for rank, other in zip(group.ranks, texts, strict=True):
        if other != texts[0]:
            pairs = itertools.zip_longest(
                str(texts[0]).splitlines(), str(other).splitlines(), fillvalue=""
            )
            a, b = next((a, b) for a, b in pairs if a != b)
            raise TraceError(
                f"{program.graph.name}: ranks traced different programs; the first line that "
                f"differs:\n  rank {group.ranks[0]}: {a.strip()}\n  rank {rank}: {b.strip()}",
                help=SAME_SHAPE if sent and "]~" in a + b else NO_BRANCH,
            )


Shape = tuple[str, tuple[int, ...]]


def resolve_types(
    name: str, leaves: Sequence[Leaf], mesh: ProgramMesh, shapes: Sequence[Sequence[Shape]]
) -> list[TensorType]:
    """Global types from all ranks' local shapes. SpecError lists every shard that misfits."""
    coords = coordinates(mesh.shape)
    types, wrong = [], []
    for index, leaf in enumerate(leaves):
        held = [shape[index] for shape in shapes]
        if leaf.spec is None:
            dtype, local = held[0]
            types.append(TensorType(dtype, local, varying=mesh.shape.names))
            continue
        type_ = _global_type(leaf, coords, held)
        types.append(type_)
        for rank, coord, (dtype, local) in zip(mesh.ranks, coords, held, strict=True):
            due = type_.local_shape(mesh.shape, coord)
            if (dtype, local) != (type_.dtype, due):
                wrong.append(
                    f"{leaf.path}: rank {rank} holds {dtype}{list(local)}; "
                    f"of {type_} it should hold {type_.dtype}{list(due)}"
                )
                break
    if wrong:
        noun = "argument differs" if len(wrong) == 1 else "arguments differ"
        raise SpecError(
            f"{name}: {len(wrong)} {noun} from the specs on mesh {mesh.shape}\n  "
            + "\n  ".join(wrong),
            help="shards follow torch.chunk: all of the rounded-up size, "
            "the last ones smaller or empty",
        )
    return types


def _global_type(leaf: Leaf, coords: Sequence[dict[str, int]], held: Sequence[Shape]) -> TensorType:
    """The type whose sizes are the sums of the shards' along each split dim."""
    assert leaf.spec is not None
    dtype, first = held[0]
    spec, sizes = leaf.spec.padded(len(first)), list(first)
    for dim, axes in enumerate(spec):
        if axes:
            line = [
                shape
                for coord, (_, shape) in zip(coords, held, strict=True)
                if not any(place for axis, place in coord.items() if axis not in axes)
            ]
            sizes[dim] = sum(shape[dim] if dim < len(shape) else 0 for shape in line)
    return TensorType(dtype, tuple(sizes), spec, leaf.spec.partial)
