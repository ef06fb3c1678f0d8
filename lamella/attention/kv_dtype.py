"""What K and V are stored in: the model's dtype, or 8-bit floating point."""

from __future__ import annotations

import torch

# vLLM's names; None: the model's own dtype.
KV_CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
FP8_MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def to_kv_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x as pages of `dtype` keep it, rounded to nearest. In 8 bits, what is too large becomes the largest finite number
    of the format. NaN stays NaN."""
    if dtype in FP8_MANTISSA_BITS:
        largest = torch.finfo(dtype).max
        x = x.float().clamp(-largest, largest)
    return x.to(dtype)
