"""Edits of logits, alone and together, with what they make of a row by a plain loop."""

from __future__ import annotations

import numpy as np
import torch

from lamella.model_executor.sampling.sampler import uniform
from lamella.model_executor.step_plan import RowProcessors, SamplingBatch, TokenBiases, TokenPenalties
from tests.helpers.sampling import make_batch
from tests.helpers.sampling_oracle import distribution, edited_logits

VOCAB = 300
PROMPT, OUTPUT = [3, 9, 40, 11], [9, 50, 50, 12, 3]
PENALTIES = {"repetition": 1.3, "presence": 0.6, "frequency": 0.4}


def mask_of(allowed: set[int]) -> np.ndarray:
    """A bit a token, by arithmetic on Python's integers."""
    number = sum(1 << token for token in allowed)
    return np.array([number >> (32 * word) & 0xFFFFFFFF for word in range(-(-VOCAB // 32))], dtype=np.uint32)


def sharpen(prompt, output, logits):
    """Depends on prompt and output, and lifts bans, which must be made again."""
    changed = logits * (1 + 0.125 * len(output))
    changed[(prompt[0] + output[-1]) % VOCAB] += 6.0
    changed[changed < -1e30] = 5.0
    return changed


def keep_half(prompt, output, logits):
    changed = logits.clone() if isinstance(logits, torch.Tensor) else logits.copy()
    changed[1::2] = -np.inf
    return changed


ALL = {
    "allowed": {token for token in range(VOCAB) if token % 7 < 5 or token in OUTPUT},
    "banned": (12, 13, 14, 12, 200),
    "biases": {3: 4.0, 50: -3.5, 77: 9.0, 13: 8.0, 5: 9.0},
    "functions": (sharpen, keep_half),
    **PENALTIES,
}
CASES = [
    {"allowed": ALL["allowed"]},
    {"allowed": {31, 32, 299}},
    {"banned": ALL["banned"]},
    {"biases": ALL["biases"]},
    {"functions": ALL["functions"]},
    {"banned": ALL["banned"], "biases": ALL["biases"], **PENALTIES},
    {"allowed": ALL["allowed"], "biases": ALL["biases"], **PENALTIES},
    {"allowed": ALL["allowed"], "functions": (sharpen,)},
    ALL,
]
PARAMS = [
    {"temperature": 0.0, "num_logprobs": 3},
    {"seed": 4, "temperature": 0.8, "draw_index": 2},
    {"seed": 5, "top_k": 7, "draw_index": 3},
    {"seed": 6, "top_p": 0.8, "num_logprobs": 0},
]


def batch_of(cases: dict[int, dict], params: list[dict]) -> SamplingBatch:
    token_ids = sorted({*PROMPT, *OUTPUT})
    penalties = TokenPenalties(
        **PENALTIES, token_ids=np.array(token_ids), output_counts=np.array([OUTPUT.count(one) for one in token_ids])
    )
    biases = {}
    for row, case in cases.items():
        if "biases" in case:
            ids = [*case["biases"]]
            biases[row] = TokenBiases(np.array(ids), np.array([case["biases"][one] for one in ids], dtype=np.float32))
    return make_batch(
        *params,
        banned={row: case["banned"] for row, case in cases.items() if "banned" in case},
        penalties={row: penalties for row, case in cases.items() if "repetition" in case},
        biases=biases,
        masks={row: mask_of(case["allowed"]) for row, case in cases.items() if "allowed" in case},
        processors={
            row: RowProcessors(case["functions"], tuple(PROMPT), tuple(OUTPUT))
            for row, case in cases.items()
            if "functions" in case
        },
    )


def expected_token(logits: np.ndarray, case: dict, params: dict) -> int:
    changed = edited_logits(logits, PROMPT, OUTPUT, **case)
    if params.get("temperature") == 0:
        return int(changed.argmax())
    filters = {name: value for name, value in params.items() if name in ("temperature", "top_k", "top_p", "min_p")}
    number = uniform(params["seed"], params.get("draw_index", 0))
    of_row = distribution(changed, **filters)
    assert of_row.is_decided(number)
    return of_row.pick(number)
