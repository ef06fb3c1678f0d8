"""How the parity tests of whole models ask an engine for greedy tokens, and what they look at beside the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lamella import LLM, SamplingParams
from tests.parity.harness import GreedyRun, ParityCase, compare_greedy


def runner(llm: LLM, batch: int | None = None, seen: list[Any] | None = None) -> GreedyRun:
    """How the harness asks for greedy tokens: all prompts at once, or `batch` at a time.

    seen: collects the outputs, then with the two likeliest tokens' log-probabilities.
    """

    def run(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        outputs: list[Any] = []
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=None if seen is None else 2)
            for count in max_tokens
        ]
        for start in range(0, len(prompts), batch or len(prompts)):
            part = slice(start, start + (batch or len(prompts)))
            outputs += llm.generate(prompts[part], params[part], use_tqdm=False)
        if seen is not None:
            seen.extend(outputs)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


def compare_gaps(cases: Sequence[ParityCase], outputs: Sequence[Any]) -> None:
    """Equal tokens do not prove the window: one key more or less changes hardly a token, but moves the gap between the
    two likeliest tokens by 7e-3 and more on long prompts; rounding moves it by less than 1e-4.

    outputs: from `runner(..., seen=outputs)`; those of later calls, after near ties, may follow.
    """
    for case, output in zip(cases, outputs[: len(cases)], strict=True):
        for position, entry in enumerate(output.outputs[0].logprobs):
            if output.outputs[0].token_ids[position] != case.token_ids[position]:
                break  # a near tie that fell the other way: from here on the texts differ
            first, second = sorted((one.logprob for one in entry.values()), reverse=True)[:2]
            assert first - second == pytest.approx(case.gaps[position], abs=1e-3), f"{case.name} at {position}"


def check_cold_and_cached(llm: LLM, cases: Sequence[ParityCase], *, finds_all: bool = True) -> None:
    """All cases in one batch; and again, when all of each prompt but its last token comes from the prefix cache.

    finds_all: False where a part of some prompt's window is gone by then, so that it is only known that some is found.
    """
    outputs: list[Any] = []
    compare_greedy(runner(llm, seen=outputs), cases)
    compare_gaps(cases, outputs)
    cached_before = llm.engine.stats().num_cached_tokens
    compare_greedy(runner(llm), cases)
    num_found = llm.engine.stats().num_cached_tokens - cached_before
    num_prompt_tokens = sum(len(case.prompt_token_ids) for case in cases)
    assert num_found >= (num_prompt_tokens - len(cases) if finds_all else 1)
