"""What the fixtures of Llama and Qwen2 hold is what they are for: no model runs here."""

from __future__ import annotations

import itertools
import json

import pytest

from lamella.model_executor.weights.loading import load_tokenizer, resolve_model
from tests.helpers.published_tokenizers import published_tokenizer, read_fields
from tests.parity.decoder_models import FIXTURES
from tests.parity.decoder_prompts import full_prompts, windowed_prompts
from tests.parity.harness import load_cases
from tests.parity.make_fixture import sha256_of

FULL = ("smollm2_parity.json", "qwen2_parity.json")
WINDOWED = ("smollm2_window_parity.json", "qwen2_hybrid_parity.json")


def cases_of(name):
    return {case.name: case for case in load_cases(FIXTURES / name)}


def header(name):
    return json.loads((FIXTURES / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def smollm2_path():
    return resolve_model("demo:smollm2-135m").paths[0]


@pytest.fixture(scope="module")
def oracle(smollm2_path):
    return published_tokenizer(read_fields(smollm2_path))


@pytest.mark.parametrize("name", FULL + WINDOWED)
def test_every_prompt_has_48_tokens_and_few_near_ties(name, oracle):
    prompts = windowed_prompts(oracle) if name in WINDOWED else full_prompts(oracle)
    cases = cases_of(name)
    assert list(cases) == [prompt.name for prompt in prompts]
    assert {len(case.token_ids) for case in cases.values()} == {48}
    gaps = [gap for case in cases.values() for gap in case.gaps]
    assert min(gaps) >= 0
    # Otherwise the rule for near ties would excuse a wrong engine.
    assert sum(gap < 2e-3 for gap in gaps) <= 0.01 * len(gaps)


@pytest.mark.parametrize("name", FULL)
def test_24_prompts_of_every_length(name):
    lengths = sorted(len(case.prompt_token_ids) for case in cases_of(name).values())
    assert len(lengths) == 24
    assert lengths[0] < 20
    assert lengths[-1] > 2000


@pytest.mark.parametrize("name", WINDOWED)
def test_windowed_prompts_are_four_windows_long(name):
    assert header(name)["config_changes"]["sliding_window"] == 64
    assert min(len(case.prompt_token_ids) for case in cases_of(name).values()) >= 4 * 64


@pytest.mark.parametrize(("full", "windowed"), list(zip(FULL, WINDOWED, strict=True)))
def test_a_window_changes_most_answers(full, windowed):
    """Of the same weights to the same prompts: an engine that leaves the window out is found out."""
    with_window, without = cases_of(windowed), cases_of(full)
    assert header(full)["model_sha256"] == header(windowed)["model_sha256"]
    both = [name for name in with_window if name in without]
    assert len(both) >= 5
    for name in both:
        assert with_window[name].prompt_token_ids == without[name].prompt_token_ids
    differing = [name for name in both if with_window[name].token_ids != without[name].token_ids]
    assert len(differing) >= len(both) - 1


@pytest.mark.parametrize("name", FULL + WINDOWED)
def test_two_prompts_share_a_beginning_that_ends_inside_a_block(name):
    cases = cases_of(name)
    north, south = (cases[f"diary_{way}"].prompt_token_ids for way in ("north", "south"))
    shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(north, south, strict=False))))
    assert shared > 4 * 64
    assert shared % 16


@pytest.mark.parametrize("name", ["smollm2_parity.json", "smollm2_window_parity.json"])
def test_prompts_of_smollm2_are_what_its_tokenizer_makes_of_their_texts(name, smollm2_path, oracle, tmp_path):
    tokenizer = load_tokenizer(resolve_model(str(smollm2_path)), tmp_path)
    cases = cases_of(name)
    prompts = windowed_prompts(oracle) if name in WINDOWED else full_prompts(oracle)
    assert {prompt.is_chat for prompt in prompts} == {prompt.begins_with_bos for prompt in prompts} == {True, False}
    for prompt in prompts:
        before = [tokenizer.bos_token_id] if prompt.begins_with_bos else []
        assert [*before, *tokenizer.encode(prompt.text)] == list(cases[prompt.name].prompt_token_ids)
        assert cases[prompt.name].text in (prompt.text, None)


def test_the_fixtures_of_smollm2_are_of_the_demo_model(smollm2_path):
    for name in ("smollm2_parity.json", "smollm2_window_parity.json"):
        assert header(name)["model_sha256"] == sha256_of(smollm2_path)
