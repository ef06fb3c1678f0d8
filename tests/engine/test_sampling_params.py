from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.errors import RequestError


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "structured_outputs": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "prompt_logprob_start": 0,
        "logit_bias": (),
        "allowed_token_ids": None,
        "bad_words": (),
        "bad_words_ids": (),
        "no_repeat_ngram_size": 0,
        "suppress_tokens": (),
        "begin_suppress_tokens": (),
        "logits_processors": (),
        "detokenize": True,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "output_kind": RequestOutputKind.CUMULATIVE,
    }
    assert not params.is_greedy
    assert not params.has_penalties
    assert {kind.name for kind in RequestOutputKind} == {"CUMULATIVE", "DELTA", "FINAL_ONLY"}


def test_is_a_frozen_value() -> None:
    params = SamplingParams(stop=["a", "b"], temperature=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.1  # type: ignore[misc]
    assert params == SamplingParams(stop=("a", "b"), temperature=0.5)
    assert hash(params) == hash(SamplingParams(stop=["a", "b"], temperature=0.5))
    assert dataclasses.replace(params, max_tokens=3).stop == ("a", "b")
    with pytest.raises(TypeError, match="length_penalty"):
        SamplingParams(length_penalty=1.0)  # type: ignore[call-arg]


def test_stop_takes_one_form() -> None:
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()
    assert SamplingParams(stop_token_ids=[5, 3, 5, 3, 1]).stop_token_ids == (5, 3, 1)
    ids = SamplingParams(stop_token_ids=np.array([7, 7, 2])).stop_token_ids
    assert [(token_id, type(token_id)) for token_id in ids] == [(7, int), (2, int)]


def test_collections_take_one_form() -> None:
    params = SamplingParams(
        logit_bias={"7": 1, 3: np.float32(-2.5)},
        allowed_token_ids=np.array([5, 5, 2]),
        bad_words="no",
        bad_words_ids=[[1, 2], (3,), [1, 2]],
        suppress_tokens={4},
    )
    assert params.logit_bias == ((7, 1.0), (3, -2.5))
    assert params.allowed_token_ids == (5, 2)
    assert (params.bad_words, params.bad_words_ids, params.suppress_tokens) == (("no",), ((1, 2), (3,)), (4,))
    assert dataclasses.replace(params, max_tokens=3) == dataclasses.replace(params.clone(), max_tokens=3)
    assert {params, params.clone()} == {params}
    assert params.has_token_rules
    assert not SamplingParams(repetition_penalty=2.0, min_tokens=3, logprobs=-1).has_token_rules
    assert SamplingParams(logit_bias=None, allowed_token_ids=None, bad_words=None) == SamplingParams()


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 9.9e-6])
def test_greedy_switches_the_filters_off(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=7, min_p=0.2, seed=3)
    assert params.is_greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
    assert params.seed == 3


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2}, {"frequency_penalty": -2}, {"repetition_penalty": 0.01}])
def test_penalties_stay_for_greedy_requests(penalty: dict) -> None:
    params = SamplingParams(temperature=0, **penalty)
    assert params.has_penalties
    assert {name: getattr(params, name) for name in penalty} == penalty
    assert all(type(getattr(params, name)) is float for name in penalty)


@pytest.mark.parametrize("temperature", [1e-5, 0.001, 0.00999])
def test_tiny_temperatures_are_raised(temperature: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        params = SamplingParams(temperature=temperature, top_k=7)
    assert (params.temperature, params.top_k, params.is_greedy) == (0.01, 7, False)
    assert "temperature" in caplog.text


def test_values_at_the_ends_of_their_ranges_are_accepted() -> None:
    params = SamplingParams(
        temperature=2, top_p=1, top_k=-1, min_p=1, seed=-1, max_tokens=None, min_tokens=10**6, logprobs=0
    )
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (2.0, 1.0, 0, 1.0)
    assert (params.seed, params.max_tokens, params.logprobs) == (None, None, 0)
    assert SamplingParams(temperature=0.01).temperature == 0.01
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(n=3).n == 3


def test_numpy_scalars_become_python_values() -> None:
    params = SamplingParams(
        n=np.int64(1), top_k=np.int32(4), temperature=np.float32(0.5), seed=np.uint64(2**63), ignore_eos=np.bool_(True)
    )
    assert [type(value) for value in (params.n, params.top_k, params.temperature, params.seed, params.ignore_eos)] == [
        int,
        int,
        float,
        int,
        bool,
    ]
    assert (params.top_k, params.temperature, params.seed, params.ignore_eos) == (4, 0.5, 2**63, True)


@pytest.mark.parametrize(
    ("arguments", "named", "hint"),
    [
        ({"n": 0}, "n=0", "at least 1"),
        ({"n": 1.0}, "n=1.0", "integer"),
        ({"n": True}, "n=True", "integer"),
        ({"n": 2, "temperature": 0}, "n=2", "n=1"),
        ({"temperature": -0.1}, "temperature=-0.1", "0 .greedy. to 2"),
        ({"temperature": 2.1}, "temperature=2.1", "0 .greedy. to 2"),
        ({"temperature": float("nan")}, "temperature=nan", "0 .greedy. to 2"),
        ({"temperature": float("inf")}, "temperature=inf", "0 .greedy. to 2"),
        ({"temperature": "1"}, "temperature='1'", "number"),
        ({"temperature": None}, "temperature=None", "number"),
        ({"temperature": True}, "temperature=True", "number"),
        ({"top_p": 0.0}, "top_p=0.0", "more than 0"),
        ({"top_p": 1.01}, "top_p=1.01", "at most 1"),
        ({"top_p": float("nan")}, "top_p=nan", "at most 1"),
        ({"top_k": -2}, "top_k=-2", "at least 1"),
        ({"top_k": 2.5}, "top_k=2.5", "integer"),
        ({"top_k": np.bool_(True)}, "top_k=", "integer"),
        ({"min_p": -0.1}, "min_p=-0.1", "0 .off. to 1"),
        ({"min_p": 1.5}, "min_p=1.5", "0 .off. to 1"),
        ({"min_p": float("nan")}, "min_p=nan", "0 .off. to 1"),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1", "-2 to 2"),
        ({"presence_penalty": float("nan")}, "presence_penalty=nan", "-2 to 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty=-2.5", "-2 to 2"),
        ({"frequency_penalty": None}, "frequency_penalty=None", "number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0", "more than 0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0", "more than 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty=nan", "more than 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf", "more than 0"),
        ({"seed": -2}, "seed=-2", "2\\*\\*64 - 1"),
        ({"seed": 2**64}, f"seed={2**64}", "2\\*\\*64 - 1"),
        ({"seed": 0.5}, "seed=0.5", "integer"),
        ({"max_tokens": 0}, "max_tokens=0", "at least 1"),
        ({"max_tokens": "9"}, "max_tokens='9'", "integer"),
        ({"min_tokens": -1}, "min_tokens=-1", "0 .off. or more"),
        ({"min_tokens": None}, "min_tokens=None", "integer"),
        ({"min_tokens": 17}, "min_tokens=17", "max_tokens"),
        ({"logprobs": -2}, "logprobs=-2", "-1 for the whole vocabulary"),
        ({"prompt_logprobs": -2}, "prompt_logprobs=-2", "-1 for the whole vocabulary"),
        ({"prompt_logprob_start": 4}, "prompt_logprob_start=4", "set prompt_logprobs"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1", "0 .off. or more"),
        ({"no_repeat_ngram_size": None}, "no_repeat_ngram_size=None", "integer"),
        ({"logit_bias": 5}, "logit_bias=5", "dict"),
        ({"logit_bias": "5"}, "logit_bias='5'", "dict"),
        ({"logit_bias": [5]}, "logit_bias holds 5", "dict"),
        ({"logit_bias": {"five": 1.0}}, "logit_bias' token id='five'", "integer"),
        ({"logit_bias": {5: "1"}}, "logit_bias[5]='1'", "number"),
        ({"logit_bias": {5: 1.0, "5": 2.0}}, "logit_bias names token 5 twice", "one bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids=[]", "None to allow all"),
        ({"allowed_token_ids": 5}, "allowed_token_ids=5", "list of token ids"),
        ({"allowed_token_ids": [1, True]}, "allowed_token_ids=True", "integer"),
        ({"suppress_tokens": {1: 2}}, "suppress_tokens={1: 2}", "list of token ids"),
        ({"bad_words": 5}, "bad_words=5", "list of strings"),
        ({"bad_words": ["a", 3]}, "bad_words=", "strings only"),
        ({"bad_words": ["a", " "]}, "bad_words=", "no word"),
        ({"bad_words_ids": [5]}, "bad_words_ids holds 5", "list of lists"),
        ({"bad_words_ids": 5}, "bad_words_ids=5", "list of lists"),
        ({"bad_words_ids": [[1], []]}, "bad_words_ids holds an empty list", "at least one"),
        ({"logprobs": True}, "logprobs=True", "integer"),
        ({"stop": ""}, "stop=", "empty string"),
        ({"stop": ["a", ""]}, "stop=", "empty string"),
        ({"stop": ["a", 3]}, "stop=", "strings only"),
        ({"stop": b"a"}, "stop=", "list of strings"),
        ({"stop": 5}, "stop=5", "list of strings"),
        ({"stop": "a", "detokenize": False}, "stop=", "detokenize=True or use stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids=5", "list of token ids"),
        ({"stop_token_ids": "5"}, "stop_token_ids='5'", "list of token ids"),
        ({"stop_token_ids": [1, -5]}, "stop_token_ids=", "negative"),
        ({"stop_token_ids": [1, True]}, "stop_token_ids=True", "integer"),
        ({"ignore_eos": 1}, "ignore_eos=1", "True or False"),
        ({"detokenize": None}, "detokenize=None", "True or False"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens='no'", "True or False"),
        ({"include_stop_str_in_output": 0}, "include_stop_str_in_output=0", "True or False"),
        ({"output_kind": "delta"}, "output_kind='delta'", "RequestOutputKind.DELTA"),
    ],
)
def test_refusals_name_the_argument_and_what_works(arguments: dict, named: str, hint: str) -> None:
    with pytest.raises(RequestError, match=hint) as refusal:
        SamplingParams(**arguments)
    assert str(refusal.value).startswith(named)
