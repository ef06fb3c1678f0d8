"""Random weights of the right shapes, for tests and measurements that need no real model."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from math import prod

import torch

from lamella.errors import ModelLoadError
from lamella.kv_cache.memory import available_memory_bytes
from lamella.model_executor.weights.conversion import ParameterPlan, Piece, parameter_dtype
from lamella.model_executor.weights.parameters import is_norm

_STANDARD_DEVIATION = 0.02


def check_memory(model: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelLoadError where parameters of these shapes do not fit into memory even in 16 bits. Without a weight
    file nothing else limits what a config may ask for."""
    wanted, available = 2 * sum(map(prod, shapes.values())), available_memory_bytes(torch.device("cpu"))
    if wanted > available:
        raise ModelLoadError(
            f"model={model!r}: random weights of this shape take at least {wanted / 2**30:.1f} GiB, and "
            f"{available / 2**30:.1f} GiB are free; give a smaller configuration"
        )


def dummy_pieces(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Iterator[Piece]:
    """Small normal values, multipliers near 1 for norms. A parameter depends on its name and shape alone."""
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape).normal_(0.0, _STANDARD_DEVIATION, generator=generator)
        plan = ParameterPlan(name, tuple(shape), parameter_dtype(name, dtype), ())
        yield Piece(plan, 0, (values.add_(1.0) if is_norm(name) else values).to(plan.dtype))
