"""How likely continuations are, against transformers' log-softmax of the whole text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lamella import LLM, RequestError
from tests.helpers.tiny_gemma import save_tiny_gemma

ARGUMENTS = {
    "max_model_len": 128,
    "kv_cache_memory_bytes": 2**22,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "page_size": 16,
    "check_invariants": True,
}
RANDOM = np.random.default_rng(5)
SHARED = RANDOM.integers(6, 320, size=64).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    return str(path), save_tiny_gemma(path)


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny[0], dtype="float32", **ARGUMENTS) as llm:
        yield llm


def assert_scores(model: Any, prompt: list[int], continuation: list[int], score: Any) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + continuation])).logits[0, len(prompt) - 1 : -1]
    raw = logits.double().log_softmax(-1)
    expected = raw[range(len(continuation)), continuation].numpy()
    assert score.token_ids == continuation
    np.testing.assert_allclose(score.logprobs, expected, atol=1e-4)
    assert score.logprob == pytest.approx(float(expected.sum()), abs=1e-4 * len(continuation))
    is_greedy = (logits.argmax(-1).numpy() == continuation).tolist()
    assert score.is_greedy == is_greedy
    assert score.is_all_greedy == all(is_greedy)


def greedy_of(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def test_scores_are_the_models_and_the_prefix_is_computed_once(tiny, llm) -> None:
    continuations = [RANDOM.integers(6, 320, size=length).tolist() for length in (1, 1, 2, 7, 30)]
    continuations += [greedy_of(tiny[1], SHARED, 4), [*greedy_of(tiny[1], SHARED, 2), 9], continuations[3]]
    scores = llm.score(SHARED, continuations, use_tqdm=False)
    for continuation, score in zip(continuations, scores, strict=True):
        assert_scores(tiny[1], SHARED, continuation, score)
    assert scores[5].is_all_greedy
    assert scores[6].is_greedy == [True, True, False]
    assert scores[7].logprobs == scores[3].logprobs
    # Of the prompt's 64 tokens all but the last may come from the cache. The first computes them in two chunks, and
    # those that start beside its second find the first.
    num_cached = sorted(score.num_cached_tokens for score in scores)
    assert num_cached[0] == 0
    assert num_cached[1] >= 48
    assert num_cached[-4:] == [63] * 4


def test_pairs_of_their_own_and_texts(tiny, llm) -> None:
    tokenizer = llm.get_tokenizer()
    pairs = [("the quick brown", " fox jumps"), ("a window", " slides over the tokens"), ("the", "re is")]
    scores = llm.score([one for one, _ in pairs], [one for _, one in pairs], use_tqdm=False)
    for (prompt, continuation), score in zip(pairs, scores, strict=True):
        ids, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + continuation)
        assert_scores(tiny[1], whole[: len(ids)], whole[len(ids) :], score)
    mixed = llm.score(
        ["the cat", [7, 8, 9], {"prompt_token_ids": [7, 8], "cache_salt": "mine"}],
        [[40, 41], " sat", np.array([9])],
        use_tqdm=False,
    )
    assert_scores(tiny[1], tokenizer.encode("the cat"), [40, 41], mixed[0])
    assert_scores(tiny[1], [7, 8, 9], tokenizer.encode(" sat", add_special_tokens=False), mixed[1])
    assert_scores(tiny[1], [7, 8], [9], mixed[2])
    (one,) = llm.score("the cat", " sat on", use_tqdm=False)
    assert len(one.logprobs) == len(one.token_ids) > 0


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        (["a", "b"], ["c"], "continuations has 1 entries for 2 prompts: give one for each, or a single prompt"),
        ("a", ["b", ""], r"continuations\[1\]: continuation '' adds no token to its prompt"),
        ("a", ["b", {"prompt": "c"}], r"continuations\[1\]: continuation is \{'prompt': 'c'\}: give a string"),
        ([[]], [[5]], r"continuations\[0\]: prompt is empty, so that nothing comes before"),
        ([5, 6], [[5], [320]], r"continuations\[1\]: prompt token 2 is 320: must lie in"),
        ([5, 6], [[5], [7] * 126], r"continuations\[1\]: prompt has 128 tokens, which leaves no room"),
        ([5, 6], [[5], 3.5], r"continuations\[1\]: continuation is float: give a string or token ids"),
    ],
)
def test_what_cannot_be_scored_is_refused(llm, prompts, continuations, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.score(prompts, continuations, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
