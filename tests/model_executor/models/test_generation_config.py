"""generation_config.json: what the engine can do is done, and what it cannot is said once."""

from __future__ import annotations

import json
import logging

import pytest

from lamella import LLM, SamplingParams
from lamella.errors import ModelLoadError
from lamella.model_executor.weights.loading import load_sampling_defaults, resolve_model
from tests.helpers.tiny_gemma import save_tiny_gemma


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path, num_hidden_layers=2, sliding_window_pattern=2)
    return path


def defaults(folder, **given):
    (folder / "generation_config.json").write_text(json.dumps(given))
    return load_sampling_defaults(resolve_model(str(folder)))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"min_new_tokens": 3}, {"min_tokens": 3}),
        ({"min_new_tokens": 30}, {"min_tokens": 30, "max_tokens": 30}),
        ({"stop_strings": "end"}, {"stop": ("end",)}),
        ({"stop_strings": ["end", "stop"]}, {"stop": ("end", "stop")}),
        ({"stop_strings": []}, {}),
        ({"max_new_tokens": None, "min_new_tokens": None, "stop_strings": None, "top_k": None}, {}),
        (
            {"do_sample": False, "temperature": 0.7, "top_k": 5, "max_new_tokens": 7, "stop_strings": ["x"]},
            {"temperature": 0.0, "max_tokens": 7, "stop": ("x",)},
        ),
        ({"do_sample": True, "temperature": 0.7, "min_p": 0.1}, {"temperature": 0.7, "min_p": 0.1}),
        (
            {"no_repeat_ngram_size": 3, "suppress_tokens": [3, 4]},
            {"no_repeat_ngram_size": 3, "suppress_tokens": (3, 4)},
        ),
        (
            {"begin_suppress_tokens": [3], "bad_words_ids": [[5, 6], [7]]},
            {"begin_suppress_tokens": (3,), "bad_words_ids": ((5, 6), (7,))},
        ),
        ({"bad_words_ids": [], "suppress_tokens": [], "begin_suppress_tokens": [], "no_repeat_ngram_size": 0}, {}),
        ({"do_sample": False, "suppress_tokens": [3]}, {"temperature": 0.0, "suppress_tokens": (3,)}),
        ({"temperature": 1, "top_k": 0, "top_p": 1.0}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
    ],
)
def test_what_the_engine_can_do_becomes_sampling_parameters(folder, given, expected):
    found = defaults(folder, **given)
    assert found == expected
    params = SamplingParams(**found)
    assert {name: getattr(params, name) for name in expected} == expected


def test_a_minimum_above_the_maximum_is_refused(folder):
    with pytest.raises(ModelLoadError, match=r"config\.json: min_new_tokens=9 is more than max_new_tokens=8"):
        defaults(folder, min_new_tokens=9, max_new_tokens=8)


@pytest.mark.parametrize("value", [5, [5], [[]], [[5, -1]], [["a"]], [[5, True]], {"5": 1}])
def test_sequences_that_are_none_are_refused(folder, value):
    with pytest.raises(ModelLoadError, match=r"config\.json: bad_words_ids=.*must be (a list of )?lists of token ids"):
        defaults(folder, bad_words_ids=value)


def test_what_the_file_asks_for_is_what_a_request_without_parameters_gets(folder):
    """The oracle is the same request with the parameters spelled out."""
    greedy = {"temperature": 0, "ignore_eos": True}
    defaults(folder)
    with LLM(str(folder), max_model_len=128, kv_cache_memory_bytes=2**22) as llm:
        (long,) = llm.generate(["the cat"], SamplingParams(max_tokens=40, **greedy), use_tqdm=False)
    text = long.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    asked = {
        "max_new_tokens": ({"max_new_tokens": 5}, {"max_tokens": 5}),
        "stop_strings": ({"max_new_tokens": 40, "stop_strings": [stop]}, {"max_tokens": 40, "stop": [stop]}),
        "min_new_tokens": (
            {"max_new_tokens": 40, "min_new_tokens": 39, "eos_token_id": long.outputs[0].token_ids[1]},
            {"max_tokens": 40, "min_tokens": 39},
        ),
        "bans": (
            {"max_new_tokens": 9, "no_repeat_ngram_size": 2, "suppress_tokens": long.outputs[0].token_ids[:1]},
            {"max_tokens": 9, "no_repeat_ngram_size": 2, "suppress_tokens": long.outputs[0].token_ids[:1]},
        ),
    }
    lengths = set()
    for given, params in asked.values():
        (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, **given}))
        with LLM(str(folder), max_model_len=128, kv_cache_memory_bytes=2**22) as llm:
            (found,) = llm.generate(["the cat"], use_tqdm=False)
            (expected,) = llm.generate(["the cat"], SamplingParams(temperature=0, **params), use_tqdm=False)
        assert found.outputs == expected.outputs
        lengths.add(len(found.outputs[0].token_ids))
    assert 5 in lengths
    assert max(lengths) >= 39
    assert len(lengths) == 4
    assert found.outputs[0].token_ids != long.outputs[0].token_ids[:9]


NOT_DONE = {
    "max_length": 200,
    "min_length": 5,
    "num_beams": 4,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 1,
    "encoder_repetition_penalty": 1.5,
    "exponential_decay_length_penalty": [3, 1.1],
    "sequence_bias": [[[5], -1.0]],
    "guidance_scale": 2.0,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "renormalize_logits": True,
    "max_time": 3.0,
    "top_h": 0.4,
}


@pytest.mark.parametrize("key", NOT_DONE)
def test_what_the_engine_cannot_do_is_said_with_its_value(folder, caplog, key):
    with caplog.at_level(logging.WARNING, logger="lamella"):
        assert defaults(folder, **{key: NOT_DONE[key]}) == {}
    (record,) = caplog.records
    assert f"{key}={NOT_DONE[key]!r}" in record.getMessage()
    assert "generation_config.json" in record.getMessage()


def test_one_warning_names_them_all_when_a_model_is_loaded(folder, caplog):
    (folder / "generation_config.json").write_text(json.dumps(NOT_DONE))
    with (
        caplog.at_level(logging.WARNING, logger="lamella"),
        LLM(str(folder), max_model_len=64, kv_cache_memory_bytes=2**22),
    ):
        pass
    (told,) = [each.getMessage() for each in caplog.records if "generation_config" in each.getMessage()]
    assert all(f"{key}=" in told for key in NOT_DONE)


def test_transformers_defaults_are_not_warned_of(folder, caplog):
    """Every default value of the version that writes these files, and those that older ones wrote."""
    from transformers import GenerationConfig

    old = {
        "num_beams": 1, "num_beam_groups": 1, "early_stopping": False, "length_penalty": 1.0, "typical_p": 1.0,
        "no_repeat_ngram_size": 0, "min_length": 0, "repetition_penalty": 1.0, "diversity_penalty": 0.0,
        "num_return_sequences": 1, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "renormalize_logits": False,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="lamella"):
        assert defaults(folder, **json.loads(GenerationConfig().to_json_string(use_diff=False))) == {}
        assert defaults(folder, **old) == {"repetition_penalty": 1.0}
    assert caplog.records == []
