"""Logits and what to sample from them."""

from __future__ import annotations

import numpy as np
import torch

from lamella.model_executor.step_plan import RowProcessors, SamplingBatch, TokenBiases, TokenPenalties


def make_batch(
    *rows: dict,
    banned: dict[int, tuple[int, ...]] | None = None,
    penalties: dict[int, TokenPenalties] | None = None,
    biases: dict[int, TokenBiases] | None = None,
    masks: dict[int, np.ndarray] | None = None,
    processors: dict[int, RowProcessors] | None = None,
) -> SamplingBatch:
    defaults = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "draw_index": 0,
        "num_logprobs": -1,
    }
    full = [{**defaults, **row} for row in rows]

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([row[name] for row in full], dtype=dtype)

    return SamplingBatch(
        temperature=column("temperature", np.float64),
        top_k=column("top_k", np.int64),
        top_p=column("top_p", np.float64),
        min_p=column("min_p", np.float64),
        seeds=column("seed", np.uint64),
        draw_index=column("draw_index", np.int64),
        num_logprobs=column("num_logprobs", np.int64),
        banned_token_ids=banned or {},
        penalties=penalties or {},
        biases=biases or {},
        masks=masks or {},
        processors=processors or {},
    )


def random_logits(num_rows: int, vocab_size: int, *, seed: int, step: float | None = None) -> torch.Tensor:
    """Normal logits; with `step` they are multiples of it, so that many are equal."""
    values = np.random.default_rng(seed).normal(scale=3.0, size=(num_rows, vocab_size))
    if step is not None:
        values = np.round(values / step) * step
    return torch.from_numpy(values.astype(np.float32))
