"""Sampling settings of the rows, kept from step to step while the same requests are in them."""

from __future__ import annotations

import numpy as np

from lamella.engine.sampling_params import SamplingParams
from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.request_rows import RequestRows


def make_request(seed, **params):
    return Request(
        request_id=f"r{seed}",
        sample_index=0,
        params=SamplingParams(**params),
        token_ids=np.arange(3, dtype=np.int32),
        num_prompt_tokens=3,
        max_total_tokens=20,
        seed=seed,
        eos_token_ids=frozenset({9}),
        stop_token_ids=frozenset({seed}),
        arrival_time=0.0,
    )


def test_draws_and_bans_follow_the_tokens_while_the_rows_stay():
    """Row 1 may not end before its second token."""
    rows = RequestRows(4, 20)
    rows.put(make_request(5, temperature=0.5), 0)
    rows.put(make_request(6, min_tokens=2, top_k=7), 0)
    batches = []
    for _ in range(4):
        batches.append(rows.sampling_batch(np.array([0, 1])))
        rows.num_tokens[:2] += 1
    assert [batch.draw_index.tolist() for batch in batches] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert [batch.banned_token_ids for batch in batches] == [{1: (6, 9)}, {1: (6, 9)}, {}, {}]
    for batch in batches:
        assert batch.temperature.tolist() == [0.5, 1.0]
        assert batch.top_k.tolist() == [0, 7]
        assert batch.seeds.tolist() == [5, 6]


def test_a_row_that_changes_hands_is_sampled_for_its_new_request():
    rows = RequestRows(2, 20)
    requests = [make_request(seed, temperature=seed / 10) for seed in (1, 2, 3)]
    for request in requests[:2]:
        rows.put(request, 0)
    both = np.array([0, 1])
    assert rows.sampling_batch(both).seeds.tolist() == [1, 2]
    assert rows.sampling_batch(both[::-1]).seeds.tolist() == [2, 1]
    assert rows.requests_in(both) == requests[:2]
    rows.take(1)
    rows.put(requests[2], 0)
    assert rows.sampling_batch(both).seeds.tolist() == [1, 3]
    assert rows.sampling_batch(both).temperature.tolist() == [0.1, 0.3]
    assert rows.requests_in(both) == [requests[0], requests[2]]
    assert rows.sampling_batch(both[:1]).seeds.tolist() == [1]


def test_penalties_are_for_the_tokens_so_far_also_after_another_row_was_used():
    rows = RequestRows(3, 20)
    plain, penalised = make_request(5), make_request(6, repetition_penalty=1.5, presence_penalty=0.5)
    rows.put(plain, 0)
    row = rows.put(penalised, 0)
    assert rows.sampling_batch(np.array([0])).penalties == {}
    rows.tokens[row, 3:5] = 7, 1
    rows.num_tokens[row] = 5
    before = rows.sampling_batch(np.array([0, row])).penalties
    rows.take(row)
    rows.put(make_request(8), 0)  # takes the row
    moved = rows.put(penalised, 0)
    assert moved != row
    after = rows.sampling_batch(np.array([moved, 0])).penalties
    for found in (before[1], after[0]):
        counts = dict(zip(found.token_ids.tolist(), found.output_counts.tolist(), strict=True))
        assert counts == {0: 0, 1: 1, 2: 0, 7: 1}
        assert (found.repetition, found.presence, found.frequency) == (1.5, 0.5, 0.0)
    assert len(before) == len(after) == 1
    rows.take(moved)
    rows.put(make_request(9), 0)
    assert rows.sampling_batch(np.array([0, 1, 2])).penalties == {}
