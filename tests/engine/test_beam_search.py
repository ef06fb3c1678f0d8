"""Beams, against transformers' and against every text of a small vocabulary."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from lamella import LLM, BeamSearchParams, RequestError
from tests.helpers.tiny_gemma import save_tiny_gemma

ARGUMENTS = {"max_model_len": 64, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 8, "check_invariants": True}
PROMPTS = [[7, 8, 9, 10], [20, 21, 22], [50, 51, 52, 53, 54, 55]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    return str(path), save_tiny_gemma(path)


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny[0], dtype="float32", **ARGUMENTS) as llm:
        yield llm


def logprobs_after(model: Any, texts: list[list[int]], temperature: float = 1.0) -> np.ndarray:
    """float64 [n, vocab], after texts of one length."""
    with torch.inference_mode():
        return (model(torch.tensor(texts)).logits[:, -1].double() / temperature).log_softmax(-1).numpy()


@pytest.mark.parametrize("beam_width", [1, 3, 5])
def test_beams_are_those_of_transformers_where_nothing_ends(tiny, llm, beam_width: int) -> None:
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width, max_tokens=6, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        found = tiny[1].generate(
            torch.tensor([prompt]),
            num_beams=beam_width,
            num_return_sequences=beam_width,
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert [one.tokens for one in output.sequences] == found.sequences.tolist()
        if beam_width > 1:
            sums = [one.cum_logprob for one in output.sequences]
            np.testing.assert_allclose(sums, found.sequences_scores.numpy(), atol=1e-4)
        assert {one.finish_reason for one in output.sequences} == {"length"}


def brute_force(model: Any, prompt: list[int], vocab: int, length: int, ends: set[int], temperature: float = 1.0):
    """(score sum, tokens) of every text: of `length` tokens, or shorter with an end token at its end."""
    found: list[tuple[float, list[int]]] = []
    beginnings: list[tuple[float, list[int]]] = [(0.0, [])]
    for step in range(length):
        longer = []
        after_each = logprobs_after(model, [prompt + output for _, output in beginnings], temperature)
        for (total, output), after in zip(beginnings, after_each, strict=True):
            for token in range(vocab):
                text = (total + float(after[token]), [*output, token])
                (found if token in ends or step == length - 1 else longer).append(text)
        beginnings = longer
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 1.4])
def test_a_beam_as_wide_as_all_texts_finds_the_best_of_them(
    tmp_path, temperature: float, length_penalty: float
) -> None:
    vocab, length, ends = 8, 3, {1, 6}
    model = save_tiny_gemma(
        tmp_path, vocab_size=vocab, num_hidden_layers=2, sliding_window_pattern=2, eos_token_id=[1, 6]
    )
    prompt = [2, 5, 3]
    every = brute_force(model, prompt, vocab, length, ends, temperature or 1.0)

    def score(text: tuple[float, list[int]]) -> float:
        num_tokens = len(prompt) + len(text[1]) - (text[1][-1] in ends)
        return text[0] / num_tokens**length_penalty

    every.sort(key=score, reverse=True)
    gaps = [score(one) - score(other) for one, other in itertools.pairwise(every[:8])]
    assert min(gaps) > 1e-5 / len(prompt) ** length_penalty
    with LLM(str(tmp_path), dtype="float32", max_model_len=32, kv_cache_memory_bytes=2**22) as llm:
        params = BeamSearchParams(64, length, temperature=temperature, length_penalty=length_penalty)
        (output,) = llm.beam_search([prompt], params)
    assert [one.tokens[len(prompt) :] for one in output.sequences[:8]] == [text for _, text in every[:8]]
    sums = [one.cum_logprob for one in output.sequences[:8]]
    np.testing.assert_allclose(sums, [total for total, _ in every[:8]], atol=1e-4)
    reasons = [("stop", one.tokens[-1]) if one.tokens[-1] in ends else ("length", None) for one in output.sequences]
    assert [(one.finish_reason, one.stop_reason) for one in output.sequences] == reasons
    assert {reason for reason, _ in reasons} == {"stop", "length"}


def test_each_text_says_what_it_was_chosen_from_and_shares_its_prefix(tiny) -> None:
    prompt = np.random.default_rng(3).integers(6, 320, size=40).tolist()
    with LLM(tiny[0], dtype="float32", **ARGUMENTS) as llm:
        (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
        stats = llm.engine.stats()
        texts = [llm.get_tokenizer().decode(one.tokens) for one in output.sequences]
    assert [one.text for one in output.sequences] == texts
    for one in output.sequences:
        generated = one.tokens[40:]
        assert [len(entry) for entry in one.logprobs] == [6] * 5
        assert sum(entry[token].logprob for entry, token in zip(one.logprobs, generated, strict=True)) == pytest.approx(
            one.cum_logprob
        )
        for step, entry in enumerate(one.logprobs):
            (expected,) = logprobs_after(tiny[1], [one.tokens[: 40 + step]])
            assert [*entry] == np.argsort(-expected, kind="stable")[:6].tolist()
    # Thirteen requests of 40 tokens and more, of which all but the first find all but a few tokens.
    assert stats.num_prompt_tokens > 13 * 40
    assert stats.num_prompt_tokens - stats.num_cached_tokens < 40 + 12 * 17


def test_what_cannot_be_searched_is_refused(llm) -> None:
    for arguments, message in [
        ({"beam_width": 0}, "beam_width=0 is out of range; give at least 1"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": 3.0}, "temperature=3.0"),
        ({"ignore_eos": 1}, "ignore_eos=1"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
    ]:
        with pytest.raises(RequestError, match=message):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **arguments})
    with pytest.raises(RequestError, match=r"prompts\[1\]: max_tokens=5: a prompt of 60 tokens leaves room for 4"):
        llm.beam_search([[5], [5] * 60], BeamSearchParams(2, 5))
    with pytest.raises(RequestError, match="params is dict: must be a BeamSearchParams"):
        llm.beam_search([[5]], {"beam_width": 2})
    with pytest.raises(TypeError, match=r"beam_search.* unexpected keyword argument 'width'"):
        llm.beam_search([[5]], BeamSearchParams(2, 5), width=3)
    assert llm.beam_search([[5]], BeamSearchParams(2, 2), lora_request=None, concurrency_limit=4)[0].sequences
