"""Elementwise ops of ATen: one table of names, numpy functions, and where each is linear."""

from collections.abc import Callable
from typing import Any

import numpy as np

from iris.graph.nodes import Node
from iris.graph.ops import numerics as nm
from iris.graph.ops.base import Args, Attrs, InferContext, Local, Locals, Op, PerRank, Types
from iris.graph.ops.rules import Linear, aligned, propagate
from iris.graph.types import Mesh, TensorType

Function = Callable[..., Any]

FIRST: Linear = ((0,),)  # linear in the first operand
ALL: Linear = ((0, 1),)  # linear in both together
EACH: Linear = ((0,), (1,))  # linear in either

# fmt: off
UNARY: dict[str, Function] = {
    "abs": np.abs, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log,
    "log2": np.log2, "log10": np.log10,
    "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x, "square": np.square, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh,
    "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "sign": np.sign,
    "sgn": np.sign, "floor": np.floor, "ceil": np.ceil, "round": np.round, "trunc": np.trunc,
    "frac": lambda x: x - np.trunc(x), "isnan": np.isnan, "isinf": np.isinf,
    "isfinite": np.isfinite, "signbit": np.signbit,
    "logical_not": np.logical_not, "bitwise_not": np.invert,
    "sigmoid": nm.sigmoid, "silu": lambda x: x * nm.sigmoid(x), "gelu": nm.gelu, "erf": nm.erf,
    "erfc": lambda x: 1 - nm.erf(x), "mish": lambda x: x * np.tanh(nm.softplus(x)),
    "relu": lambda x: np.maximum(x, 0), "relu6": lambda x: np.clip(x, 0, 6),
    "hardtanh": lambda x, low=-1, high=1: np.clip(x, low, high),
    "hardsigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6, "softplus": nm.softplus, "elu": nm.elu,
    "leaky_relu": lambda x, slope=0.01: np.where(x > 0, x, x * slope),
    "log_sigmoid": lambda x: -nm.softplus(-x), "logit": lambda x: np.log(x / (1 - x)),
    "threshold": lambda x, limit, value: np.where(x > limit, x, value),
    "nan_to_num": lambda x, nan=0.0, high=None, low=None: np.nan_to_num(x, True, nan, high, low),
    "clamp": nm.clamp, "clamp_min": np.maximum, "clamp_max": np.minimum,
}
BINARY: dict[str, Function] = {
    "maximum": np.maximum, "minimum": np.minimum, "max.other": np.maximum, "min.other": np.minimum,
    "fmax": np.fmax, "fmin": np.fmin, "pow": np.power, "fmod": np.fmod, "remainder": np.mod,
    "floor_divide": np.floor_divide, "atan2": np.arctan2, "hypot": np.hypot,
    "copysign": np.copysign, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "logical_xor": np.logical_xor, "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor, "__and__": np.bitwise_and,
    "__or__": np.bitwise_or, "__xor__": np.bitwise_xor, "bitwise_left_shift": np.left_shift,
    "bitwise_right_shift": np.right_shift, "__lshift__": np.left_shift,
    "__rshift__": np.right_shift,
}
LINEAR: dict[str, tuple[Function, Linear]] = {
    "neg": (np.negative, FIRST), "positive": (np.positive, FIRST), "clone": (np.copy, FIRST),
    "alias": (np.asarray, FIRST), "detach": (np.asarray, FIRST),
    "lift_fresh_copy": (np.copy, FIRST), "contiguous": (np.asarray, FIRST),
    "real": (np.real, FIRST), "imag": (np.imag, FIRST), "conj_physical": (np.conj, FIRST),
    "add": (lambda x, y, *, alpha=1: x + alpha * y, ALL),
    "sub": (lambda x, y, *, alpha=1: x - alpha * y, ALL),
    "rsub": (lambda x, y, *, alpha=1: y - alpha * x, ALL),
    "mul": (np.multiply, EACH), "div": (nm.div, FIRST), "true_divide": (np.true_divide, FIRST),
    "where": (np.where, ((1, 2),)),
    "copy": (lambda x, source: np.broadcast_to(source, x.shape), ((1,),)),
    "lerp": (lambda x, y, w: x + w * (y - x), ALL),
    "addcmul": (lambda x, y, z, *, value=1: x + value * y * z, ((0, 1), (0, 2))),
    "addcdiv": (lambda x, y, z, *, value=1: x + value * y / z, ((0, 1),)),
    "masked_fill": (lambda x, mask, value: np.where(mask, value, x), ()),
    "silu_backward": (nm.silu_backward, FIRST), "gelu_backward": (nm.gelu_backward, FIRST),
    "sigmoid_backward": (lambda g, y: g * y * (1 - y), FIRST),
    "tanh_backward": (lambda g, y: g * (1 - y * y), FIRST),
    "threshold_backward": (lambda g, x, limit: np.where(x > limit, g, 0), FIRST),
}
# fmt: on
FLOATS = frozenset({"f64", "f32", "f16", "bf16", "c64", "c128", "c32"})
# Keywords that say where and how a tensor is stored: no matter to the values.
STORAGE = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"})


class Pointwise(Op):
    """An elementwise op with broadcasting: ``f32[8/tp, 4], f32[4] -> f32[8/tp, 4]``.

    A split dim stays split where its local size is the output's. Splits that disagree give a
    varying value.
    """

    def __init__(self, name: str, function: Function, linear: Linear = ()) -> None:
        super().__init__(name)
        self.function = function
        self.linear = linear

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        (local,) = locals
        operands = [arg if isinstance(arg, TensorType) else None for arg in args]
        links = [() if t is None else aligned(ctx.local(t), local.shape) for t in operands]
        linear = self._linear_for(args, attrs, local)
        return (propagate(self.name, ctx, operands, links, local, linear),)

    def _linear_for(self, args: Args, attrs: Attrs, local: Local) -> Linear:
        """Rounding takes the linearity away: casts to integers, division with a rounding mode."""
        if attrs.get("rounding_mode") is not None:
            return ()
        source = args[0].dtype if args and isinstance(args[0], TensorType) else local.dtype
        if source in FLOATS and local.dtype not in FLOATS:
            return ()
        return self.linear

    def reference(self, node: Node, args: Args, attrs: Attrs, mesh: Mesh) -> list[PerRank]:
        options = {key: value for key, value in attrs.items() if key not in STORAGE}
        dtype, ranks = (
            nm.numpy_dtype(node.out.type.dtype),
            len(next(a for a in args if is_value(a))),
        )
        out = []
        for rank in range(ranks):
            given = [arg[rank] if is_value(arg) else arg for arg in args]
            out.append(np.asarray(self.function(*given, **options)).astype(dtype))
        return [out]


def is_value(arg: Any) -> bool:
    """Whether a reference's argument is a value: a list over ranks."""
    return isinstance(arg, list)


class Like(Pointwise):
    """A constant in the shape of another value: ``zeros_like(f32[8/tp]) -> f32[8/tp]``.

    Also of a partial value: the constant is not its part.
    """

    def infer(self, ctx: InferContext, args: Args, attrs: Attrs, locals: Locals) -> Types:
        x: TensorType = args[0]
        whole = TensorType(x.dtype, x.shape, x.spec, (), x.varying)
        return super().infer(ctx, [whole, *args[1:]], attrs, locals)


POINTWISE: dict[str, Op] = {
    **{name: Pointwise(name, function) for name, function in (UNARY | BINARY).items()},
    **{name: Pointwise(name, function, linear) for name, (function, linear) in LINEAR.items()},
    "_to_copy": Pointwise("_to_copy", np.asarray, FIRST),
    "zeros_like": Like("zeros_like", np.zeros_like),
    "ones_like": Like("ones_like", np.ones_like),
    "full_like": Like("full_like", np.full_like),
    "fill": Like("fill", np.full_like),
    "zero": Like("zero", np.zeros_like),
    "empty_like": Like("empty_like", np.zeros_like),
}
"""Every elementwise op by ATen name; an overload with an entry is not its base op."""
