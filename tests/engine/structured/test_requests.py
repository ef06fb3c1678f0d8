"""Requests whose outputs follow a form, beside others, in a whole engine."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from lamella import LLM, Engine, RequestError, SamplingParams
from lamella.engine.scheduling.speculation.step_costs import StepCosts
from tests.helpers.tiny_gemma import save_tiny_gemma

ARGUMENTS = {"max_model_len": 128, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 16, "check_invariants": True}
ARRAY = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
ROWS = {"type": "array", "items": {"enum": ["aa", "ab", "ba"]}, "minItems": 6, "maxItems": 9}
CONSTANT = {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]}
FORMS = [
    ({"regex": r"[0-9]{3}-[a-f]{2,5}"}, lambda text: re.fullmatch(r"[0-9]{3}-[a-f]{2,5}", text)),
    ({"choice": ["yes", "no", "perhaps"]}, lambda text: text in ("yes", "no", "perhaps")),
    (
        {"grammar": 'start: "(" start ")" | "x"'},
        lambda text: text == "(" * (len(text) // 2) + "x" + ")" * (len(text) // 2),
    ),
    ({"grammar": 'root ::= "ab" [0-9] "c"?'}, lambda text: re.fullmatch(r"ab[0-9]c?", text)),
    ({"json": ARRAY}, lambda text: jsonschema.validate(json.loads(text), ARRAY) is None),
    ({"json": CONSTANT, "disable_any_whitespace": True, "disable_additional_properties": True}, '{"k":1}'.__eq__),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **ARGUMENTS) as made:
        yield made


def params_of(form, **settings) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "seed": 3, **settings}, structured_outputs=form)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("form", "is_right"), FORMS, ids=[f"form{index}" for index in range(len(FORMS))])
def test_each_kind_of_form(llm, form, is_right, temperature):
    outputs = llm.generate([[6, 7], [8], [9, 9, 9]], params_of(form, temperature=temperature), use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].finish_reason in ("stop", "length")
        if output.outputs[0].finish_reason == "stop":
            assert is_right(output.outputs[0].text)
    assert any(output.outputs[0].finish_reason == "stop" for output in outputs) or temperature == 0.0


def test_samples_of_one_prompt_go_their_own_ways(llm):
    (output,) = llm.generate([[6, 7]], params_of({"regex": "[a-z]{6}"}, n=5), use_tqdm=False)
    texts = [sample.text for sample in output.outputs]
    assert all(re.fullmatch("[a-z]{6}", text) for text in texts)
    assert len(set(texts)) > 2


def test_tags_in_free_text(llm):
    digit = {"type": "integer", "maximum": 9, "minimum": 0}
    schema = {"type": "object", "properties": {"x": digit}, "required": ["x"], "additionalProperties": False}
    form = {"structural_tag": {"structures": [{"begin": "a", "schema": schema, "end": "!"}], "triggers": ["a"]}}
    prompts = [[token] for token in range(6, 26)]
    outputs = llm.generate(prompts, params_of(form, max_tokens=100), use_tqdm=False)
    num_tags = 0
    for output in outputs:
        for content in output.outputs[0].text.split("a")[1:]:
            found = re.match(r"\s*\{\s*\"x\"\s*:\s*[0-9]\s*\}!", content)
            # The last tag may have been cut off.
            assert found or output.outputs[0].finish_reason == "length"
            num_tags += found is not None
    assert num_tags > 3


def test_others_in_the_batch_are_what_they_are_without_it(llm):
    """A mask changes its own row's logits alone, and a row's reported log-probabilities are of the unmasked logits."""
    plain = [SamplingParams(temperature=t, seed=9, max_tokens=20, ignore_eos=True, logprobs=2) for t in (0.0, 1.0)]
    alone = [output.outputs[0] for output in llm.generate([[6, 7], [8, 9]], plain, use_tqdm=False)]
    form = params_of({"regex": "[a-z]+"}, logprobs=1, max_tokens=20)
    mixed = llm.generate([[6, 7], [5], [8, 9], [4]], [plain[0], form, plain[1], form], use_tqdm=False)
    for place, expected in zip((0, 2), alone, strict=True):
        assert mixed[place].outputs[0].token_ids == expected.token_ids
        assert mixed[place].outputs[0].logprobs == expected.logprobs
    assert any(next(iter(entry.values())).rank > 1 for entry in mixed[1].outputs[0].logprobs)


def test_the_same_output_whatever_is_done_to_the_request(folder, llm):
    """Preempted, restarted, planned ahead of: the draws and masks are those of an undisturbed run."""
    params = [params_of({"regex": "[a-z]{40,60}"}, seed=seed, max_tokens=64) for seed in range(12)]
    prompts = [[6 + seed] * 20 for seed in range(12)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    for settings in ({"kv_cache_memory_bytes": 2**18}, {"async_scheduling": True}):
        with LLM(folder, **{**ARGUMENTS, "scheduling_policy": "fcfs", **settings}) as other:
            found = [output.outputs[0].token_ids for output in other.generate(prompts, params, use_tqdm=False)]
            assert found == expected
            if "async_scheduling" not in settings:
                assert other.engine.stats().num_preemptions > 0


def test_a_bad_form_harms_no_other_request(folder):
    with Engine(model=folder, **ARGUMENTS) as engine:
        engine.add_request("good", [6, 7], params_of({"choice": ["yes"]}))
        with pytest.raises(RequestError, match="regex='\\(' cannot be used"):
            engine.add_request("bad", [6, 7], params_of({"regex": "("}))
        texts = {}
        while engine.has_unfinished_requests():
            texts |= {output.request_id: output.outputs[0].text for output in engine.step()}
        assert texts == {"good": "yes"}
        engine.add_request("bad", [6, 7], params_of({"regex": "a"}))  # the id is free
        assert engine.num_unfinished_requests == 1


def test_a_form_that_ends_before_min_tokens_is_an_error_of_the_request(llm):
    params = [params_of({"choice": ["no"]}, min_tokens=10), params_of({"choice": ["no"]})]
    bad, good = llm.generate([[6], [6]], params, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert "no token can be chosen" in bad.outputs[0].stop_reason
    assert good.outputs[0].text == "no"


def test_stop_strings_and_lengths_cut_a_form_off(llm):
    (output,) = llm.generate([[6]], params_of({"regex": "[a-z]+-[a-z]+"}, stop=["-"]), use_tqdm=False)
    assert re.fullmatch("[a-z]+", output.outputs[0].text)
    assert output.outputs[0].stop_reason == "-"
    (output,) = llm.generate([[6]], params_of({"regex": "[a-z]{50}"}, max_tokens=5), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_speculation_changes_no_token_of_a_form(folder, llm, temperature):
    """Drafts are cut where the form ends them; samples behind them have the masks of the output with the drafts."""
    forms = [{"regex": "([ab]{2};){16}"}, {"json": ROWS}, {"regex": "(ab){2,30}"}, {"choice": ["abab" * 6, "abab" * 5]}]
    params = [params_of(form, temperature=temperature, seed=seed) for seed in range(3) for form in forms]
    prompts = [[6 + index, 7, 8] * 4 for index in range(len(params))]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    config = {"method": "suffix", "suffix_decoding_min_token_prob": 0.0}
    with LLM(folder, speculative_config=config, **ARGUMENTS) as other:
        other.engine.inspect().scheduler.drafter.costs = StepCosts([1], [1.0])  # as many drafts as can be made
        found = [output.outputs[0].token_ids for output in other.generate(prompts, params, use_tqdm=False)]
        drafts = other.engine.stats().drafts
    assert found == expected
    assert 0 < drafts.num_accepted < drafts.num_proposed
