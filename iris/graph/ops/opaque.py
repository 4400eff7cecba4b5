"""Ops known by their inputs only, makers of constants, and ops that draw random numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from iris.graph.nodes import Node
from iris.graph.ops.base import Args, Attrs, Effect, InferContext, Locals, Op, PerRank, Types
from iris.graph.ops.numerics import numpy_dtype
from iris.graph.ops.rules import Link, group_size, own_numbers, propagate, tensors
from iris.graph.types import Mesh, TensorType


class Opaque(Op):
    """Any op: ``f32[8, 4], f32[4] -> f32[3]`` of replicated inputs; ``f32[8/tp, 4] -> f32[3]~tp``.

    The output is replicated if every input is, and varies over every axis over which an input is
    not. Partial inputs are refused.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        if "::" in name:
            self.effects = frozenset({Effect.UNKNOWN})

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        operands = list(tensors(args, attrs))
        links: list[Sequence[Link]] = [[None] * len(t.shape) for t in operands]
        return tuple(propagate(self.name, ctx, operands, links, local) for local in locals)


class Factory(Op):
    """A tensor made from numbers alone, the same on every rank: ``full (4, 2), 1.0 -> f32[4, 2]``.

    A tensor it takes for its dtype (``new_zeros``) says nothing about the result.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__(name)
        self.function = function

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        return tuple(TensorType(local.dtype, local.shape) for local in locals)

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        type = node.out.type
        made = np.asarray(self.function(type.shape, args)).astype(numpy_dtype(type.dtype))
        return [[made] * group_size(mesh, mesh.names)]


ZEROS = (
    "zeros", "empty", "empty_strided", "new_zeros", "new_empty", "new_empty_strided",
)  # fmt: skip
FACTORIES: dict[str, Op] = {
    name: Factory(name, function)
    for name, function in {
        **dict.fromkeys(ZEROS, lambda shape, args: np.zeros(shape)),
        **dict.fromkeys(("ones", "new_ones"), lambda shape, args: np.ones(shape)),
        "full": lambda shape, args: np.full(shape, args[1]),
        "new_full": lambda shape, args: np.full(shape, args[2]),
        "scalar_tensor": lambda shape, args: np.asarray(args[0]),
        "arange": lambda shape, args: np.arange(*args),
        "eye": lambda shape, args: np.eye(*shape),
    }.items()
}
"""Every op that makes a tensor from numbers, by ATen name."""


class Random(Op):
    """An op that draws numbers: ``bernoulli f32[8/tp, 4] -> f32[8/tp, 4]~dp``.

    Ranks have their own generators, so the output varies over every axis that does not split it.
    """

    effects = frozenset({Effect.RANDOM})

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        operands = list(tensors(args, attrs))
        types = []
        for local in locals:
            links: list[Sequence[Link]] = [
                tuple(range(len(t.shape))) if ctx.local(t) == local.shape else [None] * len(t.shape)
                for t in operands
            ]
            types.append(own_numbers(ctx, propagate(self.name, ctx, operands, links, local)))
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
