"""A program ahead of time, each step with its text: ``f.trace(...).lower().compile()``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from iris.errors import SpecError
from iris.graph.nodes import Graph
from iris.lower.memory import Memory, memory_of
from iris.spmd.binding import Binder, Bound
from iris.spmd.explain import Explanation, explain
from iris.spmd.program import Program, generated


@dataclass(frozen=True)
class Signature:
    """What a program was traced for: the parameters, and the key of the call."""

    binder: Binder
    key: tuple[object, ...]
    prepare: Callable[[Program], None]  # makes a program runnable; collective


@dataclass(frozen=True)
class _Staged:
    program: Program
    signature: Signature

    def explain(self) -> Explanation:
        """Which stages, which algorithm, and what was not fused, with the reason."""
        program = self.program
        steps = program.executable.steps if program.executable else ()
        return explain(program.graph, program.fused, program.choices, program.outside, steps)


class Traced(_Staged):
    """A traced call: the graph as the user wrote it."""

    @property
    def graph(self) -> Graph:
        """The graph, an :class:`iris.graph.nodes.Graph`."""
        return self.program.graph

    def as_text(self) -> str:
        """The graph: every value with its type and the user's line. It parses back."""
        return str(self.graph)

    def lower(self) -> "Lowered":
        """The program after the passes, in stages."""
        return Lowered(self.program, self.signature)


class Lowered(_Staged):
    """A program in stages."""

    @property
    def graph(self) -> Graph:
        """The graph in stages."""
        return self.program.fused

    def as_text(self) -> str:
        """The graph in stages, each with the nodes it replaces, then the generated Triton."""
        return "\n".join([str(self.graph), *self.kernels().values()])

    def kernels(self) -> dict[str, str]:
        """The Triton functions generated for fused stages, by stage and result; with your lines."""
        return generated(self.program.choices)

    def compile(self) -> "Compiled":
        """Make the program runnable on this rank. Collective."""
        self.signature.prepare(self.program)
        return Compiled(self.program, self.signature)


class Compiled(_Staged):
    """A program ready to run: call it with arguments of the signature it was traced for."""

    def as_text(self) -> str:
        """The plan that runs, as Python, with the user's lines."""
        return self.program.plan

    def memory(self) -> Memory:
        """Bytes a run needs: workspace on the heap, and values alive at once outside it."""
        self.signature.prepare(self.program)  # again, if it had to make room for others
        assert self.program.executable is not None
        return memory_of(self.program.executable)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run. SpecError for arguments of another structure, shape, dtype, stride or device."""
        bound: Bound = self.signature.binder.bind(args, kwargs)
        if bound.key != self.signature.key:
            raise SpecError(
                f"{self.program.options.name}: compiled for other arguments",
                help="call the decorated function, which traces again, "
                "or trace it with these arguments",
            )
        self.signature.prepare(self.program)  # again, if it had to make room for others
        return self.program(bound.tensors)
