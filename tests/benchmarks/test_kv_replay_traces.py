"""Traces as tokens, and sessions in their order."""

import hashlib
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from kv_replay.closed_loop import ClosedLoop
from kv_replay.replay_table import ReplayTable, replay_jobs
from kv_replay.systems import Limits, System
from kv_replay.traces import TraceRequest, load_trace, token_ids
from lamella.errors import ConfigError
from tests.helpers.trace_files import agentic, mooncake


def common_prefix(first, second):
    length = min(len(first), len(second))
    same = first[:length] == second[:length]
    return length if same.all() else int(same.argmin())


def all_tokens(request):
    return np.concatenate(token_ids(request))


def test_equal_hash_ids_are_equal_tokens_and_all_else_differs(tmp_path):
    agentic(tmp_path, {"a": [(40, 3, [1, 2, 3]), (48, 3, [1, 2, 9])], "b": [(40, 3, [1, 2, 3]), (40, 3, [1, 2, 3])]})
    first, second, other, again = load_trace("agentic", tmp_path, num_requests=4)
    # Two spans of 16 are shared within a session; another session's ids name other tokens.
    assert common_prefix(token_ids(first)[0], token_ids(second)[0]) == 32
    assert common_prefix(token_ids(first)[0], token_ids(other)[0]) == 0
    assert np.array_equal(token_ids(other)[0], token_ids(again)[0])
    for request, num_in in ((first, 40), (second, 48), (other, 40), (again, 40)):
        prompt, output = token_ids(request)
        assert (len(prompt), len(output), prompt.dtype, output.dtype) == (num_in, 3, np.int32, np.int32)
        assert prompt.min() >= 0
        assert prompt.max() < 200_000
    # Outputs that nothing continues are nobody else's.
    assert not set(token_ids(other)[1]) & set(token_ids(again)[1])


def test_token_ids_do_not_change_from_version_to_version(tmp_path):
    # Figures are comparable only while these stay.
    agentic(tmp_path, {"a": [(16, 1, [1]), (16, 1, [2])]})
    first = token_ids(load_trace("agentic", tmp_path, num_requests=1)[0])[0]
    assert first.tolist() == expected_span(b"a/1")


def expected_span(name):
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "little")
    return [(((seed + index) * 0x9E3779B97F4A7C15) % 2**64 >> 40) % 200_000 for index in range(16)]


def test_a_turn_s_end_and_output_are_what_the_next_turn_s_prompt_says(tmp_path):
    # Turn one: two named spans, 8 tokens more, 10 of output: 50 in all. Turn two names 48 tokens.
    agentic(tmp_path, {"a": [(40, 10, [1, 2]), (60, 4, [1, 2, 3])]})
    first, second = load_trace("agentic", tmp_path, num_requests=2)
    assert first.continued_by is second
    assert common_prefix(all_tokens(first), token_ids(second)[0]) == 48
    assert len(all_tokens(first)) == 50
    # Cutting the trace between them changes no token.
    (alone,) = load_trace("agentic", tmp_path, num_requests=1)
    assert np.array_equal(all_tokens(alone), all_tokens(first))


def test_conversations_are_linked_only_where_asked_for(tmp_path):
    # 1,100 tokens are two whole spans of 512 and a part, whose id 3 the later, longer prompt does not have.
    mooncake(tmp_path, [(1100, 100, [1, 2, 3]), (600, 5, [1, 7]), (1500, 50, [1, 2, 8])])
    plain = load_trace("conversation", tmp_path, num_requests=3)
    assert common_prefix(token_ids(plain[0])[0], token_ids(plain[2])[0]) == 1024
    linked = load_trace("conversation-cont", tmp_path, num_requests=3)
    assert linked[0].continued_by is linked[2]
    assert common_prefix(all_tokens(linked[0]), token_ids(linked[2])[0]) == 1200
    assert [request.continued_by for request in linked[1:]] == [None, None]
    assert len({request.session for request in linked}) == 3


def test_scale_and_limit(tmp_path):
    turns = [(64, 8, [1, 2, 3, 4]), (80, 8, [1, 2, 3, 4, 5]), (200, 8, [1, 2, 3, 4, 5, 6]), (90, 8, [1])]
    agentic(tmp_path, {"a": turns, "one turn only": [(64, 8, [1])], "b": turns})
    requests = load_trace("agentic", tmp_path, num_requests=9, scale=0.25, max_total_tokens=30)
    # The third turn, 52 tokens after scaling, ends its session.
    assert [(r.session, r.num_prompt_tokens, r.num_output_tokens, r.span_tokens) for r in requests] == [
        ("a", 16, 2, 4), ("a", 20, 2, 4), ("b", 16, 2, 4), ("b", 20, 2, 4),
    ]  # fmt: skip
    assert common_prefix(token_ids(requests[0])[0], token_ids(requests[1])[0]) == 16
    mooncake(tmp_path, [(100, 1, [1]), (9000, 1, [2]), (50, 1, [3])])
    kept = load_trace("conversation", tmp_path, num_requests=9, max_total_tokens=500)
    assert [request.num_prompt_tokens for request in kept] == [100, 50]


def test_skipped_requests_are_those_that_the_limit_lets_through(tmp_path):
    # Of a the third turn is too long, and a session of one turn is none: neither counts.
    turns = [(64, 8, [1, 2, 3, 4]), (80, 8, [1, 2, 3, 4, 5])]
    agentic(tmp_path, {"a": [*turns, (200, 8, [1])], "lone": [(64, 8, [1])], "b": turns, "c": turns})
    table = ReplayTable(
        traces=("agentic",), trace_dir=str(tmp_path), num_requests=3, skip_requests=1, max_total_tokens=100,
        layouts=("gpt-oss-20b",), budgets=(1.0,), systems=(System("lamella"),), variants=(Limits(),),
    )  # fmt: skip
    slice_ = table.requests("agentic")
    assert [request.request_id for request in slice_] == ["a.1", "b.0", "b.1"]
    whole = load_trace("agentic", tmp_path, num_requests=6, max_total_tokens=100)
    assert [request.request_id for request in whole] == ["a.0", "a.1", "b.0", "b.1", "c.0", "c.1"]
    for request, same in zip(slice_, whole[1:4], strict=True):
        assert np.array_equal(all_tokens(request), all_tokens(same))
    # b's first turn still ends as its second one, in the slice, begins.
    assert common_prefix(all_tokens(slice_[1]), token_ids(slice_[2])[0]) == 72
    mooncake(tmp_path, [(90, 1, [1]), (900, 1, [2]), (80, 1, [3]), (70, 1, [4])])
    assert [request.num_prompt_tokens for request in table.requests("conversation")] == [80, 70]
    with pytest.raises(ConfigError, match="has no request after the first 6"):
        replace(table, skip_requests=6).requests("agentic")


def test_what_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="choose one of agentic, conversation"):
        load_trace("chat", tmp_path, num_requests=1)
    with pytest.raises(ConfigError, match=r"mooncake_synthetic_trace\.jsonl\.gz, which does not exist"):
        load_trace("synthetic", tmp_path, num_requests=1)
    agentic(tmp_path, {"a": [(16, 1, [1]), (16, 1, [2])]})
    with pytest.raises(ConfigError, match="leaves nothing of spans of 16 tokens"):
        load_trace("agentic", tmp_path, num_requests=1, scale=0.05)


# Sessions


def turn(name):
    return TraceRequest(name, name[0], 1, 1, (), 16, name[0])


def test_closed_loop_sends_a_turn_when_its_session_s_last_one_is_answered():
    turns = {name: turn(name) for name in ("a1", "a2", "b1", "b2", "c1", "d1")}
    loop = ClosedLoop(turns.values(), num_sessions=2)
    assert [one.request_id for one in loop.start()] == ["a1", "b1"]
    answered = ["b1", "b2", "a1", "c1", "a2", "d1"]
    arrivals = [loop.answer(turns[name]) for name in answered]
    # b's second turn; c in b's place; a's second; d in c's place; then nobody is left.
    assert [one and one.request_id for one in arrivals] == ["b2", "c1", "a2", "d1", None, None]


def test_questions_on_a_document_part_where_it_ends():
    requests = load_trace("documents", None, num_requests=20, scale=0.01)
    assert [one.request_id for one in load_trace("documents", None, num_requests=20, scale=0.01)] == [
        one.request_id for one in requests
    ]
    assert len({one.session for one in requests}) == 2
    prompts = {one.request_id: token_ids(one)[0] for one in requests}
    for first, second in combinations(requests, 2):
        is_same = first.session == second.session and first.hash_ids == second.hash_ids
        shared = common_prefix(prompts[first.request_id], prompts[second.request_id])
        assert shared == (first.boundaries[0] if is_same else 0)
        assert not is_same or first.boundaries == second.boundaries


def test_a_hint_reaches_the_cache():
    """With memory for fewer documents than are asked about in turn."""
    table = ReplayTable(
        traces=("documents",), trace_dir=None, num_requests=45, scale=0.1, num_sessions=2, layouts=("gemma-3-27b",),
        budgets=(26.0,), systems=(System("lamella"), System("hinted")),
        variants=(Limits(max_num_seqs=4, max_num_batched_tokens=512),),
    )  # fmt: skip
    without, hinted = (job().outcome for job in replay_jobs(table))
    assert hinted.hit_share > without.hit_share + 0.03
