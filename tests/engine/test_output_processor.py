"""What an output costs does not grow with what was in the outputs before it."""

from __future__ import annotations

import numpy as np
import pytest

from lamella.engine.output_processor import OutputProcessor
from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.engine.scheduling.new_tokens import NewTokens
from lamella.engine.scheduling.request import Request

NUM_TOKENS = 100


class Entry:
    """A TokenLogprobs that counts how often its value is read."""

    num_reads = 0

    def __init__(self, token_id: int) -> None:
        self.token_id, self.rank = token_id, 1
        self.top_ids = np.array([token_id, token_id + 1])
        self.top_logprobs = np.array([-0.25, -1.5], dtype=np.float32)

    @property
    def logprob(self) -> float:
        Entry.num_reads += 1
        return -0.25


class CountingTokenizer:
    num_decodes = 0

    def decode(self, ids, skip_special_tokens):
        self.num_decodes += 1
        return "".join(f"<{one}>" for one in ids)


def request_of(params: SamplingParams) -> Request:
    return Request(
        request_id="r", sample_index=0, params=params, token_ids=np.array([1, 2, 3], np.int32), num_prompt_tokens=3,
        max_total_tokens=3 + NUM_TOKENS, seed=0, eos_token_ids=frozenset(), stop_token_ids=frozenset(),
        arrival_time=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_each_token_is_decoded_and_added_once_for_its_logprobs(kind):
    tokenizer = CountingTokenizer()
    processor = OutputProcessor(tokenizer)
    params = SamplingParams(logprobs=2, output_kind=kind, detokenize=False, max_tokens=NUM_TOKENS)
    request = request_of(params)
    processor.add(processor.new_conversation(None, params, [request]))
    Entry.num_reads = 0
    for index in range(NUM_TOKENS):
        request.output_logprobs.append(Entry(10 + index))
        if index == NUM_TOKENS - 1:
            request.finish_reason = "length"
        processor.process(NewTokens([request], [10 + index], [], []))
        (output,) = processor.take()
        completion = output.outputs[0]
        assert completion.cumulative_logprob == -0.25 * (index + 1)
        first = index if kind is RequestOutputKind.DELTA else 0
        assert [list(ranked) for ranked in completion.logprobs] == [
            [10 + one, 11 + one] for one in range(first, index + 1)
        ]
        assert completion.token_ids == list(range(10 + first, 11 + index))
        completion.logprobs[-1].clear()  # the caller's own
    assert tokenizer.num_decodes == 2 * NUM_TOKENS
    assert Entry.num_reads <= 2 * NUM_TOKENS


def test_requests_with_equal_stop_strings_share_what_is_prepared():
    processor = OutputProcessor(CountingTokenizer())
    stops = []
    for name in "abc":
        params = SamplingParams(stop=["one", "two"] if name != "c" else ["three"])
        request = request_of(params)
        request.request_id = name
        stops.append(processor.new_conversation(None, params, [request]).stops)
    assert stops[0] is stops[1]
    assert stops[2].given == ("three",)
