"""Which tokens of prompts a step scores: each once, behind tokens that the step computes."""

from __future__ import annotations

import numpy as np
import pytest

from lamella.engine.scheduling.prompt_scores import PromptScores, plan_scores
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.model_executor.step_plan import TokenLogprobs
from tests.helpers.made_requests import make_request
from tests.helpers.simulation import Simulation, full, sliding

NOTHING = np.zeros(0, dtype=np.int64)


def found(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, NOTHING, np.zeros(0, dtype=np.float32))


@pytest.mark.parametrize("start", [1, 4, 9])
@pytest.mark.parametrize("chunk", [1, 3, 10, 30])
def test_chunk_by_chunk_each_position_is_wanted_once(start: int, chunk: int) -> None:
    scores = PromptScores(0, start, 10)
    positions = []
    for computed in range(0, 10, chunk):
        assert scores.is_complete == (computed >= 9)
        wanted = scores.wanted(computed, min(chunk, 10 - computed)).tolist()
        assert scores.first_missing == max(start, computed + 1) or not wanted
        scores.found.update({position: found(position) for position in wanted})
        positions += wanted
    assert positions == list(range(start, 10))
    assert scores.is_complete
    assert scores.first_missing == 10
    assert scores.wanted(0, 10).tolist() == []  # computed again, after it was preempted


def test_a_plan_names_the_tokens_before_and_their_targets() -> None:
    tokens = np.arange(300, dtype=np.int32).reshape(3, 100)
    scores = {2: PromptScores(5, 6, 8), 0: PromptScores(0, 1, 50)}
    scheduled, num_computed = np.array([1, 2, 0]), np.array([7, 0, 10])
    query_start = np.array([0, 1, 9, 13])
    plan = plan_scores(scores, scheduled, query_start, num_computed, tokens)
    # Row 2 computes positions 0 to 7 in the step's tokens 1 to 8, row 0 its positions 10 to 13 in tokens 9 to 12.
    assert plan.rows.tolist() == [2, 2, 0, 0, 0, 0]
    assert plan.positions.tolist() == [6, 7, 11, 12, 13, 14]
    assert plan.tokens.tolist() == [6, 7, 9, 10, 11, 12]
    assert plan.target_ids.tolist() == [206, 207, 11, 12, 13, 14]
    assert plan.num_logprobs.tolist() == [5, 5, 0, 0, 0, 0]
    assert plan_scores(scores, scheduled[:1], query_start[:2], num_computed[:1], tokens) is None


def test_the_cache_is_asked_for_what_need_not_be_scored() -> None:
    request = make_request("r", range(20))
    assert request.sought_token_ids.tolist() == list(range(20))
    request.prompt_scores = PromptScores(0, 8, 20)
    assert request.sought_token_ids.tolist() == list(range(8))  # of which the last is always computed
    request.prompt_scores.found.update({position: found(position) for position in range(8, 13)})
    assert request.sought_token_ids.tolist() == list(range(13))
    request.prompt_scores.found.update({position: found(position) for position in range(13, 20)})
    assert request.sought_token_ids.tolist() == list(range(20))


def test_rows_keep_what_is_found_and_ask_no_more() -> None:
    rows = RequestRows(2, 20)
    request = make_request("r", [4, 5, 6])
    request.prompt_scores = PromptScores(1, 1, 3)
    row = rows.put(request, 0)
    arrays = np.array([row]), np.array([0, 3]), np.array([0])
    plan = rows.scored_tokens(*arrays)
    assert plan.target_ids.tolist() == [5, 6]
    rows.take_in_scores(plan, [found(5), found(6)])
    assert [one.token_id for one in request.prompt_scores.found.values()] == [5, 6]
    assert rows.scored_tokens(*arrays) is None
    rows.take(row)
    assert rows.scored_tokens(*arrays) is None


@pytest.mark.parametrize("specs", [[full()], [full(), sliding(8)]], ids=["full", "hybrid"])
def test_a_cached_prefix_is_computed_anew_from_the_first_position_that_is_scored(specs) -> None:
    simulation = Simulation(specs)
    simulation.add("first", range(1, 41), 3)
    simulation.run()
    for name, start, most_cached in (("all", 1, 0), ("late", 30, 29)):
        simulation.add(name, range(1, 41), 3)
        request = simulation.requests[name]
        request.prompt_scores = PromptScores(0, start, 40)
        plan = simulation.scheduler.schedule()
        assert plan.scored.positions[0] == start
        assert request.num_cached_tokens <= most_cached
        assert request.num_cached_tokens >= most_cached // 2
        simulation.scheduler.roll_back()
        simulation.scheduler.finish(request, "abort")
