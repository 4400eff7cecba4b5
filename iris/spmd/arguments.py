"""The arguments of one call beside their specs: what fits, and every offender of what does not."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from iris.errors import SpecError
from iris.graph.types import Mesh
from iris.runtime.context import current
from iris.spmd.binding import Binder, Bound, is_dtensor, local_part
from iris.spmd.mesh import ProgramMesh
from iris.spmd.modules import Buffer
from iris.spmd.options import Options
from iris.spmd.specs import Leaf, axes_in, from_placements, match, offences


@dataclass(frozen=True)
class Arguments:
    """One call of a function. ``held`` are tensors of the method's module that have a spec, and
    ``buffers`` what it may write to.
    """

    options: Options
    binder: Binder
    bound: Bound
    held: Sequence[Leaf] = ()
    buffers: Sequence[Buffer] = ()

    @property
    def name(self) -> str:
        return self.options.name

    def mesh(self) -> ProgramMesh | None:
        """Where the program runs, as far as options, DTensors and specs say."""
        options = self.options
        if options.mesh is not None:
            return ProgramMesh.of(options.mesh)
        placed = {
            leaf.device_mesh for leaf in pytree.tree_leaves(self.bound.values) if is_dtensor(leaf)
        }
        if len(placed) > 1:
            raise SpecError(
                f"{self.name}: DTensors on {len(placed)} meshes", help="place them on one mesh"
            )
        if placed:
            return ProgramMesh.of(placed.pop())
        claims = [leaf.spec for leaf in self.held]
        names = axes_in((options.in_specs, options.out_specs, claims))
        if len(names) > 1:
            raise SpecError(
                f"{self.name}: specs use axes {', '.join(map(repr, names))}, and no mesh is given",
                help="pass mesh=iris.mesh(shape, names) to @iris.spmd",
            )
        return ProgramMesh.world(names[0]) if names else None

    def leaves(self, mesh: ProgramMesh | None) -> list[Leaf]:
        """Every leaf of the arguments with its spec; SpecError that lists all offenders."""
        leaves: list[Leaf] = []
        shape = mesh.shape if mesh else Mesh(())
        try:
            specs = self._specs_by_name()
            for name, value in zip(self.binder.names, self.bound.values, strict=True):
                if name not in self.binder.static:
                    leaves += match(specs.get(name), value, shape, name)
            if wrong := offences([*leaves, *self.held], shape):
                noun = "spec does" if len(wrong) == 1 else "specs do"
                raise SpecError(
                    f"{len(wrong)} {noun} not fit the arguments\n  " + "\n  ".join(wrong),
                    help="a P has at most one entry a dim; non-tensors take None",
                )
            leaves = self._localised(leaves, mesh) if mesh else leaves
        except SpecError as error:
            raise SpecError(f"{self.name}: {error.message}", help=error.help) from None
        tensors = [leaf for leaf in leaves if isinstance(leaf.value, Tensor)]
        if mesh is None or not mesh.abstract:
            self._check_devices(tensors)
        return tensors

    def _localised(self, leaves: Sequence[Leaf], mesh: ProgramMesh) -> list[Leaf]:
        """``leaves`` with each DTensor's local part, and the spec that its placements mean."""
        wrong, found = [], []
        for leaf in leaves:
            if is_dtensor(leaf.value):
                sizes, ranks = ProgramMesh.places(leaf.value.device_mesh)
                if (sizes, ranks) != (mesh.sizes, mesh.ranks):
                    there = f"{list(mesh.ranks)} as {mesh.shape}"
                    wrong.append(f"{leaf.path}: on ranks {list(ranks)} as {sizes}, not {there}")
                    continue
                own = from_placements(leaf.value.placements, mesh.shape, leaf.path)
                if leaf.spec is not None and not leaf.spec.means(own, leaf.value.dim()):
                    wrong.append(f"{leaf.path}: placed as {own}, not {leaf.spec}")
                leaf = Leaf(leaf.path, local_part(leaf.value), own)
            found.append(leaf)
        if wrong:
            noun = "DTensor does" if len(wrong) == 1 else "DTensors do"
            raise SpecError(
                f"{len(wrong)} {noun} not fit the program\n  " + "\n  ".join(wrong),
                help="redistribute it, or leave its spec out: a DTensor has its own",
            )
        return found

    def _check_devices(self, leaves: Sequence[Leaf]) -> None:
        """SpecError that lists every tensor that is not where the program runs."""
        device = current().device
        away = [leaf for leaf in leaves if leaf.value.device != device]
        if away:
            noun = "tensor is" if len(away) == 1 else "tensors are"
            lines = "".join(f"\n  {leaf.path}: on {leaf.value.device}" for leaf in away)
            raise SpecError(
                f"{self.name}: {len(away)} {noun} not on {device}, where the program runs{lines}",
                help="move them with .to(ctx.device), or start the context on their device",
            )

    def _specs_by_name(self) -> dict[str, Any]:
        specs, names = self.options.in_specs, self.binder.names
        if specs is None or not isinstance(specs, dict | tuple | list):
            return dict.fromkeys(names, specs)
        if isinstance(specs, dict):
            unknown = sorted(set(specs) - set(names))
            if unknown:
                raise SpecError(f"in_specs names {unknown[0]!r}, which is no parameter")
            return dict(specs)
        if len(specs) != len(names):
            raise SpecError(
                f"in_specs has {len(specs)} entries for {len(names)} parameters "
                f"({', '.join(names)})",
                help="one entry a parameter, None where nothing is claimed",
            )
        return dict(zip(names, specs, strict=True))


# Names of other values of a graph, and what the text of a plan uses.
_TAKEN = re.compile(r"(captured|shared|saved|grad|v|)\d+|self_.*|float")


def graph_names(leaves: Sequence[Leaf]) -> list[str]:
    """A graph name for each leaf: ``cond['a'][0]`` becomes ``cond_a_0``."""
    names: dict[str, None] = {}
    for leaf in leaves:
        name = re.sub(r"\W+", "_", leaf.path).strip("_")
        while name in names or _TAKEN.fullmatch(name):
            name += "_"
        names[name] = None
    return list(names)
