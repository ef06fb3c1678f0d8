"""Which tokens are penalised, against counts in a dictionary."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from lamella import SamplingParams
from lamella.engine.scheduling.token_penalties import penalised_prompt_ids, token_penalties


@pytest.mark.parametrize("repetition", [1.0, 1.3])
@pytest.mark.parametrize("seed", range(20))
def test_each_token_is_there_once_with_its_count_in_the_output(repetition, seed):
    draw = random.Random(seed)
    prompt = [draw.randrange(12) for _ in range(draw.randrange(15))]
    output = [draw.randrange(12) for _ in range(draw.randrange(15))]
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=0.5, frequency_penalty=-0.25)
    found = token_penalties(params, penalised_prompt_ids(params, np.array(prompt, dtype=np.int32)), np.array(output))
    expected = Counter(output)
    if repetition != 1.0:  # the only one that counts the prompt
        expected.update(dict.fromkeys(prompt, 0))
    assert len(found.token_ids) == len(expected)
    assert dict(zip(found.token_ids.tolist(), found.output_counts.tolist(), strict=True)) == expected
    assert (found.repetition, found.presence, found.frequency) == (repetition, 0.5, -0.25)
