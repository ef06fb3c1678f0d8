"""The two 8-bit floating point formats from their definition, in NumPy."""

from __future__ import annotations

import numpy as np
import torch

# dtype -> (bits of mantissa, the code of the largest finite number).
FORMATS = {torch.float8_e4m3fn: (3, 0x7E), torch.float8_e5m2: (2, 0x7B)}


def values_of_codes(dtype: torch.dtype) -> np.ndarray:
    """float64 [256], what each byte stands for."""
    mantissa_bits, largest = FORMATS[dtype]
    exponent_bits = 7 - mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    values = np.full(256, np.nan)
    for code in range(largest + 1):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        values[code] = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
    if dtype == torch.float8_e5m2:
        values[0x7C] = np.inf  # e4m3fn has no infinity
    values[128:] = -values[:128]
    return values


def nearest_codes(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """uint8, like x (float): the nearest finite number's code, of two the even one; NaN is 0x7F or 0xFF."""
    finite = values_of_codes(dtype)[: FORMATS[dtype][1] + 1]
    with np.errstate(invalid="ignore"):  # a float16's NaN may be a signalling one
        magnitude = np.minimum(np.abs(x.astype(np.float64)), finite[-1])
    above = np.searchsorted(finite, magnitude).clip(0, len(finite) - 1)
    below = np.maximum(above - 1, 0)
    to_above, to_below = finite[above] - magnitude, magnitude - finite[below]
    codes = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    codes = np.where(np.isnan(x), 0x7F, codes)
    return (codes | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64: x as pages of `dtype` keep it."""
    return torch.from_numpy(values_of_codes(dtype)[nearest_codes(x.numpy(), dtype)])
