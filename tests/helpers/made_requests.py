"""Requests as the engine makes them, for tests of scheduling without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lamella.engine.sampling_params import SamplingParams
from lamella.engine.scheduling.request import Request


def make_request(
    name: str,
    prompt: Iterable[int],
    *,
    max_tokens: int = 8,
    eos_token_ids: Sequence[int] = (),
    stop_token_ids: Sequence[int] = (),
    **params: Any,
) -> Request:
    token_ids = np.array([*prompt], dtype=np.int32)
    return Request(
        request_id=name,
        sample_index=0,
        params=SamplingParams(**params),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        max_total_tokens=len(token_ids) + max_tokens,
        seed=0,
        eos_token_ids=frozenset(eos_token_ids),
        stop_token_ids=frozenset(stop_token_ids),
        arrival_time=0.0,
    )
