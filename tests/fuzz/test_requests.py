"""Mixed batches of which any part is invalid, in every way: who is refused is told why, and nobody else notices."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from lamella import Engine, LamellaError, SamplingParams
from lamella.engine.lora_request import LoRARequest
from tests.helpers.tiny_gemma import save_tiny_gemma

ARGUMENTS = {"max_model_len": 64, "kv_cache_memory_bytes": 2**21, "max_num_seqs": 4, "page_size": 4}
HUGE = 10**400
NO_NUMBER = (float("nan"), "many", [1], object(), HUGE)
WHOLE = (-2, 1.5, "3", True, 2**64, HUGE, [1])
# Argument -> values none of which it takes.
WRONG_PARAMS: dict[str, tuple[Any, ...]] = {
    "n": (0, *WHOLE),
    "temperature": (-0.1, *NO_NUMBER),
    "top_p": (0.0, 1.5, *NO_NUMBER),
    "top_k": (1.5, "3", -2, HUGE, [1]),
    "min_p": (-0.1, 1.5, *NO_NUMBER),
    "presence_penalty": (3.0, *NO_NUMBER),
    "frequency_penalty": (-3.0, *NO_NUMBER),
    "repetition_penalty": (0.0, *NO_NUMBER),
    "seed": (1.5, "3", HUGE, [1]),
    "max_tokens": (0, *WHOLE),
    "min_tokens": WHOLE,
    "logprobs": (-3, 1.5, "3", HUGE, 10**6),
    "prompt_logprobs": (-3, 1.5, "3", HUGE, 10**6),
    "stop": (7, [7], [""], b"x"),
    "stop_token_ids": (7, ["7"], [1.5], [-1], [HUGE], [10**6]),
    "allowed_token_ids": ([], ["7"], [-1], [10**6], 7),
    "bad_words": (7, [7], [""]),
    "logit_bias": (7, {"x": 1.0}, {1: "x"}, {1: float("nan")}, {10**6: 1.0}),
    "logits_processors": (7, [7], ["x"]),
    "output_kind": (9, "DELTA"),
    "ignore_eos": ("yes", 2),
    "structured_outputs": (7, "x"),
    "best_of": (3,),
    "temprature": (1.0,),
}
# What each says -> prompt.
WRONG_PROMPTS: tuple[tuple[str, Any], ...] = (
    ("prompt is empty", []),
    ("prompt is NoneType", None),
    ("prompt is int", 7),
    ("prompt is bytes", b"the cat"),
    ("prompt token 1", [1, 10**6]),
    ("prompt token 0", [-1]),
    ("prompt token 1", [1, 1.5]),
    ("prompt token 2", [1, 2, "3"]),
    ("prompt token 0", [True]),
    ("prompt token 0", [HUGE]),
    ("prompt token 0", np.array([[1, 2]])),
    ("max_model_len=64", [1] * 64),
    ("max_model_len=64", "the cat " * 100),
    ("prompt has the keys", {}),
    ("prompt has the keys", {"promt": "x"}),
    ("prompt has the keys", {"prompt": None}),
    ("prompt", {"prompt": 7}),
    ("cache_salt", {"prompt": "x", "cache_salt": ""}),
    ("cache_salt", {"prompt": "x", "cache_salt": 7}),
    ("cache_salt", {"prompt": "x", "cache_salt": "a\0b"}),
    ("prefix_boundary", {"prompt_token_ids": [1, 2], "prefix_boundary": 9}),
    ("prefix_boundary", {"prompt_token_ids": [1, 2], "prefix_boundary": "x"}),
    ("multi_modal_data", {"prompt": "x", "multi_modal_data": {"image": 1}}),
)
# What each says -> further arguments of add_request.
WRONG_ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("lora_request", {"lora_request": LoRARequest("x", 1, "/nowhere")}),
    ("lora_request", {"lora_request": 7}),
    ("params", {"params": {"temperature": 0}}),
    ("params", {"params": "greedy"}),
    ("request_id", {"request_id": 7}),
    ("request_id", {"request_id": None}),
    ("is in use", {"request_id": "valid-0"}),
    ("priority", {"priority": 3}),
    ("colour", {"colour": "red"}),
)
VALID = (
    ("the cat sat", SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)),
    ([5, 9, 13, 200, 7], SamplingParams(temperature=0.9, seed=3, max_tokens=9, n=2, ignore_eos=True)),
    ({"prompt": "a window", "cache_salt": "s"}, SamplingParams(temperature=0, max_tokens=5, logprobs=2)),
    ("the cat sat on the mat", SamplingParams(temperature=1.1, seed=8, top_k=20, max_tokens=12, ignore_eos=True)),
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    with Engine(model=str(path), **ARGUMENTS) as engine:
        yield engine


def wrong_requests() -> list[tuple[str, str, dict[str, Any]]]:
    """(what the error must name, what is wrong, arguments of add_request or of SamplingParams)."""
    found = [(name, "params", {name: value}) for name, values in WRONG_PARAMS.items() for value in values]
    found += [(says, "prompt", {"prompt": prompt}) for says, prompt in WRONG_PROMPTS]
    return found + [(says, "arguments", arguments) for says, arguments in WRONG_ARGUMENTS]


def refusal(engine: Engine, kind: str, given: dict[str, Any], request_id: str) -> Exception | None:
    """What a caller gets who asks for that."""
    good = SamplingParams(temperature=0, max_tokens=3)
    arguments: dict[str, Any] = {"request_id": request_id, "prompt": "the cat", "params": good}
    try:
        if kind == "params":
            arguments["params"] = SamplingParams(**{"max_tokens": 3, **given})
        else:
            arguments |= given
        engine.add_request(**arguments)
    except Exception as error:
        return error
    return None


def results(engine: Engine) -> dict[str, list[tuple]]:
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None
            found[output.request_id] = [
                (part.token_ids, part.text, part.finish_reason, round(part.cumulative_logprob or 0.0, 3))
                for part in output.outputs
            ]
    return found


def add_valid(engine: Engine, index: int) -> None:
    prompt, params = VALID[index % len(VALID)]
    engine.add_request(f"valid-{index}", prompt, params)


def assert_empty(engine: Engine) -> None:
    engine.check_invariants()
    assert engine.num_unfinished_requests == 0
    assert all(usage.owned == 0 for usage in engine.stats().pages.values())
    assert engine.reset_prefix_cache()


@pytest.fixture(scope="module")
def expected(engine):
    """Of the valid requests, without any other."""
    for index in range(8):
        add_valid(engine, index)
    found = results(engine)
    assert_empty(engine)
    return found


def batch(engine: Engine, draw: random.Random, wrong: list[tuple[str, str, dict[str, Any]]], expected) -> list[str]:
    """Valid and wrong requests in random order. Returns what is wrong with the answers."""
    order: list[Any] = [*range(1, 8), *wrong]
    draw.shuffle(order)
    problems: list[str] = []
    add_valid(engine, 0)
    for one in order:
        if isinstance(one, int):
            add_valid(engine, one)
            continue
        says, kind, given = one
        error = refusal(engine, kind, given, f"wrong-{draw.random()}")
        shown = f"{kind} {str(given)[:90]}"
        if error is None:
            problems.append(f"{shown}: was accepted")
        elif not isinstance(error, (LamellaError, TypeError)):
            problems.append(f"{shown}: {type(error).__name__}: {error}")
        elif says not in str(error):
            problems.append(f"{shown}: the error does not say {says!r}: {error}")
    found = results(engine)
    if found != expected:
        differ = {name: (found.get(name), one) for name, one in expected.items() if found.get(name) != one}
        problems.append(f"valid requests have other answers: {differ}, more: {found.keys() - expected.keys()}")
    assert_empty(engine)
    return problems


def test_wrong_requests_are_refused_and_change_nothing_for_the_others(engine, expected):
    """Each wrong value once, in batches of 24."""
    draw, wrong = random.Random(5), wrong_requests()
    draw.shuffle(wrong)
    problems = []
    for first in range(0, len(wrong), 24):
        problems += batch(engine, draw, wrong[first : first + 24], expected)
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_any_part_of_a_batch_may_be_wrong(engine, expected, seed):
    draw, wrong = random.Random(seed), wrong_requests()
    assert batch(engine, draw, draw.sample(wrong, draw.randint(0, 40)), expected) == []
