"""Names of element types in graphs, and torch's dtypes."""

import torch

from iris.errors import UnsupportedError

TORCH_DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3fn": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "f8e4m3fnuz": torch.float8_e4m3fnuz,
    "f8e5m2fnuz": torch.float8_e5m2fnuz,
    "f8e8m0fnu": torch.float8_e8m0fnu,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u64": torch.uint64,
    "u32": torch.uint32,
    "u16": torch.uint16,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c32": torch.complex32,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bf16``. UnsupportedError for a dtype that graphs do not have."""
    if dtype not in NAMES:
        raise UnsupportedError(
            f"iris has no tensors of {dtype}", help=f"use one of {sorted(NAMES.values())}"
        )
    return NAMES[dtype]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums of ``dtype`` over ranks are held in: fp32 for narrower floats, else the type
    itself.
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
