"""Steps of an engine, timed: what a cost model is fitted to."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kv_replay.step_cost_model import MeasuredStep, StepSize
from lamella import LLM
from lamella.engine.sampling_params import SamplingParams
from lamella.model_executor.runner import LaunchedStep
from lamella.model_executor.step_plan import StepPlan

_OUTPUT_TOKENS = (4, 40)
_PROMPT_ENDS = (0.05, 0.9)  # of the longest, evenly on a logarithmic scale


def measure_steps(
    model: str, *, num_requests: int, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int, seed: int = 0
) -> list[MeasuredStep]:
    """Requests of random tokens and many lengths, a few at a time, so that steps of many sizes come about: prompts
    alone, prompts beside requests that decode, and decode alone. Seconds are from a step's launch until its tokens are
    here; the scheduler's time is not in them. The first requests, which make what is made once, are left out."""
    rng = np.random.default_rng(seed)
    with LLM(
        model,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=False,
        scheduling_policy="fcfs",
    ) as llm:
        vocab = llm.model_config.vocab_size
        least, most = (np.log(share * (max_model_len - _OUTPUT_TOKENS[1])) for share in _PROMPT_ENDS)
        prompts: list[Sequence[int]] = [
            rng.integers(0, vocab, int(np.exp(rng.uniform(least, most)))).tolist() for _ in range(num_requests)
        ]
        params = [
            SamplingParams(temperature=0, max_tokens=int(rng.integers(*_OUTPUT_TOKENS)), ignore_eos=True)
            for _ in range(num_requests)
        ]
        num_warm = min(2, num_requests)
        llm.generate(prompts[:num_warm], params[:num_warm], use_tqdm=False)
        runner = llm.engine.inspect().runner
        steps: list[MeasuredStep] = []
        launch = runner.launch

        def timed(plan: StepPlan) -> LaunchedStep:
            started, size = time.perf_counter(), StepSize.of(plan)
            launched = launch(plan)
            launched.result()  # waits; asking for it again costs nothing
            steps.append(MeasuredStep(size, time.perf_counter() - started))
            return launched

        runner.launch = timed  # type: ignore[method-assign]
        llm.generate(prompts[num_warm:], params[num_warm:], use_tqdm=False)
    return steps
