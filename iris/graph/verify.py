"""Whether a graph is well formed, and whether a pass kept what it must."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from iris.errors import GraphError, IrisError
from iris.graph.congruence import congruence
from iris.graph.nodes import Graph, Node, Value, map_refs, walk
from iris.graph.ops import InferContext, Local, effects, infer_node
from iris.graph.types import Mesh, TensorType


def verify(graph: Graph, before: Graph | None = None) -> None:
    """GraphError naming every fault of ``graph``.

    Values are defined once and before their uses; stages read and give what their bodies do; types
    are what the rules infer. With ``before``, the graph that a pass was given: no effect was
    dropped, added or moved past another, but for gathers of one value that became one.
    """
    faults = [*_scope_faults(graph), *_type_faults(graph, before)]
    if before is not None:
        faults += _effect_faults(before, graph)
    if faults:
        raise GraphError("\n  ".join([f"graph {graph.name} is malformed", *faults]))


def infer_types(
    node: Node, types: Mapping[str, TensorType], mesh: Mesh, place: Mapping[str, int]
) -> tuple[TensorType, ...]:
    """Types of the outputs of ``node`` by its rule, given the types of all values that it reads."""
    locals = [Local(v.type.dtype, v.type.local_shape(mesh, place)) for v in node.outputs]
    type_of: Any = types.__getitem__
    args = [map_refs(arg, type_of) for arg in node.args]
    attrs = {key: map_refs(arg, type_of) for key, arg in node.attrs}
    return infer_node(node.op, InferContext(mesh, place, node.loc), args, attrs, locals)


def external_uses(body: Sequence[Node]) -> tuple[str, ...]:
    """Names that a body reads and does not define, in order of first use."""
    made = {value.name for node in body for value in node.outputs}
    return tuple(dict.fromkeys(name for node in body for name in node.uses if name not in made))


def _scope_faults(graph: Graph) -> Iterable[str]:
    """Uses before definitions, names given twice, stages that do not match their bodies."""
    taken = [v.name for v in graph.inputs]
    known = set(taken)
    for node in graph.nodes:
        yield from (
            f"{_at(node)} reads %{name} before it is defined"
            for name in node.uses
            if name not in known
        )
        if node.body:
            yield from _stage_faults(node, known)
            taken += [v.name for inner in node.body for v in inner.outputs]
        else:
            taken += [v.name for v in node.outputs]
        known.update(v.name for v in node.outputs)
    if len(set(taken)) < len(taken):
        twice = sorted({name for name in taken if taken.count(name) > 1})
        yield f"defined more than once: {', '.join(f'%{name}' for name in twice)}"
    yield from (
        f"returned but never defined: %{name}" for name in graph.live_out if name not in known
    )
    inputs = {value.name for value in graph.inputs}
    yield from (f"written but no input: %{name}" for name, _ in graph.writes if name not in inputs)


def _stage_faults(node: Node, known: set[str]) -> Iterable[str]:
    made: dict[str, Value] = {}
    for inner in node.body:
        for name in inner.uses:
            if name not in known and name not in made:
                yield f"{_at(inner)} in {node.op} reads %{name} before it is defined"
        made.update((value.name, value) for value in inner.outputs)
    if node.uses != external_uses(node.body):
        yield f"{_at(node)} does not read what its body reads"
    for value in node.outputs:
        if made.get(value.name) != value:
            yield f"{_at(node)} gives %{value.name}, which its body does not define so"


def _claims_less(type: TensorType, other: TensorType, graph: Graph) -> bool:
    """Whether ``type`` says no more than what this rank holds of a value of type ``other``."""
    lost = {*other.varying, *other.split_axes, *other.partial}
    held = TensorType(other.dtype, other.local_shape(graph.mesh, graph.place), (), (), type.varying)
    return type == held and lost <= set(type.varying)


def _type_faults(graph: Graph, before: Graph | None) -> Iterable[str]:
    """Types that the rules do not infer. Nodes taken over from ``before`` were looked at there."""
    types = graph.types
    seen: set[int] = set()
    if before is not None:
        old = before.types
        if all(old.get(name, type) == type for name, type in types.items()):
            seen = {id(node) for node in walk(before.nodes)}
    for node in walk(graph.nodes):
        if node.body or id(node) in seen:
            continue
        try:
            inferred = infer_types(node, types, graph.mesh, graph.place)
        except KeyError:
            continue  # it reads what is not defined: said already
        except IrisError as error:
            yield f"{_at(node)}: {error.message}"
            continue
        for value, type in zip(node.outputs, inferred, strict=True):
            if value.type != type and not _claims_less(value.type, type, graph):
                yield f"{_at(node)}: %{value.name} is {value.type}, its rule says {type}"


def _effect_faults(before: Graph, after: Graph) -> Iterable[str]:
    """Effects of ``after`` that are not those of ``before`` in the same order."""
    wanted, found = _effects_of(before), _effects_of(after)
    dropped = [key for key in wanted if key not in found]
    first = congruence(before) if dropped else {}
    for key in dropped:
        if first.get(key) not in found:
            yield f"{_at(wanted[key])} was dropped, and it has effects"
    yield from (
        f"{_at(node)} has effects and is new" for key, node in found.items() if key not in wanted
    )
    if [key for key in wanted if key in found] != [key for key in found if key in wanted]:
        yield "effects are not in the order they were in"


def _effects_of(graph: Graph) -> dict[str, Node]:
    """Nodes with effects in order, by the name of their first output or else their place."""
    table: dict[str, Node] = {}
    for node in walk(graph.nodes):
        if not node.body and effects(node):
            table[node.outputs[0].name if node.outputs else f"#{len(table)}"] = node
    return table


def _at(node: Node) -> str:
    what = f"%{node.outputs[0].name} = {node.op}" if node.outputs else node.op
    return f"{what} ({node.loc})" if node.loc else what
