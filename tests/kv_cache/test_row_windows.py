"""What rows let go of their windows, against a search, block by block, for what can still be seen."""

from __future__ import annotations

import pytest

from lamella.kv_cache.arena import NULL_PAGE
from tests.helpers.cache_parts import make_parts, occupy, tokens_of
from tests.helpers.simulation import chunked, full, sliding

PAGE = 4


def is_needed(spec, block: int, position: int) -> bool:
    """Whether the query at `position` or a later one can see a key of the block."""
    keys = range(block * PAGE, (block + 1) * PAGE)
    return any(spec.first_visible(query) <= key <= query for query in range(position, 64) for key in keys)


@pytest.mark.parametrize("spec", [sliding(1), sliding(5), sliding(9), chunked(6), chunked(16)])
def test_at_once_all_goes_that_nobody_sees_and_nothing_else(spec):
    for position in range(1, 64):
        parts = make_parts([full(), spec])
        occupy(parts, 0, 64)
        parts.windows.slide(0, position, position, at_once=True)
        kept = [block for block in range(16) if parts.rows.pages[1, 0, block] != NULL_PAGE]
        expected = [block for block in range(16) if is_needed(spec, block, position)]
        assert kept == expected, f"position {position}"
        assert parts.rows.first_kept[1, 0] == (expected[0] if expected else 16)
        assert parts.supply.num_owned == [16, len(expected)]


def test_decode_waits_until_an_interval_has_gathered():
    parts = make_parts([full(), sliding(5)], interval_tokens=12)
    occupy(parts, 0, 64)
    first = []
    for position in range(5, 40):  # key 0 is the first to leave the window, at 5
        parts.windows.slide(0, position, position, at_once=False)
        first.append(int(parts.rows.first_kept[1, 0]))
    # The window's first key is position - 4: it is 12 at 16, then 24 at 28.
    assert first == [0] * 11 + [3] * 12 + [6] * 12


def test_a_table_that_changed_is_stamped_and_no_other():
    parts = make_parts([full(), sliding(5)])
    for row in (0, 1):
        occupy(parts, row, 40)
    before = parts.rows.stamps.copy()
    parts.windows.slide(1, 7, 7, at_once=True)
    assert parts.rows.stamps.tolist() == before.tolist(), "nothing slid"
    parts.windows.slide(1, 20, 20, at_once=True)
    assert (parts.rows.stamps != before).tolist() == [[False] * 4, [False, True, False, False]]


@pytest.mark.parametrize("spec", [sliding(5), sliding(9), chunked(6)])
def test_wherever_a_row_ends_who_shares_all_but_a_block_of_it_finds_the_window(spec):
    """A row that is processed up to n, and may have a decode in flight, ends at n or a token later; a prompt may part
    from it anywhere in the last `PAGE` tokens before. The row owns what it needs itself, the tree has the rest."""
    for processed in range(1, 60):
        for computed in (processed, processed + 1):
            parts = make_parts([full(), spec])
            occupy(parts, 0, 64)
            parts.commits.commit(0, tokens_of(64), processed)
            lowest = parts.windows.lowest_resume(0, processed, computed)
            parts.windows.slide(0, processed, lowest, at_once=True)
            owned = {block for block in range(16) if parts.rows.pages[1, 0, block] != NULL_PAGE}
            assert owned == {block for block in range(16) if is_needed(spec, block, processed)}
            assert parts.supply.num_owned[1] == len(owned)
            nodes = parts.rows.nodes[0, : processed // PAGE].tolist()
            left = {block for block, node in enumerate(nodes) if parts.tree.page[1, node] != NULL_PAGE} - owned
            assert len(parts.tree.for_ends) == len(left), "what is left is the first to go but for spare pages"
            for end in range(processed, computed + 1):
                for parted in range(max(0, end - PAGE), end + 1):
                    window = {key // PAGE for key in range(spec.first_visible(parted), parted)}
                    assert window <= owned | left, f"{processed} to {computed}, parted at {parted}"
            assert lowest > processed - 2 * PAGE, "more than a block below what the next token sees"


@pytest.mark.parametrize("spec", [sliding(5), sliding(9), chunked(6)])
def test_what_was_left_goes_when_the_row_slides_on_and_all_when_it_leaves(spec):
    parts = make_parts([full(), spec])
    occupy(parts, 0, 64)
    expected: set[tuple[int, int]] = set()
    for processed in range(1, 60):
        parts.commits.commit(0, tokens_of(64), processed)
        lowest, before = parts.windows.lowest_resume(0, processed, processed), int(parts.rows.first_kept[1, 0])
        parts.windows.slide(0, processed, lowest, at_once=True)
        first_kept = int(parts.rows.first_kept[1, 0])
        if first_kept > before:
            blocks = [block for block in range(first_kept) if is_needed(spec, block, lowest)]
            expected = {(1, int(parts.rows.nodes[0, block])) for block in blocks}
        assert set(parts.tree.for_ends) == expected
    parts.windows.leave_nothing(0)
    assert not parts.tree.for_ends
    assert not parts.tree.ends.any()
    assert parts.arena.num_used == parts.supply.num_owned


@pytest.mark.parametrize("num_prompt_tokens", [30, 31, 32, 33])
def test_what_the_prompts_end_will_need_stays_the_rows_own_while_the_prompt_is_computed(num_prompt_tokens):
    spec = sliding(9)
    end = num_prompt_tokens // PAGE * PAGE
    for processed in range(1, num_prompt_tokens):
        parts = make_parts([full(), spec])
        occupy(parts, 0, num_prompt_tokens)
        parts.windows.slide(0, parts.windows.lowest_owned(0, processed, num_prompt_tokens), processed, at_once=True)
        owned = {block for block in range(9) if parts.rows.pages[1, 0, block] != NULL_PAGE}
        for parted in (processed, *range(end - PAGE, end + 1)):
            needed = {key // PAGE for key in range(spec.first_visible(parted), min(parted, num_prompt_tokens))}
            assert needed <= owned
    assert parts.windows.lowest_owned(0, 45, 0) == 45, "no prompt is being computed"


def test_a_chunk_in_flight_is_counted_by_what_is_processed():
    """Blocks that it is to complete are in the tree already; it may be rolled back to the last whole block."""
    parts = make_parts([full(), sliding(9)])
    occupy(parts, 0, 40)
    parts.rows.num_committed[0] = 10
    assert parts.windows.lowest_resume(0, 14, 40) == 12 - PAGE
    parts.rows.num_committed[0] = 3
    assert parts.windows.lowest_resume(0, 14, 16) == 14 - PAGE


def test_who_keeps_no_ends_leaves_no_block_more():
    parts = make_parts([full(), sliding(9)], enable_prefix_caching=False)
    for processed, computed in ((9, 9), (12, 13), (11, 12)):
        assert parts.windows.lowest_owned(0, processed, 14) == processed
        assert parts.windows.lowest_resume(0, processed, computed) == processed
