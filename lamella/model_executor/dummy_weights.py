"""Random weights of the right shapes, for tests and measurements that need no real model."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch

from lamella.model_executor.weight_conversion import ParameterPlan, Piece, is_norm, parameter_dtype

_STANDARD_DEVIATION = 0.02


def dummy_pieces(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Iterator[Piece]:
    """Small normal values, multipliers near 1 for norms. A parameter depends on its name and shape alone."""
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape).normal_(0.0, _STANDARD_DEVIATION, generator=generator)
        plan = ParameterPlan(name, tuple(shape), parameter_dtype(name, dtype), ())
        yield Piece(plan, 0, (values.add_(1.0) if is_norm(name) else values).to(plan.dtype))
