"""What a request without parameters gets: the model's generation_config.json."""

from __future__ import annotations

import json

from lamella import LLM, SamplingParams
from tests.helpers.tiny_gemma import save_tiny_gemma


def test_without_parameters_the_models_own_defaults_hold(tmp_path):
    save_tiny_gemma(tmp_path)
    path = tmp_path / "generation_config.json"
    for given, expected in (
        (
            {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "eos_token_id": 1},
            SamplingParams(temperature=0.7, top_k=5, top_p=0.9),
        ),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0)),
        (
            {"do_sample": False, "repetition_penalty": 1.2, "top_p": None},
            SamplingParams(temperature=0, repetition_penalty=1.2),
        ),
        ({"repetition_penalty": 1.1}, SamplingParams(repetition_penalty=1.1)),
        ({}, SamplingParams()),
    ):
        path.write_text(json.dumps(given))
        with LLM(str(tmp_path), max_model_len=128, kv_cache_memory_bytes=2**22) as llm:
            assert llm.get_default_sampling_params() == expected
            if expected.is_greedy:
                asked = llm.generate("the cat", expected, use_tqdm=False)
                given_nothing = llm.generate("the cat", use_tqdm=False)
                assert given_nothing[0].outputs == asked[0].outputs
