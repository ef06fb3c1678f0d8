"""Random weights of the right shapes, for tests and measurements that need no real model."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from lamella.model_executor.weight_conversion import is_norm, parameter_dtype

_STANDARD_DEVIATION = 0.02


def dummy_weights(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Small normal values, multipliers near 1 for norms. A parameter depends on its name and shape alone."""
    weights = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape).normal_(0.0, _STANDARD_DEVIATION, generator=generator)
        weights[name] = (values.add_(1.0) if is_norm(name) else values).to(parameter_dtype(name, dtype))
    return weights
