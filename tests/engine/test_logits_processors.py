"""Functions and objects of the caller's that change a request's logits."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

from lamella import LLM, Engine, RequestError, SamplingParams
from lamella.engine.logits_processors import checked_processors, has_state, logits_functions
from tests.helpers.oracle_drafts import let_an_oracle_draft
from tests.helpers.preempting import preempt_often
from tests.helpers.tiny_gemma import save_tiny_gemma

ARGUMENTS = {"max_model_len": 96, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 8, "check_invariants": True}
PROMPTS = [[7, 8, 9, 10], [20, 21, 22], [50, 51, 52, 53, 54]]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    return str(path), save_tiny_gemma(path)


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny[0], dtype="float32", **ARGUMENTS) as llm:
        yield llm


def only(token_id: int, logits: torch.Tensor) -> torch.Tensor:
    forced = torch.full_like(logits, -torch.inf)
    forced[token_id] = 0.0
    return forced


def next_by_output(output_ids, logits):
    """A chain of tokens from the output alone."""
    return only((sum(output_ids) + 5 * len(output_ids) + 100) % 300, logits)


def next_by_both(prompt_ids, output_ids, logits):
    return only((sum(prompt_ids + output_ids) * 3 + len(output_ids)) % 300, logits)


class Countdown:
    """Has state: writes its own numbers, one a call. Not to be shared by two samples."""

    made = 0

    def __init__(self, first: int = 200) -> None:
        type(self).made += 1
        self.next = first

    def __call__(self, output_ids, logits):
        self.next -= 1
        return only(self.next, logits)


def greedy(*processors, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logits_processors=processors, **more)


def chain(step, prompt: list[int]) -> list[int]:
    output: list[int] = []
    while len(output) < NUM_TOKENS:
        output.append(step(prompt, output))
    return output


def by_output(prompt, output):
    return (sum(output) + 5 * len(output) + 100) % 300


def by_both(prompt, output):
    return (sum(prompt + output) * 3 + len(output)) % 300


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_functions_get_the_tokens_and_decide_in_a_mixed_batch(llm) -> None:
    plain = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    alone = tokens(llm.generate(PROMPTS, plain, use_tqdm=False))
    params = [greedy(next_by_output), plain, greedy(next_by_both)]
    assert tokens(llm.generate(PROMPTS, params, use_tqdm=False)) == [
        chain(by_output, PROMPTS[0]),
        alone[1],
        chain(by_both, PROMPTS[2]),
    ]


def test_several_are_called_in_their_order(llm) -> None:
    def add(output_ids, logits):
        logits += torch.arange(len(logits))  # in place
        return logits

    def flip(output_ids, logits):
        return -logits

    (flipped_last,) = tokens(llm.generate(PROMPTS[:1], greedy(next_by_output, add, flip), use_tqdm=False))
    (flipped_first,) = tokens(llm.generate(PROMPTS[:1], greedy(flip, add), use_tqdm=False))
    # -inf flipped is +inf, of which no token can be chosen.
    assert flipped_last == []
    assert flipped_first == [319] * NUM_TOKENS


def test_logits_are_the_models_and_log_probabilities_are_of_them(tiny, llm) -> None:
    seen: list[torch.Tensor] = []

    def watch(output_ids, logits):
        seen.append(logits.clone())
        return only(30 + len(output_ids), logits)

    (output,) = llm.generate(PROMPTS[:1], greedy(watch, logprobs=0), use_tqdm=False)
    expected_tokens = list(range(30, 30 + NUM_TOKENS))
    assert output.outputs[0].token_ids == expected_tokens
    with torch.inference_mode():
        logits = tiny[1](torch.tensor([PROMPTS[0] + expected_tokens[:-1]])).logits[0, len(PROMPTS[0]) - 1 :]
    torch.testing.assert_close(torch.stack(seen), logits, atol=1e-4, rtol=0)
    raw = logits.double().log_softmax(-1)
    found = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, expected_tokens, strict=True)]
    np.testing.assert_allclose(found, raw[range(NUM_TOKENS), expected_tokens], atol=1e-4)


@pytest.mark.parametrize("is_async", [False, True])
def test_state_is_each_samples_own_and_survives_preemption(tiny, is_async: bool) -> None:
    made = Countdown.made
    params = SamplingParams(
        n=2,
        seed=1,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logits_processors=[functools.partial(Countdown, 150)],
    )
    with Engine(model=tiny[0], dtype="float32", async_scheduling=is_async, **ARGUMENTS) as engine:
        engine.add_request("pair", {"prompt_token_ids": PROMPTS[0]}, params)
        engine.add_request("one", {"prompt_token_ids": PROMPTS[1]}, greedy(Countdown))
        assert Countdown.made == made + 3
        outputs, num_steps = {}, 0
        while engine.has_unfinished_requests():
            outputs.update({output.request_id: output for output in engine.step()})
            num_steps += 1
            if num_steps == 4 and not is_async:
                scheduler = engine.inspect().scheduler
                for row in list(scheduler.running):
                    scheduler._preempt(row)
        assert Countdown.made == made + 3
        assert engine.stats().num_preemptions == (0 if is_async else 3)
    down = list(range(149, 149 - NUM_TOKENS, -1))
    assert [sample.token_ids for sample in outputs["pair"].outputs] == [down, down]
    assert outputs["one"].outputs[0].token_ids == list(range(199, 199 - NUM_TOKENS, -1))


class Watched:
    """Forces a chain of tokens by the output and a number of its own, and keeps what it was given."""

    def __init__(self, bases: list[int], kept: list[tuple]) -> None:
        self.base, self.kept = bases.pop(0), kept

    def __call__(self, prompt_ids, output_ids, logits):
        self.kept.append((self.base, prompt_ids, output_ids, [*output_ids]))
        return only(by_base(self.base, prompt_ids, output_ids), logits)


def by_base(base, prompt, output):
    last = [*prompt, *output][-1]
    return (sum(output[-3:]) + 7 * len(output) + 2 * last + base) % 300


@pytest.mark.parametrize("is_speculating", [False, True])
def test_tokens_are_right_with_samples_preemption_and_drafts(tiny, is_speculating: bool) -> None:
    """And those of a call stay what they are, whatever comes later."""
    bases, kept = [3, 20, 101, 7], []
    params = SamplingParams(
        n=3, seed=1, max_tokens=20, ignore_eos=True, logits_processors=[functools.partial(Watched, bases, kept)]
    )
    speculation = {"method": "suffix", "num_speculative_tokens": 4} if is_speculating else None
    expected = {}
    for base, prompt in zip(bases, [PROMPTS[0]] * 3 + [PROMPTS[1]], strict=True):
        output = expected[base] = []
        while len(output) < 20:
            output.append(by_base(base, prompt, output))
    with Engine(model=tiny[0], dtype="float32", speculative_config=speculation, **ARGUMENTS) as engine:
        if is_speculating:
            of_sample = {0: 3, 1: 20, 2: 101}
            let_an_oracle_draft(
                engine,
                lambda request: expected[7 if request.num_prompt_tokens == 3 else of_sample[request.sample_index]],
                share_right=0.7,
            )
        preempt_often(engine)
        engine.add_request("three", {"prompt_token_ids": PROMPTS[0]}, params)
        engine.add_request("one", {"prompt_token_ids": PROMPTS[1]}, dataclasses.replace(params, n=1))
        outputs = {}
        while engine.has_unfinished_requests():
            outputs.update({output.request_id: output for output in engine.step()})
        stats = engine.stats()
    assert stats.num_preemptions > 3
    assert [sample.token_ids for sample in outputs["three"].outputs] == [expected[base] for base in (3, 20, 101)]
    assert outputs["one"].outputs[0].token_ids == expected[7]
    for base, prompt_ids, output_ids, then in kept:
        assert [*output_ids] == then
        assert output_ids == tuple(then)
        assert prompt_ids == tuple(PROMPTS[1 if base == 7 else 0])
    if is_speculating:
        assert 0 < stats.drafts.num_accepted < stats.drafts.num_proposed
        assert any(then != expected[base][: len(then)] for base, _, _, then in kept), "behind drafts that were wrong"
    else:
        assert all(then == expected[base][: len(then)] for base, _, _, then in kept)


def test_writing_to_the_tokens_ends_the_request_alone(llm) -> None:
    def writes(output_ids, logits):
        output_ids[0] = 5
        return logits

    (output,) = llm.generate(PROMPTS[:1], greedy(next_by_output, writes), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert "does not support item assignment" in output.outputs[0].stop_reason


def fails_late(output_ids, logits):
    if len(output_ids) == 3:
        raise ValueError("no fourth token")
    return logits


class Unmade:
    def __init__(self) -> None:
        raise OSError("no such list")

    def __call__(self, output_ids, logits):
        return logits


@pytest.mark.parametrize(
    ("processor", "num_tokens", "reason"),
    [
        (fails_late, 3, "logits_processors[1] raised ValueError: no fourth token"),
        (Unmade, 0, "logits_processors[1] raised OSError: no such list"),
        (lambda output_ids, logits: logits.tolist(), 0, "logits_processors[1] returned a list; return the logits"),
        (lambda output_ids, logits: logits[None], 0, "logits_processors[1] returned torch.float32 [1, 320]"),
    ],
)
def test_one_that_fails_ends_its_request_alone(llm, processor, num_tokens: int, reason: str) -> None:
    plain = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    alone = llm.generate(PROMPTS, plain, use_tqdm=False)
    params = [plain, greedy(next_by_output, processor), plain]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [outputs[place].outputs for place in (0, 2)] == [alone[place].outputs for place in (0, 2)]
    failed = outputs[1].outputs[0]
    assert failed.finish_reason == "error"
    assert failed.stop_reason.startswith(reason)
    assert failed.token_ids == chain(by_output, PROMPTS[1])[:num_tokens]
    again = llm.generate(PROMPTS, plain, use_tqdm=False)
    assert [output.outputs for output in again] == [output.outputs for output in alone]


class NotCallable:
    pass


class NeedsArguments:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, output_ids, logits):
        return logits


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("abc", r"logits_processors='abc' is a str; give a list of functions of \(output_token_ids, logits\)"),
        (5, "logits_processors=5 is a int; give a list"),
        ([next_by_output, 5], r"logits_processors\[1\]=5 is a int; give a function of"),
        ([lambda logits: logits], r"logits_processors\[0\]=.* takes other arguments; it must take \(output_token_ids"),
        ([lambda a, b, c, d: d], "takes other arguments"),
        ([NotCallable], "makes objects that cannot be called; give it a __call__ of"),
        ([NeedsArguments], r"cannot be made without arguments; give functools.partial\(the class"),
    ],
)
def test_what_cannot_be_called_is_refused(given, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(logits_processors=given)


def test_both_forms_are_told_from_the_arguments() -> None:
    class ThreeArguments:
        def __call__(self, prompt_ids, output_ids, logits):
            return "made", prompt_ids, output_ids, logits

    class Shared:
        def two(self, output_ids, logits, scale=2.0):
            return "two", output_ids, logits

    given = [
        lambda output, logits: ("output", output, logits),
        lambda prompt, output, logits: ("both", prompt, output, logits),
        lambda *tokens: ("any", *tokens),
        ThreeArguments,
        ThreeArguments(),
        Shared().two,
        functools.partial(lambda scale, output, logits: ("partial", output, logits), 3.0),
    ]
    functions = logits_functions(checked_processors(given))
    assert [function("p", "o", "l") for function in functions] == [
        ("output", "o", "l"),
        ("both", "p", "o", "l"),
        ("any", "p", "o", "l"),
        ("made", "p", "o", "l"),
        ("made", "p", "o", "l"),
        ("two", "o", "l"),
        ("partial", "o", "l"),
    ]
    assert has_state([ThreeArguments])
    assert has_state([functools.partial(NeedsArguments, 3)])
    assert not has_state([given[0], given[6]])
    assert checked_processors(None) == ()
