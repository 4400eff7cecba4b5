"""A graph as straight-line Python: the plan that a rank runs, and what ``as_text()`` of a compiled
program shows.

Every node becomes one line. Pure ops are torch calls; a collective or a fused stage is a call of
an object made at compile time, which has its workspace and its place in the group's order.
"""

import functools
import linecache
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor

from iris.errors import UnsupportedError
from iris.graph.nodes import Arg, Graph, Node, Ref, Token, walk
from iris.graph.passes.memory import is_view
from iris.graph.types import DTYPES, TensorType
from iris.lower.choices import Choice
from iris.lower.dtypes import TORCH_DTYPES
from iris.lower.sites import MAKERS, KernelCollective, Place, Site
from iris.lower.stages import Match
from iris.runtime.groups import Group

COMMENT_COLUMN = 60


@dataclass(frozen=True)
class Step:
    """One line of the plan: it makes some values of others.

    ``device`` is where, if the line says so. ``on_host`` says why the host takes part in it.
    ``once`` is for communication, which peers take part in. ``nbytes`` are of what it allocates;
    what a ``view`` makes lies in the first value that it uses. ``workspace`` are bytes that its
    kernel uses on the heap, in turns with those of other steps.
    """

    text: str
    uses: tuple[str, ...]
    makes: tuple[str, ...]
    loc: str
    device: str = ""
    on_host: str = ""
    once: bool = False
    nbytes: tuple[int, ...] = ()
    view: bool = False
    workspace: int = 0


@dataclass(frozen=True)
class Part:
    """Some steps of a plan in a row: ``run`` takes the values ``uses`` and returns ``makes``."""

    run: Callable[..., tuple[Any, ...]]
    uses: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True)
class Executable:
    """``run(*inputs)`` returns the graph's outputs, then the values of its in-place writes.

    ``text`` is the source that runs, ``workspace`` the bytes it uses on the symmetric heap,
    ``fused`` its kernels. ``run_steps(inputs, each)`` does the same by calls of
    ``each(number, step)``, which runs ``step()``.
    """

    run: Callable[..., tuple[Any, ...]]
    text: str
    workspace: int
    fused: tuple[Any, ...]
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: int  # how many results come before the values of writes
    run_steps: Callable[[Sequence[Any], Callable[[int, Callable[[], None]], None]], tuple[Any, ...]]
    part: Callable[[int, int], Part]  # the steps from one number to before another
    result: Part  # what ``run`` returns, of the values that are left


def build(graph: Graph, choices: Mapping[str, Choice], place: Place, lowering: str) -> Executable:
    """Compile ``graph`` for one rank. Collective: all ranks of the mesh build the same graph."""
    writer = _Writer(graph, choices, place, lowering)
    if lowering != "triton":
        return writer.build()
    from iris.lower.kernels.workspace import shared  # brings in triton

    with shared() as arenas:
        executable = writer.build()
    heap = executable.workspace + sum(arena.nbytes for arena in arenas.values())
    return replace(executable, workspace=heap)


@dataclass
class _Writer:
    graph: Graph
    choices: Mapping[str, Choice]
    place: Place
    lowering: str
    space: dict[str, Any] = field(default_factory=dict)
    groups: dict[Group, None] = field(default_factory=dict)
    fused: list[Any] = field(default_factory=list)
    sites: int = 0  # collectives so far
    types: dict[str, TensorType] = field(init=False)

    def __post_init__(self) -> None:
        self.types = self.graph.types

    def build(self) -> Executable:
        steps = [step for node in self.graph.nodes for step in self._steps(node)]
        inputs = tuple(value.name for value in self.graph.inputs)
        values = [*self.graph.outputs, *(Ref(value) for _, value in self.graph.writes)]
        values_text = "".join(f"{self._text(arg)}, " for arg in values)
        text = self._function(self._name(), inputs, self._lines(steps), values_text)
        workspace = sum(2 * group.staging(1).nbytes for group in self.groups)
        needed = tuple(dict.fromkeys(arg.name for arg in values if isinstance(arg, Ref)))
        last = self._compile(self._function("result", needed, (), values_text), "result")
        result = Part(last, needed, ())
        return Executable(
            self._compile(text, self._name()),
            text,
            workspace,
            tuple(self.fused),
            tuple(steps),
            inputs,
            len(self.graph.outputs),
            functools.partial(self._run_steps, steps, result),
            functools.partial(self._part, steps),
            result,
        )

    def _run_steps(
        self,
        steps: Sequence[Step],
        result: Part,
        inputs: Sequence[Any],
        each: Callable[[int, Callable[[], None]], None],
    ) -> tuple[Any, ...]:
        names = (_variable(value.name) for value in self.graph.inputs)
        values = dict(zip(names, inputs, strict=True))
        for number, line in enumerate(self._lines(steps)):
            each(number, functools.partial(exec, line, self.space, values))
        return result.run(*(values[_variable(name)] for name in result.uses))

    def _part(self, steps: Sequence[Step], start: int, stop: int) -> Part:
        inner = steps[start:stop]
        made = dict.fromkeys(name for step in inner for name in step.makes)
        used = dict.fromkeys(name for step in inner for name in step.uses if name not in made)
        later = {name for step in steps[stop:] for name in step.uses} | set(self.graph.live_out)
        kept = tuple(name for name in made if name in later)
        result = "".join(f"{_variable(name)}, " for name in kept)
        name = f"{self._name()}_{start}"
        text = self._function(name, tuple(used), self._lines(inner, later), result)
        return Part(self._compile(text, name), tuple(used), kept)

    def _function(
        self, name: str, parameters: Sequence[str], lines: Sequence[str], result: str
    ) -> str:
        body = "".join(f"    {line}\n" for line in [*lines, f"return ({result})"])
        return f"def {name}({', '.join(map(_variable, parameters))}):\n{body}"

    def _name(self) -> str:
        name = self.graph.name
        return name if name.isidentifier() and not iskeyword(name) else "program"

    def _compile(self, text: str, name: str) -> Callable[..., tuple[Any, ...]]:
        filename = f"<iris {name} {id(self.graph):x}>"
        made: dict[str, Callable[..., tuple[Any, ...]]] = {}
        exec(compile(text, filename, "exec"), self.space, made)
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
        run = made[name]
        weakref.finalize(run, linecache.cache.pop, filename, None).atexit = False
        return run

    def _lines(self, steps: Sequence[Step], live: Iterable[str] = ()) -> list[str]:
        """The text of every step, with the values dropped after it: they are not read again."""
        last = {name: i for i, step in enumerate(steps) for name in (*step.makes, *step.uses)}
        kept = {*self.graph.live_out, *(value.name for value in self.graph.inputs), *live}
        lines = []
        for index, step in enumerate(steps):
            touched = dict.fromkeys((*step.uses, *step.makes))
            dead = [name for name in touched if last[name] == index and name not in kept]
            text = step.text + (f"; del {', '.join(map(_variable, dead))}" if dead else "")
            lines.append(f"{text:<{COMMENT_COLUMN}}  # {step.loc}" if step.loc else text)
        return lines

    def _steps(self, node: Node) -> list[Step]:
        choice = self.choices.get(node.outputs[0].name) if node.outputs else None
        if choice is not None and choice.match is not None:
            match = choice.match
            return [
                *map(self._step, match.before),
                self._fused(choice, match, node),
                *map(self._step, match.after),
            ]
        return [self._step(inner) for inner in walk((node,)) if not inner.body]

    def _fused(self, choice: Choice, match: Match, node: Node) -> Step:
        from iris.lower.fused import FusedCall, Values, operands_of, results_of  # brings in triton

        group = self.place.group_of(match.collective)
        values = Values(self.types, self.graph.mesh, self.place.coord)
        call = FusedCall(match, choice, self.place.ctx, group, values)
        name = self._callable(f"{match.stage}_{match.results[0]}", call)
        what = Site(self.graph, self.place, node, len(self.fused)).what
        call.work.named(what, f"{match.stage} %{match.results[0]}")
        self.fused.append(call)
        operands = operands_of(match)
        results = results_of(match)
        targets = "".join(f"{_variable(result)}, " for result in results)
        text = f"{targets}= {name}({', '.join(map(_variable, operands))})"
        types = {**{value.name: value.type for value in match.values}, **self.types}
        nbytes = tuple(self._nbytes(types[name]) for name in results)
        return Step(
            text, operands, results, node.loc, once=True, nbytes=nbytes, workspace=call.workspace
        )

    def _nbytes(self, type_: TensorType) -> int:
        return DTYPES[type_.dtype] * math.prod(type_.local_shape(self.graph.mesh, self.place.coord))

    def _step(self, node: Node) -> Step:
        targets = ", ".join(_variable(value.name) for value in node.outputs)
        if len(node.outputs) == 1 and node.op in MULTIPLE:
            targets += ","
        makes = tuple(value.name for value in node.outputs)
        before = len(self.fused)
        text, on_host = self._call(node)
        device = node.kwargs.get("device")
        return Step(
            f"{targets} = {text}",
            node.uses,
            makes,
            node.loc,
            device=str(getattr(device, "text", "")),
            on_host=on_host,
            once=node.op in MAKERS,
            nbytes=tuple(self._nbytes(value.type) for value in node.outputs),
            view=is_view(node),
            workspace=sum(call.workspace for call in self.fused[before:]),
        )

    def _call(self, node: Node) -> tuple[str, str]:
        """The text of a node, and why the host takes part in it."""
        if node.op in MAKERS:
            on_host = ""
            site = Site(self.graph, self.place, node, self.sites, self.lowering == "triton")
            self.sites += 1
            collective = MAKERS[node.op](site)
            name = self._callable(f"{node.op}_{node.out.name}", collective)
            if isinstance(collective, KernelCollective):
                self.fused.append(collective)
            elif site.group.size > 1:
                self.groups[site.group] = None
                on_host = "ranks meet on the host"
            return f"{name}({', '.join(self._text(arg) for arg in node.args)})", on_host
        if node.op == "axis_index":
            index = self.place.group_of(node).index
            fill = functools.partial(torch.full, (), dtype=torch.int64)
            name = self._callable("axis_index", fill)
            return f"{name}({index}, device={self._text(Token('device'))})", ""
        type_ = node.out.type if len(node.outputs) == 1 else None
        name, function = torch_function(node.op, type_)
        if _gives_more(function, len(node.outputs)):
            function = _tensors_of(function, len(node.outputs))
        name = self._callable(name, function)
        args = [self._text(arg) for arg in node.args]
        args += [f"{key}={self._text(arg)}" for key, arg in node.attrs]
        return f"{name}({', '.join(args)})", ""

    def _callable(self, name: str, function: Any) -> str:
        """Make ``function`` known to the text, under a name that no argument has."""
        while any(value.name == name for value in self.graph.inputs):
            name += "_"
        self.space[name] = function
        return name

    def _text(self, arg: Arg) -> str:
        if isinstance(arg, Ref):
            return _variable(arg.name)
        if isinstance(arg, tuple):
            return "[" + ", ".join(self._text(item) for item in arg) + "]"
        if isinstance(arg, Token):
            name = f"_{arg.text}"
            self.space[name] = self._token(arg.text)
            return name
        if isinstance(arg, float) and (arg != arg or arg in (float("inf"), float("-inf"))):
            return f"float('{arg}')"
        return repr(arg)

    def _token(self, text: str) -> Any:
        if text == "device":
            return self.place.ctx.device
        if text in TORCH_DTYPES:
            return TORCH_DTYPES[text]
        found = getattr(torch, text, None)  # of "cpu" a module
        kinds = torch.layout, torch.memory_format
        return found if isinstance(found, kinds) else torch.device(text)


# Ops that return a list or tuple even of one tensor.
MULTIPLE = {"split.Tensor", "split_with_sizes", "unbind.int", "chunk", "tensor_split.sections"}


def torch_function(op: str, type_: TensorType | None) -> tuple[str, Callable[..., Any]]:
    """The torch callable behind a graph op, and a readable name for it."""
    if op == "matmul":
        batched = type_ is not None and len(type_.shape) == 3
        return ("bmm", torch.bmm) if batched else ("mm", torch.mm)
    space, _, name = op.rpartition("::")
    packet_name, _, overload = name.partition(".")
    try:
        packet = getattr(getattr(torch.ops, space or "aten"), packet_name)
        function = getattr(packet, overload or "default")
    except AttributeError:
        raise UnsupportedError(
            f"this torch has no op {op!r}", help="trace the program with this version"
        ) from None
    return op.replace("::", "_").replace(".", "_"), function


def _gives_more(function: Any, count: int) -> bool:
    """Whether an op returns more than ``count`` tensors: numbers beside them, as attention on GPUs
    does, or None in place of gradients that were not asked for.
    """
    returns = getattr(getattr(function, "_schema", None), "returns", ())
    return len(returns) > count or any(str(r.type) != "Tensor" for r in returns[1:])


def _tensors_of(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """``function`` with the first ``count`` tensors among its results; None for those it left out,
    which depend on more than the metadata that was traced and are never read.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found: list[Tensor | None] = [v for v in function(*args, **kwargs) if isinstance(v, Tensor)]
        found += [None] * (count - len(found))
        return found[0] if count == 1 else found[:count]

    return call


def _variable(name: str) -> str:
    return f"v{name}" if name.isdigit() else name
