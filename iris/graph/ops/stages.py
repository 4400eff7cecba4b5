"""Fused stages: nodes whose body is the very nodes they replace."""

from iris.errors import GraphError
from iris.graph.nodes import Node
from iris.graph.ops.base import (
    Args,
    Attrs,
    Effect,
    InferContext,
    Locals,
    Op,
    PerRank,
    Types,
    register,
)
from iris.graph.types import Mesh


class Stage(Op):
    """Base of the stages. Types and values are those of the body: fusing cannot change meaning."""

    effects = frozenset({Effect.COMMUNICATES})

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        raise GraphError(f"{self.name}: the types of a stage are those of its body")

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        from iris.graph.reference import run_body

        return run_body(node, args, mesh)


@register
class AllGatherMatmul(Stage):
    """``epilogue(all_gather(x) @ w, ...)``: ``bf16[64/tp, 8], bf16[8, 6/tp] -> bf16[64, 6/tp]``.

    One gather, any number of products with it as the left operand, and their pointwise epilogues.
    The gathered value is an output too where others read it.
    """

    name = "all_gather_matmul"


@register
class MatmulReduceScatter(Stage):
    """``reduce_scatter(epilogue(a @ b))``: ``bf16[64, 8/tp], bf16[8/tp, 6] -> bf16[64/tp, 6]``."""

    name = "matmul_reduce_scatter"


@register
class MatmulAllReduce(Stage):
    """``norm(epilogue(all_reduce(a @ b)))``: ``bf16[64, 8/tp], bf16[8/tp, 6] -> bf16[64, 6]``.

    Bias, residual and RMSNorm after the sum belong to it; both the sum and its norm can be outputs.
    """

    name = "matmul_all_reduce"


@register
class MatmulAllGather(Stage):
    """``all_gather(epilogue(a @ b))``: ``bf16[64/tp, 8], bf16[8, 6] -> bf16[64, 6]``."""

    name = "matmul_all_gather"


@register
class AllReduceNorm(Stage):
    """``norm(all_reduce(x) + r)``: ``bf16[4, 8]+tp, bf16[4, 8] -> bf16[4, 8], bf16[4, 8]``."""

    name = "all_reduce_norm"


STAGES = frozenset(cls.name for cls in Stage.__subclasses__())
"""Names of the fused stages."""
