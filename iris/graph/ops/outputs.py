"""Whether the values that a program returns are what its out_specs claim."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from iris.errors import TypeRuleError
from iris.graph.types import TensorType

# Per dim, the axes that split it; shorter than the value's dims where the last ones are not split.
Spec = Sequence[Sequence[str]]


class Output(NamedTuple):
    """A returned value, what its out_spec claims, its name and the line that made it."""

    type: TensorType
    spec: Spec
    name: str
    loc: str = ""


def check_outputs(outputs: Iterable[Output]) -> None:
    """Error naming every returned value whose out_spec claims what its type denies.

    Denied are: a sum still due; a value that differs over an axis that the spec does not name; a
    split over an axis that the spec puts elsewhere. A replicated or varying value may be claimed to
    be split: its ranks' values are then the shards.
    """
    faults: list[str] = []
    helps: dict[str, None] = {}
    for output in outputs:
        for fault, help in _faults(output):
            faults.append(f"  {fault}")
            helps[help] = None
    if faults:
        count = f"{len(faults)} returned values are" if len(faults) > 1 else "a returned value is"
        raise TypeRuleError(
            "\n".join([f"{count} not what out_specs says", *faults]), help="; ".join(helps)
        )


def _faults(output: Output) -> Iterable[tuple[str, str]]:
    """What is wrong with one output, and the way out of it."""
    type, spec, name, loc = output
    claimed = {axis for axes in spec for axis in axes}
    what, line = f"%{name}: {type}, out_spec {format_spec(spec)}:", f" at {loc}" if loc else ""
    made = f", made{line}" if loc else ""
    for axis in type.partial:
        collective = "reduce_scatter" if axis in claimed else "all_reduce"
        yield (
            f"{what} a sum over {axis!r} is still due, {collective} missing{line}",
            f"{collective} partial values before returning them",
        )
    for axis in type.varying:
        if axis not in claimed:
            yield (
                f"{what} ranks of {axis!r} may hold different values{made}",
                f"all_reduce or all_gather over {axis!r}, or name it in the out_spec",
            )
    for dim, axes in enumerate(type.spec):
        stated = tuple(spec[dim]) if dim < len(spec) else ()
        if axes and axes != stated:
            yield (
                f"{what} dim {dim} is split over {' and '.join(map(repr, axes))}{made}",
                "all_gather that dim, or split it in the out_spec",
            )


def format_spec(spec: Spec) -> str:
    """A spec as users write it: ``P('tp', None)``."""
    dims = []
    for axes in spec:
        names = tuple(axes)
        dims.append(repr(names[0] if len(names) == 1 else names or None))
    return f"P({', '.join(dims)})"
