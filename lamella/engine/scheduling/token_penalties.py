"""Which tokens a request's penalties apply to, from its prompt and its output so far."""

from __future__ import annotations

import numpy as np

from lamella.engine.scheduling.sampling_settings import SamplingSettings
from lamella.model_executor.step_plan import TokenPenalties


def penalised_prompt_ids(params: SamplingSettings, prompt_ids: np.ndarray) -> np.ndarray:
    """The tokens of a prompt that penalties apply to, each once and ascending: int64 [n]."""
    # Only the repetition penalty counts the prompt.
    return np.unique(prompt_ids if params.repetition_penalty != 1.0 else prompt_ids[:0]).astype(np.int64)


def token_penalties(params: SamplingSettings, prompt_ids: np.ndarray, output_ids: np.ndarray) -> TokenPenalties:
    """prompt_ids: int64 [n] from `penalised_prompt_ids`; output_ids: int [m] so far, in any order.

    O(n + m log m): the prompt is not sorted anew for every token.
    """
    new_ids, counts = np.unique(output_ids, return_counts=True)
    only_in_prompt = np.ones(len(prompt_ids), dtype=bool)
    if len(prompt_ids):
        places = np.searchsorted(prompt_ids, new_ids).clip(max=len(prompt_ids) - 1)
        only_in_prompt[places[prompt_ids[places] == new_ids]] = False
    prompt_ids = prompt_ids[only_in_prompt]
    return TokenPenalties(
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        token_ids=np.concatenate([new_ids.astype(np.int64), prompt_ids]),
        output_counts=np.concatenate([counts, np.zeros(len(prompt_ids), dtype=np.int64)]),
    )
