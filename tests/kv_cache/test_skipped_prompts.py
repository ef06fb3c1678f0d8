"""Models with windowed layers only: of a long prompt no more is computed than its last token depends on.

The fake executor follows layer by layer which KV is exact, and refuses to sample from what is not.
"""

from __future__ import annotations

import numpy as np
import pytest

from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.fake_executor import foretell
from tests.helpers.simulation import Simulation, chunked, full, sliding

PROMPT = list(range(100, 160))


def ask(simulation, request_id, prompt, num_tokens=6):
    """(answer, prompt tokens that were computed)."""
    simulation.add(request_id, prompt, num_tokens)
    computed = []
    execute = simulation.executor.execute
    simulation.executor.execute = lambda plan, contexts: computed.append(len(plan.token_ids)) or execute(plan, contexts)
    simulation.run()
    simulation.executor.execute = execute
    return simulation.outputs[request_id], sum(computed) - (num_tokens - 1)


def make(specs, **arguments):
    return Simulation(specs, max_model_len=128, **{"skips_prompts": True, **arguments})


def test_what_is_computed_by_hand():
    """60 tokens in blocks of 4, three windows of 4. The prompt ends in block 14; block 13 is kept with it, so all must
    be exact from 52 on, and the windows there in whole blocks, from 49. Three layers see 3 tokens back each: 40."""
    simulation = make([sliding(4)] * 3)
    assert ask(simulation, "a", PROMPT) == (foretell(None, PROMPT, 6), 20)
    hits = simulation.scheduler.counters().hits
    assert (hits.num_skipped_tokens, hits.num_full_tokens, hits.num_partial_tokens) == (40, 0, 0)
    assert simulation.scheduler.counters().num_cached_tokens == 0
    # KV is exact in all layers from 40 + 3 + 3 = 46 on, so from block 12 on it is in the tree.
    tree = simulation.manager.inspect().tree
    assert sorted(int(tree.end[node]) for node in tree.nodes() if tree.page[0, node] >= 0)[0] > 48


def test_the_next_turn_finds_the_end_of_the_last():
    simulation = make([sliding(4)] * 3)
    answer, _ = ask(simulation, "a", PROMPT)
    later = [*PROMPT, *answer, 7, 8, 9]
    found, num_computed = ask(simulation, "b", later)
    assert found == foretell(None, later, 6)
    assert num_computed == len(later) - 65, "all but the last token of the answer was computed before"


def test_a_prompt_that_parts_in_what_was_skipped():
    simulation = make([sliding(4)] * 3)
    ask(simulation, "a", PROMPT)
    other = [*PROMPT[:30], *range(300, 330)]
    assert ask(simulation, "b", other) == (foretell(None, other, 6), 20)
    assert ask(simulation, "a again", PROMPT) == (foretell(None, PROMPT, 6), 1)


@pytest.mark.parametrize(
    ("specs", "arguments"),
    [
        ([sliding(4), full(), sliding(4)], {}),
        ([full()], {}),
        ([sliding(4)] * 3, {"skips_prompts": False}),
        ([sliding(4)] * 3, {"retention": RetentionPolicy("all")}),
        ([sliding(4)] * 3, {"retention": RetentionPolicy("tails", grid_tokens=16)}),
        ([sliding(12)] * 3, {}),  # 36 tokens and blocks: more than half of the prompt
    ],
)
def test_where_all_is_computed(specs, arguments):
    assert ask(make(specs, **arguments), "a", PROMPT) == (foretell(None, PROMPT, 6), 60)


def test_without_prefix_caching():
    simulation = make([sliding(4)] * 3, enable_prefix_caching=False)
    for request_id in "ab":
        assert ask(simulation, request_id, PROMPT) == (foretell(None, PROMPT, 6), 20)


@pytest.mark.parametrize("page_tokens", [1, 3, 4, 8])
@pytest.mark.parametrize("extra_slabs", [0, 2, 100])
@pytest.mark.parametrize("specs", [[sliding(4)] * 3, [sliding(3), sliding(5, heads=2)], [chunked(4), sliding(3)]])
def test_many_requests(specs, page_tokens, extra_slabs):
    """Beginnings in common, little memory, small chunks: preemption and resumes on the way."""
    generator = np.random.default_rng(page_tokens)
    simulation = make(specs, page_tokens=page_tokens, extra_slabs=extra_slabs, chunk_tokens=9, step_tokens=8)
    prompts = {}
    for index in range(8):
        begin = PROMPT[: int(generator.integers(1, 60))]
        prompts[str(index)] = begin + generator.integers(200, 900, size=int(generator.integers(1, 50))).tolist()
        simulation.add(str(index), prompts[str(index)], 9)
    simulation.run()
    for request_id, prompt in prompts.items():
        assert simulation.outputs[request_id] == foretell(None, prompt, 9)
    assert simulation.scheduler.counters().hits.num_skipped_tokens > 0
