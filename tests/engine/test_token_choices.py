"""What bounds the choice of tokens, in a whole engine, against transformers' logits changed token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from lamella import LLM, Engine, RequestError, SamplingParams
from lamella.model_executor.sampling.sampler import uniform
from tests.helpers.preempting import run_batch
from tests.helpers.sampling_oracle import distribution, edited_logits
from tests.helpers.tiny_gemma import VOCAB_SIZE, save_tiny_gemma

NUM_TOKENS = 10
ARGUMENTS = {"max_model_len": 96, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 12, "check_invariants": True}
GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.9, "seed": 11, "top_k": 40}
ALLOWED = [*range(20, 40), *range(200, 260), 319]
Ban = Callable[[list[int], list[int]], Any]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    return str(path), save_tiny_gemma(path)


@pytest.fixture(scope="module")
def tokenizer(tiny):
    with Engine(model=tiny[0], **ARGUMENTS) as engine:
        return engine.get_tokenizer()


def prompt_of(index: int) -> list[int]:
    """Of few different tokens, so that sequences repeat."""
    return np.random.default_rng(index).integers(6, 12, size=10 + index).tolist()


def hf(processor) -> Ban:
    """The tokens that a processor of transformers bans."""

    def banned(prompt: list[int], output: list[int]) -> set[int]:
        scores = processor(torch.tensor([prompt + output]), torch.zeros(1, VOCAB_SIZE))[0]
        return set(torch.isneginf(scores).nonzero().flatten().tolist())

    return banned


def ends(sequences: list[list[int]]) -> Ban:
    """The last tokens of sequences whose others end the output."""

    def banned(prompt: list[int], output: list[int]) -> set[int]:
        tails = [output[len(output) - length :] if length else [] for length in (len(one) - 1 for one in sequences)]
        whole = [len(one) - 1 <= len(output) for one in sequences]
        return {one[-1] for one, tail, fits in zip(sequences, tails, whole, strict=True) if fits and tail == one[:-1]}

    return banned


def expected_tokens(model: Any, prompt: list[int], params: dict[str, Any], ban: Ban | None, **edits: Any) -> list[int]:
    output: list[int] = []
    for draw_index in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, -1].numpy()
        banned = ban(prompt, output) if ban else ()
        changed = edited_logits(logits, prompt, output, banned=banned, **edits)
        if params["temperature"] == 0:
            second, best = np.sort(changed)[-2:]
            assert best - second > 1e-4
            output.append(int(changed.argmax()))
        else:
            of_row = distribution(changed, temperature=params["temperature"], top_k=params.get("top_k", 0))
            assert np.abs(of_row.ends[:-1] - uniform(params["seed"], draw_index)).min() > 1e-5
            output.append(of_row.pick(uniform(params["seed"], draw_index)))
    return output


@pytest.fixture(scope="module")
def cases(tiny, tokenizer) -> list[tuple[dict, Ban | None, dict, list[int]]]:
    """(parameters, what they ban, other edits, the tokens). The words and sequences to rule out are those that the
    model would say."""
    model = tiny[1]
    plain = [expected_tokens(model, prompt_of(index), GREEDY, None) for index in (2, 4, 6)]
    drawn = expected_tokens(model, prompt_of(7), DRAWN, None) + expected_tokens(model, prompt_of(9), DRAWN, None)
    said = plain[0]
    pairs = [plain[1][1:3], [plain[1][5]], [prompt_of(4)[-1], plain[1][0]], [4, 5, 6]]
    words = {tokenizer.decode(plain[2][index : index + 2]).strip(): index for index in range(NUM_TOKENS - 1)}
    word, spelled = next(
        (word, spelled)
        for word, index in words.items()
        for spelled in [[tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}")]]
        if word and plain[2][index : index + 2] in spelled
    )
    biases = {said[0]: -4.0, said[2]: 2.5, 30: 3.0, 77: 5.0}

    def everything(prompt: list[int], output: list[int]) -> set[int]:
        both = hf(NoRepeatNGramLogitsProcessor(3))(prompt, output) | ends([[drawn[0]], drawn[1:3]])(prompt, output)
        return both | hf(SuppressTokensLogitsProcessor([25, 30]))(prompt, output)

    made: list[tuple[dict, Ban | None, dict]] = [
        (GREEDY, None, {}),
        ({**DRAWN}, None, {}),
        ({**GREEDY, "logit_bias": biases}, None, {"biases": biases}),
        ({**DRAWN, "allowed_token_ids": ALLOWED}, None, {"allowed": set(ALLOWED)}),
        ({**GREEDY, "bad_words_ids": pairs}, hf(NoBadWordsLogitsProcessor(pairs)), {}),
        ({**GREEDY, "no_repeat_ngram_size": 2}, hf(NoRepeatNGramLogitsProcessor(2)), {}),
        ({**GREEDY, "bad_words": [word]}, ends(spelled), {}),
        ({**DRAWN, "suppress_tokens": drawn}, hf(SuppressTokensLogitsProcessor(drawn)), {}),
        (
            {**GREEDY, "begin_suppress_tokens": [*range(100, 320)]},
            hf(SuppressTokensAtBeginLogitsProcessor([*range(100, 320)], len(prompt_of(8)))),
            {},
        ),
        (
            {
                **DRAWN,
                "no_repeat_ngram_size": 3,
                "bad_words_ids": [[drawn[0]], drawn[1:3]],
                "suppress_tokens": [25, 30],
                "allowed_token_ids": [*ALLOWED, *drawn],
                "logit_bias": {str(token): bias for token, bias in biases.items()},
                "repetition_penalty": 1.3,
                "frequency_penalty": 0.4,
            },
            everything,
            {"allowed": {*ALLOWED, *drawn}, "biases": biases, "repetition": 1.3, "frequency": 0.4},
        ),
    ]
    return [
        (params, ban, edits, expected_tokens(model, prompt_of(index), params, ban, **edits))
        for index, (params, ban, edits) in enumerate(made)
    ]


def run(engine: Engine, cases, preempted_after: int | None = None) -> list[list[int]]:
    """The tokens of all cases in one batch."""
    made = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params) for params, *_ in cases]
    return run_batch(engine, [(prompt_of(index), params) for index, params in enumerate(made)], preempted_after)


def test_the_cases_differ_from_what_the_model_would_say(tiny, cases):
    for index, (params, _, _, tokens) in enumerate(cases):
        if index > 1:
            plain = {name: value for name, value in params.items() if name in DRAWN}
            assert expected_tokens(tiny[1], prompt_of(index), plain, None) != tokens


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_tokens_are_those_of_the_oracle_in_a_mixed_batch_cached_or_not(tiny, cases, backend: str) -> None:
    expected = [tokens for _, _, _, tokens in cases]
    with Engine(model=tiny[0], dtype="float32", attention_backend=backend, **ARGUMENTS) as engine:
        assert run(engine, cases) == expected
        assert run(engine, cases) == expected
        assert engine.stats().num_cached_tokens > 0


def test_a_resumed_request_goes_on_as_if_nothing_had_happened(tiny, cases) -> None:
    with Engine(model=tiny[0], dtype="float32", **ARGUMENTS) as engine:
        assert run(engine, cases, preempted_after=5) == [tokens for _, _, _, tokens in cases]
        assert engine.stats().num_preemptions == len(cases)


def test_with_a_step_in_flight(tiny, cases) -> None:
    """What reads tokens waits for them; biases, single tokens and masks do not."""
    with Engine(model=tiny[0], dtype="float32", async_scheduling=True, **ARGUMENTS) as engine:
        assert run(engine, cases) == [tokens for _, _, _, tokens in cases]
        still = [2, 3, 7, 8]
        for index in still:
            sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **cases[index][0])
            engine.add_request(str(index), {"prompt_token_ids": prompt_of(index)}, sampling)
        engine.step()
        assert len(engine.inspect().launched) == 1
        outputs = {}
        while engine.has_unfinished_requests():
            outputs.update({output.request_id: output.outputs[0].token_ids for output in engine.step()})
        assert [outputs[str(index)] for index in still] == [cases[index][3] for index in still]


def test_each_of_n_samples_is_bounded_by_its_own_output(tiny) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=3, max_tokens=12, no_repeat_ngram_size=1, ignore_eos=True)
    with Engine(model=tiny[0], dtype="float32", **ARGUMENTS) as engine:
        engine.add_request("a", {"prompt_token_ids": prompt_of(3)}, params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
    samples = [output.token_ids for output in outputs[-1].outputs]
    assert len({tuple(tokens) for tokens in samples}) == 3
    for tokens in samples:
        assert len({*tokens, *prompt_of(3)}) == 12 + len({*prompt_of(3)})


REFUSED: list[tuple[dict, str]] = [
    ({"logit_bias": {320: 1.0}}, r"logit_bias has 320: must lie in \[0, 319\]"),
    ({"allowed_token_ids": [5, 400]}, r"allowed_token_ids has 400: must lie in \[0, 319\]"),
    ({"suppress_tokens": [320]}, "suppress_tokens has 320"),
    ({"begin_suppress_tokens": [321]}, "begin_suppress_tokens has 321"),
    ({"bad_words_ids": [[1, 2], [3, 999]]}, "bad_words_ids has 999"),
    ({"logprobs": 321}, "logprobs=321: the vocabulary has only 320 tokens; -1 is all of them"),
    ({"prompt_logprobs": 321}, "prompt_logprobs=321: the vocabulary has only 320 tokens"),
    ({"prompt_logprobs": 0, "prompt_logprob_start": 3}, "prompt_logprob_start=3: the prompt has only 3 tokens"),
]


def test_what_the_model_has_not_is_refused_and_leaves_nothing_behind(tiny) -> None:
    with LLM(tiny[0], dtype="float32", **ARGUMENTS) as llm:
        expected = llm.generate([7, 8, 9], SamplingParams(temperature=0), use_tqdm=False)
        for arguments, message in REFUSED:
            params = [SamplingParams(temperature=0), SamplingParams(**arguments)]
            with pytest.raises(RequestError, match=rf"prompts\[1\]: {message}"):
                llm.generate([[7, 8, 9], [7, 8, 9]], params, use_tqdm=False)
            assert not llm.engine.has_unfinished_requests()
        again = llm.generate([7, 8, 9], SamplingParams(temperature=0), use_tqdm=False)
        assert again[0].outputs == expected[0].outputs


def test_a_request_that_allows_itself_nothing_ends_alone(tiny) -> None:
    with LLM(tiny[0], dtype="float32", **ARGUMENTS) as llm:
        alone = llm.generate([7, 8, 9], SamplingParams(temperature=0), use_tqdm=False)[0]
        nothing = SamplingParams(allowed_token_ids=[40], suppress_tokens=[40])
        outputs = llm.generate([[7, 8, 9]] * 2, [nothing, SamplingParams(temperature=0)], use_tqdm=False)
    assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].token_ids) == ("error", [])
    assert "every token" in outputs[0].outputs[0].stop_reason
    assert outputs[1].outputs == alone.outputs
