"""A request that the model gives no usable logits for ends with an error; the others never notice."""

from __future__ import annotations

import logging

import pytest
import torch

from lamella import LLM, Engine, RequestOutputKind, SamplingParams
from tests.helpers.tiny_gemma import VOCAB_SIZE, save_tiny_gemma

BROKEN = 300  # a token whose embedding is no number, so that nothing after it is
GOOD = [[(37 * position + 11 * length) % 290 + 6 for position in range(length)] for length in (3, 40, 7, 21)]
BAD = [7, BROKEN, 9]
ARGUMENTS = {
    "max_model_len": 128, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 5, "max_num_batched_tokens": 32,
    "check_invariants": True,
}  # fmt: skip
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("broken")
    # Not tied: an embedding that is an output as well would spoil everybody's logits.
    model = save_tiny_gemma(path, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN] = torch.nan
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(params=[("auto", False), ("auto", True), ("torch", False), ("torch", True)], ids=str)
def llm(folder, request):
    backend, is_async = request.param
    with LLM(folder, attention_backend=backend, async_scheduling=is_async, **ARGUMENTS) as llm:
        yield llm


def answers(outputs):
    completions = [completion for output in outputs for completion in output.outputs]
    return [
        (list(one.token_ids), one.text, one.finish_reason, [list(each) for each in one.logprobs or ()])
        for one in completions
    ]


@pytest.mark.parametrize(
    "options",
    [GREEDY, {**GREEDY, "temperature": 1.0, "seed": 5}, {**GREEDY, "temperature": 1.0, "seed": 5, "top_k": 8},
     {**GREEDY, "logprobs": 2}],
    ids=["greedy", "drawn", "top_k", "logprobs"],
)  # fmt: skip
def test_the_others_get_what_they_get_alone(llm, options):
    params = SamplingParams(**options)
    alone = answers(llm.generate(GOOD, params, use_tqdm=False))
    llm.reset_prefix_cache()
    for _ in range(2):  # the second time in memory that holds what the first left
        outputs = llm.generate([*GOOD[:2], BAD, *GOOD[2:]], params, use_tqdm=False)
        (failed,) = outputs.pop(2).outputs
        assert (failed.finish_reason, list(failed.token_ids), failed.text) == ("error", [], "")
        assert failed.stop_reason.startswith("the largest logit is nan, so no token can be chosen")
        assert answers(outputs) == alone
    assert llm.reset_prefix_cache()
    assert all(usage == (0, 0, 0) for usage in llm.engine.stats().pages.values())


def test_what_was_generated_before_is_kept(llm):
    """All but the broken token are banned from the first place, and what comes after it is no number."""
    others = [token for token in range(VOCAB_SIZE) if token != BROKEN]
    only_broken = SamplingParams(temperature=0, max_tokens=12, min_tokens=1, stop_token_ids=others)
    greedy = SamplingParams(**GREEDY)
    alone = answers(llm.generate(GOOD, greedy, use_tqdm=False))
    outputs = llm.generate([*GOOD, [5, 6, 7]], [greedy] * 4 + [only_broken], use_tqdm=False)
    (failed,) = outputs.pop().outputs
    assert (failed.finish_reason, list(failed.token_ids)) == ("error", [BROKEN])
    assert answers(outputs) == alone


def test_a_request_that_bans_every_token(llm):
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=1, stop_token_ids=list(range(VOCAB_SIZE)))
    greedy = SamplingParams(**GREEDY)
    alone = answers(llm.generate(GOOD, greedy, use_tqdm=False))
    outputs = llm.generate([[5, 6, 7], *GOOD], [params] + [greedy] * 4, use_tqdm=False)
    (failed,) = outputs.pop(0).outputs
    assert failed.finish_reason == "error"
    assert failed.stop_reason.endswith("-inf from banning every token")
    assert answers(outputs) == alone


def test_every_sample_is_told_and_the_log_says_which_request(folder, caplog):
    params = SamplingParams(n=2, seed=1, max_tokens=4, output_kind=RequestOutputKind.DELTA)
    with Engine(model=folder, **ARGUMENTS) as engine, caplog.at_level(logging.WARNING, logger="lamella"):
        engine.add_request("broken", BAD, params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
    assert [(one.index, one.finish_reason) for one in outputs[-1].outputs] == [(0, "error"), (1, "error")]
    assert outputs[-1].finished
    assert sum("request broken ends with an error: the largest logit is nan" in text for text in caplog.messages) == 2
