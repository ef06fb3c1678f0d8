"""Rotary position embedding (RoFormer, arXiv 2104.09864): tables of a step's positions, and the turning itself."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from lamella.model_executor.models.config import (
    BlendedScaling,
    LongRopeScaling,
    PairDivisors,
    ProportionalScaling,
    QueryScaleConfig,
    RotaryConfig,
    YarnScaling,
)

Tables = tuple[torch.Tensor, torch.Tensor]


def rotary_frequencies(rotary: RotaryConfig, device: torch.device, *, is_long: bool = False) -> torch.Tensor:
    """Radians per position of each pair of elements: float32 [rotary.dim / 2]. is_long: of texts that are longer than
    those a LongRopeScaling has its short divisors for."""
    exponents = torch.arange(0, rotary.dim, 2, dtype=torch.float32, device=device) / rotary.dim
    scaling = rotary.scaling
    if isinstance(scaling, (LongRopeScaling, PairDivisors)):
        return 1.0 / (_divisors(scaling, is_long, device) * rotary.theta**exponents) / rotary.position_divisor
    frequencies = 1.0 / (rotary.theta**exponents) / rotary.position_divisor
    if isinstance(scaling, BlendedScaling):
        return _blended(frequencies, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn(frequencies, scaling, rotary)
    if isinstance(scaling, ProportionalScaling):
        frequencies[scaling.num_pairs :] = 0.0
    return frequencies


def _divisors(scaling: LongRopeScaling | PairDivisors, is_long: bool, device: torch.device) -> torch.Tensor:
    if isinstance(scaling, PairDivisors):
        return torch.tensor(scaling.divisors, device=device)
    return torch.tensor(scaling.long_divisors if is_long else scaling.short_divisors, device=device)


def _blended(frequencies: torch.Tensor, scaling: BlendedScaling) -> torch.Tensor:
    """transformers' `_compute_llama3_parameters`."""
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share = (turns - low) / (high - low)
    blended = (1 - share) * frequencies / scaling.factor + share * frequencies
    return torch.where(turns < low, frequencies / scaling.factor, torch.where(turns > high, frequencies, blended))


def _yarn(frequencies: torch.Tensor, scaling: YarnScaling, rotary: RotaryConfig) -> torch.Tensor:
    """transformers' `_compute_yarn_parameters`: the ramp runs over the pairs' numbers."""

    def pair_that_turns(times: float) -> float:
        wavelengths = scaling.original_positions / (times * 2 * math.pi)
        return rotary.dim * math.log(wavelengths) / (2 * math.log(rotary.theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(rotary.dim // 2, dtype=torch.float32, device=frequencies.device)
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept


def rotary_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype, magnitude: float = 1.0
) -> Tables:
    """cos and sin, each [T, 1, dim / 2] in `dtype` and multiplied by `magnitude`, for positions [T]. frequencies:
    [dim / 2], or [T, 1, dim / 2] where they differ from token to token."""
    angles = positions.float()[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    return cos.to(dtype), sin.to(dtype)


def apply_rotary(x: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Rotate the first `dim` elements of each head of x [T, heads, head_dim], their first half against the second."""
    cos, sin = tables
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def query_scales(positions: torch.Tensor, config: QueryScaleConfig) -> torch.Tensor:
    """float32 [T, 1, 1], for positions [T]."""
    periods = torch.floor((positions.float() + config.offset) / config.period)
    return (torch.log1p(periods) * config.coefficient + 1.0)[:, None, None]


class RotaryEmbeddings:
    """The embeddings of a model's layers (None: a layer without), each computed once a step."""

    def __init__(self, rotaries: Iterable[RotaryConfig | None], dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._frequencies = {
            rotary: None if rotary is None else rotary_frequencies(rotary, device) for rotary in dict.fromkeys(rotaries)
        }
        self._long_frequencies = {
            rotary: rotary_frequencies(rotary, device, is_long=True)
            for rotary in self._frequencies
            if rotary is not None and isinstance(rotary.scaling, LongRopeScaling)
        }

    def tables(
        self, positions: torch.Tensor, is_long: torch.Tensor | None = None
    ) -> dict[RotaryConfig | None, Tables | None]:
        """cos and sin of each embedding, for positions int64 [T]. is_long: bool [T], which tokens are of texts that
        take a LongRopeScaling's long divisors; None: none are."""
        tables: dict[RotaryConfig | None, Tables | None] = {}
        for rotary, frequencies in self._frequencies.items():
            if rotary is None or frequencies is None:
                tables[rotary] = None
                continue
            if rotary in self._long_frequencies and is_long is not None:
                frequencies = torch.where(is_long[:, None, None], self._long_frequencies[rotary], frequencies)
            tables[rotary] = rotary_tables(positions, frequencies, self._dtype, rotary.magnitude)
        return tables
