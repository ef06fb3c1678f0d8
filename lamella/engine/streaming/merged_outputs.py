"""Two outputs of one request that its caller has not taken yet, made into one."""

from __future__ import annotations

import dataclasses

from lamella.engine.outputs import CompletionOutput, RequestOutput
from lamella.engine.sampling_params import RequestOutputKind


def merge_outputs(earlier: RequestOutput, later: RequestOutput, kind: RequestOutputKind) -> RequestOutput:
    """One output that says what both say. CUMULATIVE and FINAL_ONLY: the later one says it. DELTA: texts, tokens and
    log-probabilities one behind the other, everything else as it is in the later one."""
    if kind is not RequestOutputKind.DELTA:
        return later
    samples = {sample.index: sample for sample in earlier.outputs}
    for sample in later.outputs:
        before = samples.get(sample.index)
        samples[sample.index] = sample if before is None else _joined(before, sample)
    prompt_logprobs = earlier.prompt_logprobs if later.prompt_logprobs is None else later.prompt_logprobs
    outputs = [samples[index] for index in sorted(samples)]
    return dataclasses.replace(later, outputs=outputs, prompt_logprobs=prompt_logprobs)


def _joined(earlier: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    logprobs = None
    if earlier.logprobs is not None or later.logprobs is not None:
        logprobs = [*(earlier.logprobs or ()), *(later.logprobs or ())]
    return dataclasses.replace(
        later, text=earlier.text + later.text, token_ids=[*earlier.token_ids, *later.token_ids], logprobs=logprobs
    )
