"""Rotary position embedding (RoFormer, arXiv 2104.09864): tables of a step's positions, and the turning itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lamella.model_executor.models.config import RotaryConfig

Tables = tuple[torch.Tensor, torch.Tensor]


def rotary_frequencies(rotary: RotaryConfig, device: torch.device) -> torch.Tensor:
    """Radians per position of each pair of elements: float32 [rotary.dim / 2]."""
    exponents = torch.arange(0, rotary.dim, 2, dtype=torch.float32, device=device) / rotary.dim
    return 1.0 / (rotary.theta**exponents) / rotary.position_divisor


def rotary_tables(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> Tables:
    """cos and sin, each [T, 1, dim / 2] in `dtype`, for positions [T]."""
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Rotate the first `dim` elements of each head of x [T, heads, head_dim], their first half against the second."""
    cos, sin = tables
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class RotaryEmbeddings:
    """The embeddings of a model's layers (None: a layer without), each computed once a step."""

    def __init__(self, rotaries: Iterable[RotaryConfig | None], dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._frequencies = {
            rotary: None if rotary is None else rotary_frequencies(rotary, device) for rotary in dict.fromkeys(rotaries)
        }

    def tables(self, positions: torch.Tensor) -> dict[RotaryConfig | None, Tables | None]:
        """cos and sin of each embedding, for positions int64 [T]."""
        return {
            rotary: None if frequencies is None else rotary_tables(positions, frequencies, self._dtype)
            for rotary, frequencies in self._frequencies.items()
        }
