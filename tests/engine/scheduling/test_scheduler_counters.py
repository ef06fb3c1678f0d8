"""What admissions add up to."""

from __future__ import annotations

import dataclasses

from lamella.engine.scheduling.scheduler_counters import AdmissionCounters
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.prefix_match import PrefixMatch
from tests.helpers.made_requests import make_request


def test_each_first_admission_counts_its_prompt_and_what_was_found_of_it():
    """Pages of 4. The first finds 10 tokens: two blocks and a copy of 2; the second nothing; of the third's 12, 4 need
    not be computed, and 3 more are computed for their sliding KV alone."""
    matches = [
        (20, PrefixMatch(10, [], NO_NODE, 10)),
        (7, PrefixMatch(0, [], NO_NODE, 0)),
        (15, PrefixMatch(12, [], NO_NODE, 12, num_replayed_tokens=3, num_skipped_tokens=4)),
    ]
    counted = AdmissionCounters()
    for num_prompt, match in matches:
        counted = counted.add(make_request("r", range(num_prompt)), match, 4)
    assert counted[:3] == (3, 42, 18)
    assert dataclasses.asdict(counted.hits) == {
        "num_full_requests": 2,
        "num_full_tokens": 16,
        "num_partial_requests": 1,
        "num_partial_tokens": 2,
        "num_replay_requests": 1,
        "num_replay_tokens": 3,
        "num_skipped_tokens": 4,
    }
