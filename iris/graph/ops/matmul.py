"""matmul and the ATen products around it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from iris.graph.nodes import Node
from iris.graph.ops.base import (
    Args,
    Attrs,
    InferContext,
    Local,
    Locals,
    Op,
    PerRank,
    Types,
    register,
)
from iris.graph.ops.numerics import numpy_dtype
from iris.graph.ops.rules import Link, aligned, at, operand_names, propagate, refuse, tensors
from iris.graph.types import Mesh, TensorType

# The product is linear in either operand, not in both at once.
LINEAR = ((0,), (1,))


def product_type(
    op: str, ctx: InferContext, a: TensorType, b: TensorType, local: Local
) -> TensorType:
    """Type of ``a @ b`` for vectors, matrices and batches of them. ``k`` is the summed dim."""
    batch = max(len(a.shape), len(b.shape)) - 2
    left: tuple[Link, ...] = (*range(len(a.shape) - 1), "k")
    right: tuple[Link, ...] = ("k",)
    if len(b.shape) > 1:
        right = (*range(len(b.shape) - 2), "k", max(batch, 0) + (len(a.shape) > 1))
    return propagate(op, ctx, [a, b], [left, right], local, LINEAR)


def raise_biased(
    op: str,
    ctx: InferContext,
    operands: Sequence[TensorType],
    bias: int,
    factors: tuple[int, int],
    axis: str,
) -> NoReturn:
    """Say that a bias meets a product whose sum is still due."""
    names = operand_names(ctx, operands)
    left, right = (names[i] for i in factors)
    what = f"{left} @ {right} is a partial sum over {axis!r} but the bias {names[bias]} is not"
    times = ctx.mesh.size(axis)
    refuse(
        ctx,
        operands,
        f"{op}: {what}",
        help=f"multiply without the bias, all_reduce or reduce_scatter over {axis!r}, then add it",
        why=f"each rank would add {names[bias]} to its part: the sum would count it {times} times",
    )


@register
class Matmul(Op):
    """``a @ b`` of matrices, vectors or batches: ``f32[8, 4/tp], f32[4/tp, 6] -> f32[8, 6]+tp``.

    Rows, columns and batches keep their splits. Operands split alike on the summed dim give a
    partial value; split differently, a varying one.
    """

    name = "matmul"

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        return (product_type(self.name, ctx, args[0], args[1], locals[0]),)

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        dtype = numpy_dtype(node.out.type.dtype)
        pairs = zip(args[0], args[1], strict=True)
        return [[np.asarray(np.matmul(a, b)).astype(dtype) for a, b in pairs]]


class IntMm(Matmul):
    """A product of int8 matrices in i32: ``i8[8, 4/tp], i8[4/tp, 6] -> i32[8, 6]+tp``."""

    name = "_int_mm"

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        wide = [[array.astype(np.int32) for array in arg] for arg in args]
        return super().reference(node, wide, attrs, mesh)


class Addmm(Op):
    """``beta * bias + alpha * (a @ b)``: ``f32[6], f32[8/tp, 4], f32[4, 6] -> f32[8/tp, 6]``.

    Error where the product is partial: every rank would add the bias to its part.
    """

    name = "addmm"

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        bias, a, b = args[:3]
        factors = replace(ctx, sources=ctx.sources[1:])
        product = product_type(self.name, factors, a, b, locals[0])
        for axis in product.partial:
            if axis not in bias.partial and axis not in bias.varying:
                raise_biased(self.name, ctx, args[:3], 0, (1, 2), axis)
        links = [aligned(ctx.local(bias), locals[0].shape), tuple(range(len(product.shape)))]
        return (propagate(self.name, ctx, [bias, product], links, locals[0], ((0, 1),)),)

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        alpha, beta = attrs.get("alpha", 1), attrs.get("beta", 1)
        dtype = numpy_dtype(node.out.type.dtype)
        triples = zip(*args[:3], strict=True)
        return [
            [np.asarray(beta * c + alpha * np.matmul(a, b)).astype(dtype) for c, a, b in triples]
        ]


class ScaledMm(Op):
    """A scaled fp8 product: ``f8e4m3fn[8, 4/tp], f8e4m3fn[4/tp, 6] -> bf16[8, 6]+tp``.

    Each rank's scaled product is its part of the sum, whatever its scales; so scales of K-split
    operands may differ by rank. ``args``: a, b, scale_a, scale_b, bias, scale_result, out_dtype.
    """

    name = "_scaled_mm"

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        product = product_type(self.name, ctx, args[0], args[1], locals[0])
        bias = at(args, 4, attrs.get("bias"))
        if isinstance(bias, TensorType) and product.partial:
            operands = [*tensors(args, attrs)]
            place = next(i for i, t in enumerate(operands) if t is bias)
            raise_biased(self.name, ctx, operands, place, (0, 1), product.partial[0])
        links: list[Sequence[Link]] = [tuple(range(len(product.shape)))]
        operands = [product]
        for t in tensors(args[2:], attrs):
            links.append(aligned(ctx.local(t), locals[0].shape))
            varying = tuple(axis for axis in t.varying if axis not in product.partial)
            operands.append(replace(t, varying=varying))
        return (propagate(self.name, ctx, operands, links, locals[0], ((0,),)),)

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        dtype, bias = numpy_dtype(node.out.type.dtype), at(args, 4, attrs.get("bias"))
        out = []
        for rank, (a, b, scale_a, scale_b) in enumerate(zip(*args[:4], strict=True)):
            product = np.matmul(a, b) * scale_a * scale_b
            out.append((product if bias is None else product + bias[rank]).astype(dtype))
        return [out]


PRODUCTS: dict[str, Op] = {
    **{name: Matmul(name) for name in ("mv", "dot")},
    **{name: Addmm(name) for name in ("addmm", "baddbmm", "addmv")},
    **{op.name: op for op in (IntMm(), ScaledMm())},
}
"""ATen's other products, with vectors and batches too, by name."""
