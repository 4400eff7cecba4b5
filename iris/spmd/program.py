"""A traced call, made ready to run, and run."""

import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from iris.errors import HeapExhaustedError, UnsupportedError
from iris.graph.nodes import Graph
from iris.graph.types import TensorType
from iris.lower.choices import Choice, Choose
from iris.lower.epilogue import generate
from iris.lower.program import Executable, build
from iris.lower.replay import Runner
from iris.lower.sites import Place
from iris.runtime.context import current
from iris.spmd.agreement import group_of, title
from iris.spmd.binding import Bases, with_bases
from iris.spmd.dump import Dump
from iris.spmd.mesh import ProgramMesh
from iris.spmd.options import Options
from iris.spmd.specs import Leaf
from iris.spmd.tracing import Output


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
    choose: Choose  # the pass that made ``fused``
    bases: Bases = ()  # leaves that share memory, where the program writes
    dump: Dump | None = None
    signature: tuple[TensorType, ...] | None = None  # global types of all that has a spec
    executable: Executable | None = None
    runner: Runner | None = None
    plan: str = ""  # the text that runs
    whole: str = ""  # of a part: the title of the program that it is a part of
    _single: bool = field(init=False)  # one result, and nothing to do but to run
    _flat: type | None = field(init=False)  # of a tuple or list of results
    _written: list[int] = field(init=False)  # the inputs that the program writes to

    def __post_init__(self) -> None:
        tree = self.out_tree
        self._single = tree.is_leaf() and self.outputs[0].kind == "value"
        self._single &= not (self.graph.writes or self.captured or self.bases)
        flat = tree.type in (tuple, list) and tree.num_nodes == tree.num_leaves + 1
        self._flat = tree.type if flat else None
        names = [value.name for value in self.graph.inputs]
        self._written = [names.index(target) for target, _ in self.graph.writes]

    @property
    def parts(self) -> "tuple[Program, ...]":
        """The programs that run in its place."""
        return ()

    @property
    def choices(self) -> Mapping[str, Choice]:
        """How its stages are computed, by the name of a first output."""
        return self.choose.choices

    def choose_again(self, algorithms: Sequence[str]) -> None:
        """Take ``algorithms``, in the order of ``choices``, in place of those chosen."""
        self.choose = replace(self.choose, agreed=algorithms)
        self.fused = self.choose(self.fused)

    @property
    def sizes_differ(self) -> bool:
        """Whether arguments of another global size may look the same on this rank."""
        return self.signature is not None and len(self.mesh.ranks) > 1 and not self.mesh.abstract

    @property
    def title(self) -> str:
        """Which program it is: the same text on all ranks, and another for any other program."""
        if self.whole:  # its own values are of whatever shapes this rank has
            return f"program {self.options.name} {zlib.crc32(self.whole.encode()):08x} of ()"
        types = self.signature or tuple(value.type for value in self.graph.inputs)
        types = types if self.options.alike else ()
        return title(self.options.name, self.graph, [leaf.path for leaf in self.leaves], types)

    @property
    def outside(self) -> Sequence[tuple[str, str, str]]:
        """Steps on a GPU that a CUDA graph cannot hold: text, line, reason."""
        return [] if self.runner is None else self.runner.outside

    @property
    def meets_on_host(self) -> bool:
        """Whether ranks meet on the host in some step."""
        return self.executable is None or any(step.on_host for step in self.executable.steps)

    @property
    def meets(self) -> bool:
        """Whether no meeting of its own comes before what must be the same on all ranks."""
        return self.executable is None or bool(self.executable.fused)

    def meet(self) -> None:
        """Be sure that all ranks are to run this program: see NOTE [Same shard]."""
        group = group_of(self.mesh)
        if group is not None and group.size > 1 and self.meets:
            group.sync(f"call #0 in {self.title}")

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Run on this call's tensor leaves and put the result together."""
        runner = self.runner
        assert runner is not None
        if self._single:
            return runner(tensors)[0]
        inputs = (*with_bases(tensors, self.bases, self.options.name), *self.captured)
        values = runner(inputs)
        leaves = [
            value if out.kind == "value" else inputs[out.item] if out.kind == "input" else out.item
            for out, value in zip(self.outputs, values, strict=False)
        ]
        return self._flat(leaves) if self._flat else pytree.tree_unflatten(leaves, self.out_tree)


def prepare(program: Program) -> None:
    """Allocate workspaces and load kernels on this rank. Collective over the mesh."""
    if program.mesh.abstract:
        raise UnsupportedError(
            f"{program.options.name}: an abstract mesh has no ranks to run on",
            help="trace it only, or use iris.mesh(shape, names) over a started world",
        )
    for part in reversed(program.parts):  # the first is what a call begins with
        prepare(part)
        program.executable, program.runner = part.executable, part.runner
    if program.executable is not None:
        return
    ctx, mesh = current(), program.mesh
    if ctx.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"{program.title} is not ready, and nothing can be loaded in a capture",
            help="call it once before the capture",
        )
    group = ctx.group(mesh.ranks)
    place = Place(dict(mesh.coord), ctx, lambda axes: ctx.group(mesh.members(axes)))
    prepared = group.kept.setdefault("programs", weakref.WeakSet())
    while program.executable is None:
        try:
            program.executable = build(
                program.fused, program.choices, place, program.choose.lowering
            )
        except HeapExhaustedError:  # on all ranks alike, as is the order of calls
            if not prepared:
                raise
            oldest = min(prepared, key=lambda other: (other.runner.used, other.title))
            oldest.executable = oldest.runner = None  # until it is prepared again
            prepared.remove(oldest)
    program.plan = program.executable.text
    if program.dump is not None:
        program.dump.write("plan", program.plan)
    options = program.options
    program.runner = Runner(
        program.executable,
        ctx,
        group,
        program.title,
        replay=options.replay,
        reuse=options.outputs == "reuse",
        written=program._written,
    )
    prepared.add(program)


def generated(choices: Mapping[str, Choice]) -> dict[str, str]:
    """The Triton functions generated for fused stages, by stage and result."""
    found = {}
    for choice in choices.values():
        for chain in choice.match.chains if choice.match is not None else ():
            epilogue = generate(chain)
            if choice.match is not None and epilogue is not None:
                found[f"{choice.match.stage}_{chain.result}"] = epilogue.source
    return found
