"""Real models give the same tokens with speculation on and off, whatever requests ask for, preempted or not.

By default SmolLM2 runs some requests; `make test-full` runs a hundred of it and of Gemma 3. Qwen2.5's file is to be
given (README.md).
"""

from __future__ import annotations

import pytest

from lamella import LLM, SamplingParams
from lamella.engine.scheduling.speculation.step_costs import StepCosts
from tests.helpers.preempting import preempt_often
from tests.parity.decoder_models import qwen2_path

TEXT = (
    "The river rose in March. The council met in the old mill and asked for sand. In April the river rose again, and "
    "the council met in the old mill again and asked for stones. "
)
FUNCTION = "def {0}(a, b):\n    total = a {1} b\n    return total\n\n\n"
CODE = FUNCTION.format("add", "+") + FUNCTION.format("multiply", "*")
ROWS = '[{"name": "Ada", "age": 36}, {"name": "Boris", "age": 41}, {"name": "Chen", "age": 29}, '
KINDS = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.3, "top_p": 0.9, "seed": 6, "logprobs": 1},
    {"temperature": 0, "repetition_penalty": 1.1},
    {"temperature": 0.7, "presence_penalty": 0.4, "frequency_penalty": 0.2, "seed": 7},
    {"temperature": 0, "stop": ["\n\n", "mill"]},
    {"temperature": 0.5, "top_k": 20, "seed": 8, "n": 2},
    {"temperature": 0.6, "min_p": 0.1, "seed": 9, "min_tokens": 8},
    {"temperature": 0, "logprobs": 2, "ignore_eos": True},
    {"temperature": 1.0, "seed": 10, "stop": ["total"], "include_stop_str_in_output": True},
)


def workload(num_requests):
    texts = (TEXT * 2, CODE * 2 + CODE[:40], ROWS * 2, TEXT + CODE + TEXT[:60], "Once upon a time")
    prompts = [texts[index % 5][index // 5 % 7 :] for index in range(num_requests)]
    params = [SamplingParams(max_tokens=12 + index % 5 * 9, **KINDS[index % 10]) for index in range(num_requests)]
    return prompts, params


def outputs_of(model, num_requests, speculative_config, **arguments):
    prompts, params = workload(num_requests)
    settings = {"max_model_len": 512, "max_num_seqs": 12, "max_num_batched_tokens": 128, **arguments}
    with LLM(model, speculative_config=speculative_config, **settings) as llm:
        drafter = llm.engine.inspect().scheduler.drafter
        if drafter is not None:
            drafter.costs = StepCosts([1], [1.0])  # as many drafts as can be made, whether they pay or not
            preempt_often(llm.engine)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.engine.check_invariants()
        found = [
            [(one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs) for one in output.outputs]
            for output in outputs
        ]
        return found, llm.engine.stats()


def check(model, num_requests, **arguments):
    config = {"method": "suffix", "suffix_decoding_min_token_prob": 0.0}
    without, _ = outputs_of(model, num_requests, None, **arguments)
    found, stats = outputs_of(model, num_requests, config, **arguments)
    assert found == without
    assert 0 < stats.drafts.num_accepted < stats.drafts.num_proposed
    assert stats.num_preemptions > 0


def test_some_requests_of_smollm2():
    check("demo:smollm2-135m", 8, kv_cache_memory_bytes=2**27)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("quantization", ["none", "w8a8"])
@pytest.mark.parametrize("model", ["demo:smollm2-135m", "demo:gemma-3-270m"])
def test_a_hundred_requests(model, quantization):
    check(model, 100, kv_cache_memory_bytes=2**27, quantization=quantization)


@pytest.mark.external
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("quantization", ["none", "gguf", "int8", "w8a8"])
def test_a_hundred_requests_of_qwen2(quantization):
    check(str(qwen2_path()), 100, kv_cache_memory_bytes=2**26, quantization=quantization)
