"""From one call of a decorated function to a runnable program, in agreement with the other
ranks.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from iris import config
from iris.errors import (
    CollectiveMismatchError,
    SpecError,
    TypeRuleError,
    UnsupportedError,
)
from iris.graph.nodes import Graph, Ref, Value
from iris.graph.ops import Output as Returned, check_outputs
from iris.graph.types import Mesh, TensorType
from iris.lower.choices import Choice, choose
from iris.lower.cost import ANY, Profile, profile_of
from iris.lower.dtypes import dtype_name
from iris.lower.epilogue import of_match
from iris.lower.program import Executable, build
from iris.lower.replay import Runner
from iris.lower.sites import Place
from iris.runtime.context import current
from iris.runtime.groups import Group
from iris.spmd.agreement import agree_on_graph, agreed, one_rank_retraces, resolve_types
from iris.spmd.binding import Binder, Bound, alias_key, flat_base
from iris.spmd.context import TraceContext
from iris.spmd.dump import Dump
from iris.spmd.guards import Access
from iris.spmd.importing import Importer
from iris.spmd.mesh import ProgramMesh
from iris.spmd.options import Options
from iris.spmd.specs import Leaf, axes_in, match, offences
from iris.spmd.tracing import Output, Traced, collector_paused, trace


@dataclass(eq=False)
class Program:
    """One traced signature: its graph, before and after the passes, and what binds it to a call."""

    options: Options
    graph: Graph
    fused: Graph
    mesh: ProgramMesh
    captured: tuple[Tensor, ...]
    outputs: tuple[Output, ...]
    out_tree: pytree.TreeSpec
    leaves: tuple[Leaf, ...]  # the tensors among the arguments, as meta tensors
    bases: tuple[tuple[int, ...], ...] = ()  # leaves that share memory, where the program writes
    choices: Mapping[str, Choice] = field(default_factory=dict)
    lowering: str = "torch"
    dump: Dump | None = None
    signature: tuple[TensorType, ...] | None = None  # global types of all that has a spec
    executable: Executable | None = None
    runner: Runner | None = None
    _single: bool = field(init=False)
    _written: list[int] = field(init=False)  # the inputs that the program writes to

    def __post_init__(self) -> None:
        self._single = self.out_tree.is_leaf() and self.outputs[0].kind == "value"
        self._single &= not self.graph.writes
        names = [value.name for value in self.graph.inputs]
        self._written = [names.index(target) for target, _ in self.graph.writes]

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Run on this call's tensor leaves and put the result together."""
        assert self.runner is not None
        inputs = self._with_bases(tensors) if self.bases else tensors
        values = self.runner((*inputs, *self.captured) if self.captured else inputs)
        if self._single:
            return values[0]
        for target, value in zip(self._written, values[len(self.outputs) :], strict=True):
            inputs[target].copy_(value)
        leaves = [
            value if out.kind == "value" else tensors[out.item] if out.kind == "input" else out.item
            for out, value in zip(self.outputs, values, strict=False)
        ]
        return pytree.tree_unflatten(leaves, self.out_tree)

    def _with_bases(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        shared = {index for members in self.bases for index in members}
        rest = [tensor for index, tensor in enumerate(tensors) if index not in shared]
        flat = [
            flat_base([tensors[i] for i in members], self.options.name)[0] for members in self.bases
        ]
        return [*rest, *flat]


class Compiler:
    """Makes the program of one call. ``run()`` is collective over the program's mesh."""

    def __init__(
        self,
        fn: Callable[..., Any],
        binder: Binder,
        bound: Bound,
        options: Options,
        watched: Sequence[Access],
        variants: Sequence["Program"],
        held: Sequence[Leaf] = (),
    ) -> None:
        self.fn, self.binder, self.bound = fn, binder, bound
        self.held = [leaf for leaf in held if leaf.spec is not None]  # of the method's module
        self.held_types: dict[int, Value] = {}  # by the tensor's id
        self.variants = variants
        self.options, self.watched = options, watched
        self.name = options.name

    def run(self) -> Program:
        """Check specs, trace, import, run the passes, and agree with the other ranks."""
        mesh = self._mesh()
        group = _group(mesh)
        leaves = self._agreed_leaves(mesh, group)
        types = self._types([*leaves, *self.held], mesh, group)
        known = self._known(types, group)
        if known is not None:
            return known
        signature = None if types is None else tuple(types)
        if types is not None:
            self._type_held(types[len(leaves) :])
            types = types[: len(leaves)]
        program = agreed(group, f"trace of {self.name}", lambda: self._trace(leaves, types, mesh))
        chosen = [choice.algorithm for choice in program.choices.values()]
        everyone = group or _group(program.mesh)
        agree_on_graph(program.graph, chosen, everyone, self.options.alike)
        program.signature = signature
        return program

    def _agreed_leaves(self, mesh: ProgramMesh | None, group: Group | None) -> list[Leaf]:
        what = f"arguments of {self.name}"
        try:
            return agreed(group, what, lambda: self._leaves(mesh))
        except CollectiveMismatchError as error:
            if not one_rank_retraces(error, self.name):
                raise
            return agreed(group, what, lambda: self._leaves(mesh))  # now the others trace too

    def _known(self, types: list[TensorType] | None, group: Group | None) -> "Program | None":
        """A program of these global types, where every rank has one: see NOTE [Same shard]."""
        if types is None or group is None or group.size == 1:
            return None
        found = next((p for p in self.variants if p.signature == tuple(types)), None)
        answers = group.exchange_object(f"programs of {self.name}", found is not None)
        return found if all(answers) else None

    def _mesh(self) -> ProgramMesh | None:
        options = self.options
        if options.mesh is not None:
            return ProgramMesh.of(options.mesh)
        claims = [leaf.spec for leaf in self.held]
        names = axes_in((options.in_specs, options.out_specs, claims))
        if len(names) > 1:
            raise SpecError(
                f"{self.name}: specs use axes {', '.join(map(repr, names))}, and no mesh is given",
                help="pass mesh=iris.mesh(shape, names) to @iris.spmd",
            )
        return ProgramMesh.world(names[0]) if names else None

    def _type_held(self, types: Sequence[TensorType]) -> None:
        values = zip(_names(self.held), types, strict=True)
        for leaf, (name, type_) in zip(self.held, values, strict=True):
            self.held_types[id(leaf.value)] = Value(f"self_{name}", type_)

    def _leaves(self, mesh: ProgramMesh | None) -> list[Leaf]:
        """Every leaf of the arguments with its spec; SpecError that lists all offenders."""
        values = dict(zip(self.binder.names, self.bound.values, strict=True))
        specs, leaves = self._specs_by_name(), []
        shape = mesh.shape if mesh else Mesh(())
        for name, value in values.items():
            if name in self.binder.static:
                continue
            try:
                leaves += match(specs.get(name), value, shape, name)
            except SpecError as error:
                raise SpecError(f"{self.name}: {error.message}", help=error.help) from None
        wrong = offences([*leaves, *self.held], shape)
        if wrong:
            noun = "spec does" if len(wrong) == 1 else "specs do"
            raise SpecError(
                f"{self.name}: {len(wrong)} {noun} not fit the arguments\n  " + "\n  ".join(wrong),
                help="a P has at most one entry a dim; non-tensors take None",
            )
        tensors = [leaf for leaf in leaves if isinstance(leaf.value, Tensor)]
        if mesh is None or not mesh.abstract:
            self._check_devices(tensors)
        return tensors

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
                raise SpecError(
                    f"{self.name}: in_specs names {unknown[0]!r}, which is no parameter"
                )
            return dict(specs)
        if len(specs) != len(names):
            raise SpecError(
                f"{self.name}: in_specs has {len(specs)} entries for {len(names)} parameters "
                f"({', '.join(names)})",
                help="one entry a parameter, None where nothing is claimed",
            )
        return dict(zip(names, specs, strict=True))

    def _types(
        self, leaves: Sequence[Leaf], mesh: ProgramMesh | None, group: Group | None
    ) -> list[TensorType] | None:
        """Global types of the tensor leaves, known once all ranks' shapes are; None while there is
        no mesh.
        """
        if mesh is None:
            return None
        mine = [(dtype_name(leaf.value.dtype), tuple(leaf.value.shape)) for leaf in leaves]
        if not any(leaf.spec is not None for leaf in leaves) or group is None:
            shapes = [mine] * len(mesh.ranks)
        else:
            shapes = group.exchange_object(f"shapes of {self.name}", mine)  # type: ignore[assignment]
        return resolve_types(self.name, leaves, mesh, shapes)

    @collector_paused()
    def _trace(
        self, leaves: Sequence[Leaf], types: list[TensorType] | None, mesh: ProgramMesh | None
    ) -> Program:
        traced, context = self._run_trace(leaves, types, mesh, ())
        program = self._import(traced, context, leaves, types, ())
        if program.graph.writes:
            groups: dict[int, list[int]] = {}
            for index, (first, _) in enumerate(alias_key(self.bound.tensors)):
                groups.setdefault(first, []).append(index)
            bases = tuple(tuple(members) for members in groups.values() if len(members) > 1)
            if bases:
                traced, context = self._run_trace(leaves, types, context.mesh, bases)
                program = self._import(traced, context, leaves, types, bases)
        return program

    def _run_trace(
        self,
        leaves: Sequence[Leaf],
        types: list[TensorType] | None,
        mesh: ProgramMesh | None,
        bases: tuple[tuple[int, ...], ...],
    ) -> tuple[Traced, TraceContext]:
        context = TraceContext(self.name, mesh)
        context.type_of = self._prober(context, leaves, types, bases)
        held = [value.type for value in self.held_types.values()]
        for type_ in [*(types or ()), *held]:
            for n, axes in zip(type_.shape, type_.spec, strict=True):
                if axes:
                    context.know(axes, n)
        tensors, spread = _based(self.bound.tensors, bases, self.name)

        def rebuild(inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return self.binder.rebuild(self.bound.values, spread(inputs))

        return trace(self.fn, rebuild, tensors, context, self.watched), context

    def _prober(
        self,
        context: TraceContext,
        leaves: Sequence[Leaf],
        types: list[TensorType] | None,
        bases: tuple[tuple[int, ...], ...],
    ) -> Callable[[Tensor], TensorType]:
        """A function that tells the type of a traced tensor, by importing what was traced so
        far.
        """
        probe: list[tuple[Importer, list[Value]]] = []

        def type_of(x: Tensor) -> TensorType:
            recorder = context.recorder
            if not probe:
                assert context.mesh is not None
                inputs = self._inputs(leaves, types, context.mesh, bases)
                probe.append((self._importer(context, context.mesh), inputs))
            importer, inputs = probe[0]
            importer.advance(recorder.module, recorder.graph, inputs)
            inner = torch._C._functorch._unwrap_functional_tensor(x, True)
            return importer.type_of(recorder.node_of(inner))

        return type_of

    def _inputs(
        self,
        leaves: Sequence[Leaf],
        types: list[TensorType] | None,
        mesh: ProgramMesh,
        bases: tuple[tuple[int, ...], ...],
    ) -> list[Value]:
        """Names and types of the graph's inputs: leaves, then the bases of leaves that share
        memory.
        """
        if types is None:
            types = self._local_types(leaves, mesh)
        shared = {index for members in bases for index in members}
        inputs = [
            Value(name, type_)
            for index, (name, type_) in enumerate(zip(_names(leaves), types, strict=True))
            if index not in shared
        ]
        for number, members in enumerate(bases):
            base, _ = flat_base([self.bound.tensors[i] for i in members], self.name)
            type_ = TensorType(dtype_name(base.dtype), tuple(base.shape), varying=mesh.shape.names)
            inputs.append(Value(f"shared{number}", type_))
        return inputs

    def _local_types(self, leaves: Sequence[Leaf], mesh: ProgramMesh) -> list[TensorType]:
        """Types of leaves of which no axis is claimed: all ranks' shapes are taken to be this
        rank's.
        """
        mine = [(dtype_name(leaf.value.dtype), tuple(leaf.value.shape)) for leaf in leaves]
        return resolve_types(self.name, leaves, mesh, [mine] * len(mesh.ranks))

    def _importer(self, context: TraceContext, mesh: ProgramMesh) -> Importer:
        device = torch.device("cpu") if mesh.abstract else current().device
        if len(self.held_types) < len(self.held):  # no axis was named before the trace
            self._type_held(self._local_types(self.held, mesh))
        return Importer(
            self.name,
            mesh.shape,
            dict(mesh.coord),
            device,
            mesh.axes_over,
            context,
            self.held_types,
        )

    def _import(
        self,
        traced: Traced,
        context: TraceContext,
        leaves: Sequence[Leaf],
        types: list[TensorType] | None,
        bases: tuple[tuple[int, ...], ...],
    ) -> Program:
        mesh = context.mesh or ProgramMesh.world("world")
        inputs = self._inputs(leaves, types, mesh, bases)
        importer = self._importer(context, mesh)
        graph = importer.run(traced, inputs)
        self._check_results(traced, graph)
        dump = Dump(self.name)
        fused = dump.passes(graph) if self.options.fuse else graph
        lowering = self._lowering(mesh)
        choices = choose(fused, lowering, _profile(mesh))
        for name, source in generated(choices).items():
            dump.write(f"kernel_{name}", source)
        captured = tuple(importer.captured)
        return Program(
            self.options,
            graph,
            fused,
            mesh,
            captured,
            traced.outputs,
            traced.out_tree,
            tuple(replace(leaf, value=leaf.value.detach().to("meta")) for leaf in leaves),
            bases,
            choices,
            lowering,
            dump,
        )

    def _lowering(self, mesh: ProgramMesh) -> str:
        """How stages run: what the decorator or the environment says, else by the device."""
        name = self.options.lowering or config.lowering()
        if name != "auto":
            return name
        return "torch" if not mesh.abstract and current().device.type == "cpu" else "triton"

    def _check_results(self, traced: Traced, graph: Graph) -> None:
        """Every result against its out-spec."""
        if self.options.out_specs is None:
            return
        tree = pytree.tree_unflatten(list(range(len(traced.outputs))), traced.out_tree)
        locs = {value.name: node.loc for node in graph.nodes for value in node.outputs}
        types = graph.types
        try:
            leaves = match(self.options.out_specs, tree, graph.mesh, "result")
        except SpecError as error:
            raise SpecError(f"{self.name}: {error.message}", help=error.help) from None
        returned = []
        for leaf in leaves:
            arg = graph.outputs[leaf.value]
            if leaf.spec is None or not isinstance(arg, Ref):
                continue
            type_ = types[arg.name]
            due = tuple(axis for axis in type_.partial if axis not in leaf.spec.partial)
            returned.append(
                Returned(
                    replace(type_, partial=due), leaf.spec.dims, arg.name, locs.get(arg.name, "")
                )
            )
        try:
            check_outputs(returned)
        except TypeRuleError as error:
            raise TypeRuleError(f"{self.name}: {error.message}", help=error.help) from None


def prepare(program: Program) -> None:
    """Make ``program`` runnable on this rank: allocate workspaces, load kernels. Collective over
    its mesh.
    """
    if program.mesh.abstract:
        raise UnsupportedError(
            f"{program.options.name}: an abstract mesh has no ranks to run on",
            help="trace it only, or use iris.mesh(shape, names) over a started world",
        )
    if program.executable is None:
        ctx, mesh = current(), program.mesh
        place = Place(dict(mesh.coord), ctx, lambda axes: ctx.group(mesh.members(axes)))
        program.executable = build(program.fused, program.choices, place, program.lowering)
        if program.dump is not None:
            program.dump.write("plan", program.executable.text)
        options = program.options
        reuse = options.outputs == "reuse"
        program.runner = Runner(
            program.executable, ctx, ctx.group(mesh.ranks), options.name, options.replay, reuse
        )


def _profile(mesh: ProgramMesh) -> Profile | None:
    """What one rank has of its GPU; None on CPU ranks. An abstract mesh is taken to be of GPUs."""
    if mesh.abstract:
        return ANY
    ctx = current()
    if ctx.device.type == "cpu":
        return None
    profile = profile_of(torch.cuda.get_device_name(ctx.device))
    return profile.shared(ctx.ranks_on_device, ctx.get_usable_units())


def generated(choices: Mapping[str, Choice]) -> dict[str, str]:
    """The Triton functions generated for fused stages, by stage and result."""
    found = {}
    for name, choice in choices.items():
        epilogue = of_match(choice.match) if choice.match is not None else None
        if choice.match is not None and epilogue is not None:
            found[f"{choice.match.stage}_{name}"] = epilogue.source
    return found


def _group(mesh: ProgramMesh | None) -> Group | None:
    """The group of all ranks of a program; None where there is nobody to agree with."""
    if mesh is not None and mesh.abstract:
        return None
    ctx = current()
    return ctx.world if mesh is None else ctx.group(mesh.ranks)


def _names(leaves: Sequence[Leaf]) -> list[str]:
    """A graph name for each leaf: ``cond['a'][0]`` becomes ``cond_a_0``."""
    names: dict[str, None] = {}
    for leaf in leaves:
        name = re.sub(r"\W+", "_", leaf.path).strip("_")
        while name in names or re.fullmatch(r"captured\d+|shared\d+|\d+", name):
            name += "_"
        names[name] = None
    return list(names)


def _based(
    tensors: Sequence[Tensor], bases: tuple[tuple[int, ...], ...], name: str
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Tensor]]]:
    """Inputs for a trace in which overlapping leaves are views of one flat base, and the way back
    to leaves.
    """
    shared = {index for members in bases for index in members}
    rest = [index for index in range(len(tensors)) if index not in shared]
    made = [flat_base([tensors[i] for i in members], name) for members in bases]

    def spread(inputs: Sequence[Tensor]) -> list[Tensor]:
        leaves = dict(zip(rest, inputs, strict=False))
        for members, base, (_, offsets) in zip(bases, inputs[len(rest) :], made, strict=True):
            for index, offset in zip(members, offsets, strict=True):
                leaf = tensors[index]
                leaves[index] = base.as_strided(leaf.shape, leaf.stride(), offset)
        return [leaves[index] for index in range(len(tensors))]

    return [*(tensors[i] for i in rest), *(base for base, _ in made)], spread
