"""Ops about which nothing is known but their inputs, and ops that draw random numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from iris.graph.ops.base import Effect, InferContext, Local, Op, TypedArg
from iris.graph.ops.rules import Link, propagate, tensors
from iris.graph.types import TensorType


class Opaque(Op):
    """Any op: ``f32[8, 4], f32[4] -> f32[3]`` of replicated inputs; ``f32[8/tp, 4] -> f32[3]~tp``.

    The output is replicated if every input is, and varies over every axis over which an input is
    not. Partial inputs are refused. A factory (no tensor inputs) gives a replicated value.
    """

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]
        if "::" in name:
            self.effects = frozenset({Effect.UNKNOWN})  # type: ignore[misc]

    def infer(
        self,
        ctx: InferContext,
        args: Sequence[TypedArg],
        attrs: Mapping[str, TypedArg],
        locals: Sequence[Local],
    ) -> tuple[TensorType, ...]:
        operands = list(tensors(args, attrs))
        links: list[Sequence[Link]] = [[None] * len(t.shape) for t in operands]
        return tuple(propagate(self.name, ctx, operands, links, local) for local in locals)


class Random(Op):
    """An op that draws numbers: ``bernoulli f32[8/tp, 4] -> f32[8/tp, 4]~dp``.

    Ranks have their own generators, so the output varies over every axis that does not split it.
    """

    effects = frozenset({Effect.RANDOM})

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def infer(
        self,
        ctx: InferContext,
        args: Sequence[TypedArg],
        attrs: Mapping[str, TypedArg],
        locals: Sequence[Local],
    ) -> tuple[TensorType, ...]:
        operands = list(tensors(args, attrs))
        types = []
        for local in locals:
            links: list[Sequence[Link]] = [
                tuple(range(len(t.shape))) if ctx.local(t) == local.shape else [None] * len(t.shape)
                for t in operands
            ]
            type = propagate(self.name, ctx, operands, links, local)
            free = (axis for axis in ctx.mesh.names if axis not in type.split_axes)
            types.append(replace(type, varying=tuple(free)))
        return tuple(types)


RANDOM: dict[str, Op] = {
    name: Random(name)
    for name in (
        "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like",
        "bernoulli", "normal", "normal_functional", "uniform", "exponential", "cauchy", "geometric",
        "log_normal", "multinomial", "poisson", "binomial", "native_dropout", "dropout",
        "rrelu_with_noise", "rrelu_with_noise_functional",
    )
}  # fmt: skip
"""Every op that draws random numbers, by ATen name."""
