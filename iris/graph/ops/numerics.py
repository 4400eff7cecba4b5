"""numpy stand-ins for element types and functions that numpy lacks."""

import math
from typing import Any

import numpy as np

# bf16 and fp8 have no numpy type: the reference computes them in f32.
NUMPY_DTYPES = {
    "f64": "f8", "f32": "f4", "f16": "f2", "i64": "i8", "i32": "i4", "i16": "i2", "i8": "i1",
    "u64": "u8", "u32": "u4", "u16": "u2", "u8": "u1", "bool": "?", "c64": "c8", "c128": "c16",
}  # fmt: skip

erf = np.vectorize(math.erf, otypes=[np.float64])


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type that the reference uses for ``dtype``."""
    return np.dtype(NUMPY_DTYPES.get(dtype, "f4"))


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def gelu_backward(grad: Any, x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        k = math.sqrt(2 / math.pi)
        t = np.tanh(k * (x + 0.044715 * x**3))
        return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x))
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad * (0.5 * (1 + erf(x / math.sqrt(2))) + x * density)


def silu_backward(grad: Any, x: Any) -> Any:
    s = sigmoid(x)
    return grad * s * (1 + x * (1 - s))


def softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    return np.where(x * beta > threshold, x, np.log1p(np.exp(np.minimum(x * beta, 60))) / beta)


def elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    return scale * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0) * input_scale))


def div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return np.floor_divide(x, y)
    quotient = np.true_divide(x, y)
    return np.trunc(quotient) if rounding_mode == "trunc" else quotient


def clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)
