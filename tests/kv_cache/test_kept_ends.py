"""Each end is kept with its window and one block more: a later prompt that parts inside the last block finds all that
it shares, whatever the chunks were and whatever else was evicted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.spec import KVCacheSpec
from tests.helpers.kept_ends import evict_all, found, tokens_of
from tests.helpers.late_simulation import LateSimulation
from tests.helpers.simulation import Simulation, chunked, full, sliding

ENDS = ("prompt", "generation", "abort", "preemption")


class Case(NamedTuple):
    specs: list[KVCacheSpec]
    page_tokens: int
    chunk_tokens: int
    num_prompt_tokens: int
    num_generated: int = 3
    end: str = "prompt"
    interval_tokens: int | None = None
    step_tokens: int = 0
    is_late: bool = False
    num_shared: int = 0  # with an earlier prompt, whose resume points are gone when this one has begun
    kv_sharing: dict[int, int] | None = None


def evict_what_is_left_for_ends(simulation: Simulation) -> None:
    evict_all(simulation)
    while simulation.manager.inspect().tree.evict_for_end():
        pass


def run_to_the_end(case: Case) -> tuple[Simulation, list[int], int, int]:
    """The simulation, the request's tokens, how many are computed, and the end that is kept."""
    is_long = case.num_prompt_tokens > 200
    simulation = (LateSimulation if case.is_late else Simulation)(
        case.specs, page_tokens=case.page_tokens, chunk_tokens=case.chunk_tokens, step_tokens=case.step_tokens,
        max_model_len=5000 if is_long else 250, extra_slabs=1000 if is_long else 100, kv_sharing=case.kv_sharing,
        interval_tokens=case.interval_tokens, never_idle=bool(case.step_tokens), windowed_replay=False,
    )  # fmt: skip
    assert simulation.scheduler.chunk_tokens == case.chunk_tokens
    prompt = tokens_of(case.num_prompt_tokens)
    if case.num_shared:
        simulation.add("before", [*prompt[: case.num_shared], 49, 49], 1)
        simulation.run()
    simulation.add("r", prompt, case.num_generated if case.end == "generation" else case.num_generated + 40)
    request = simulation.requests["r"]
    rows = simulation.scheduler.rows
    simulation.step()
    if case.num_shared and request.row >= 0:
        evict_all(simulation)
    num_computed = 0
    wanted = case.num_prompt_tokens + (0 if case.end == "prompt" else case.num_generated)
    while request.row >= 0 and not request.is_finished and num_computed < wanted:
        num_computed = int(rows.num_computed[request.row])
        if num_computed < wanted:
            if case.end == "prompt" and not case.num_shared:  # where it ends is known: what is kept there is its own
                evict_what_is_left_for_ends(simulation)
            simulation.step()
            if case.end != "prompt" and request.row >= 0:  # all that is kept must be the request's own until it ends
                evict_all(simulation)
    if case.end == "abort":
        simulation.finish("r")
    elif case.end == "preemption":
        if case.is_late:
            while simulation.launched:
                simulation._process(fail=False)
        simulation.scheduler._preempt(request.row)
    while case.is_late and simulation.launched:
        simulation._process(fail=False)
    tokens = [*prompt, *simulation.outputs["r"]]
    if case.end == "prompt":
        end = case.num_prompt_tokens // case.page_tokens * case.page_tokens
        return simulation, tokens, case.num_prompt_tokens, end
    return simulation, tokens, len(tokens) - 1, len(tokens) - 1


def check(case: Case) -> None:
    simulation, tokens, num_computed, end = run_to_the_end(case)
    while simulation.manager.inspect().tree.spare:
        simulation.manager.inspect().tree.evict_one()
    # A request that resumed at a kept place has the window of that place, and none below it.
    lowest = case.num_shared + 2 if case.num_shared else 0
    promised = range(max(0, end - case.page_tokens, lowest - case.page_tokens), end + 1)
    assert [found(simulation, tokens, shared) for shared in promised] == [*promised]
    # The tokens after a prompt's last whole block are in the tree only when that block is full or the request ends.
    if case.end == "prompt" and not case.is_late:
        assert found(simulation, tokens, num_computed) == end


def cases() -> st.SearchStrategy[Case]:
    windows = st.sampled_from([1, 2, 3, 5, 8, 9, 10, 16, 17])
    one = st.one_of(windows.map(sliding), st.sampled_from([3, 4, 7, 8, 10, 20]).map(chunked))
    specs = st.one_of(
        one.map(lambda spec: [full(), spec, spec]),
        st.tuples(one, one).map(lambda two: [full(), *two, full()]),
        one.map(lambda spec: [spec, spec]),
        st.just([full(), full()]),
    )
    return st.builds(
        Case,
        specs,
        page_tokens=st.sampled_from([1, 3, 4, 8]),
        chunk_tokens=st.sampled_from([1, 3, 4, 8, 12, 16, 40]),
        num_prompt_tokens=st.integers(8, 50),
        num_generated=st.integers(1, 20),
        end=st.sampled_from(ENDS),
        interval_tokens=st.sampled_from([None, 1, 10]),
        step_tokens=st.sampled_from([0, 0, 16, 64]),
        is_late=st.booleans(),
        num_shared=st.sampled_from([0, 0, 7]),
        kv_sharing=st.none(),
    )


@settings(max_examples=40, deadline=None)
@given(cases())
@example(Case([full(), sliding(16)], 4, 32, 36, end="prompt"))
@example(Case([full(), sliding(2)], 4, 14, 15, end="prompt"))  # the last chunk begins and ends inside one block
@example(Case([full(), chunked(8)], 4, 16, 17, end="prompt"))
@example(Case([full(), sliding(16)], 4, 16, 22, 3, end="generation"))
@example(Case([full(), sliding(16)], 4, 16, 23, 1, end="abort", is_late=True))
@example(Case([full(), sliding(9)], 4, 20, 40, 0, end="preemption", step_tokens=64))
@example(Case([full(), sliding(1)], 3, 1, 8, 1, end="prompt", is_late=True))  # the last token is computed like a decode
@example(Case([full(), chunked(7)], 4, 1, 17, 1, end="prompt", is_late=True))
def test_what_parts_inside_the_last_block_finds_all_that_it_shares(case):
    check(case)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("spec", [sliding(16), sliding(10), chunked(12)], ids=str)
@pytest.mark.parametrize("page_tokens", [4, 16])
def test_every_length_around_a_block_and_every_chunk(spec, page_tokens, end):
    for chunk_tokens in (page_tokens, 2 * page_tokens, 2 * page_tokens + 1):
        for num_prompt_tokens in range(3 * page_tokens - 1, 4 * page_tokens + 2):
            check(Case([full(), spec, spec], page_tokens, chunk_tokens, num_prompt_tokens, 2, end))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("sharing", [None, {2: 1}], ids=["own KV", "shared KV"])
def test_a_long_prompt_whose_last_chunk_begins_at_a_block(end, sharing):
    """4,100 tokens in chunks of 2,048, a window of 1,024, blocks of 16: the last chunk begins at 4,096."""
    specs = [full(), sliding(1024), sliding(1024)]
    check(Case(specs, 16, 2048, 4100, 5, end, kv_sharing=sharing))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("spec", [sliding(16), chunked(8)], ids=str)
def test_fixed_pools(spec, end, monkeypatch):
    """The same manager with a quota of slabs for each group."""
    quotas = {}

    def with_quota(self, layout, *, num_slabs, **options):
        each = (num_slabs - 1) // 2
        quotas[num_slabs] = each
        make(self, layout, num_slabs=1 + 2 * each, slab_quota=(each, each), **options)

    make = BlockManager.__init__
    monkeypatch.setattr(BlockManager, "__init__", with_quota)
    for num_prompt_tokens in range(32, 38):
        check(Case([full(), spec, spec], 4, 16, num_prompt_tokens, 3, end))
    assert quotas


def test_in_the_smallest_arena_too():
    """Memory for one request and no more: what its end needs is counted in what it may hold."""
    for window in (15, 16, 17):
        for num_prompt_tokens in range(44, 56):
            simulation = Simulation(
                [full(), sliding(window)], page_tokens=4, max_model_len=64, extra_slabs=0, chunk_tokens=8,
                retention=RetentionPolicy(),
            )  # fmt: skip
            prompt = tokens_of(num_prompt_tokens)
            simulation.add("r", prompt, 5)
            simulation.run()
            tokens = [*prompt, *simulation.outputs["r"]]
            end = len(tokens) - 1
            promised = range(end - 4, end + 1)
            assert [found(simulation, tokens, shared) for shared in promised] == [*promised]


def pages_held(manager: BlockManager) -> Iterable[int]:
    return (manager.inspect().rows.pages != -1).sum(axis=2).max(axis=1).tolist()


def test_a_policy_that_keeps_no_ends_holds_no_block_more():
    for options in ({"enable_prefix_caching": False}, {"retention": RetentionPolicy("none")}):
        simulation = Simulation([full(), sliding(9)], page_tokens=4, max_model_len=120, chunk_tokens=16, **options)
        assert simulation.manager.settings.num_blocks_more == 0
        simulation.add("r", tokens_of(60), 40)
        held = []
        while simulation.scheduler.has_requests:
            simulation.step()
            if int(simulation.scheduler.rows.num_tokens[0]) > 62:
                held.append(pages_held(simulation.manager)[1])
        assert (
            max(held)
            == 3
            == build_layout([sliding(9)], page_tokens=4)
            .groups[0]
            .spec.max_decode_pages(page_tokens=4, interval_tokens=4, max_model_len=120, num_blocks_more=0)
        )
