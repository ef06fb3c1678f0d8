"""What a request sees, finds and shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.child_index import NO_NODE, ChildIndex
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.prefix_tree import PrefixTree
from lamella.kv_cache.row_windows import RowWindows
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, SlidingWindowSpec
from tests.helpers.planted_faults.planting import FAULTS, replaced, replaces

# Windows and sliding


@replaces(SlidingWindowSpec, "first_visible")
def window_one_key_short(original, spec, position):
    return min(position, original(spec, position) + 1)


@replaces(SlidingWindowSpec, "first_visible")
def window_one_key_long(original, spec, position):
    return max(0, original(spec, position) - 1)


@replaces(ChunkedLocalAttentionSpec, "first_visible")
def chunk_begins_one_key_late(original, spec, position):
    return min(position, original(spec, position) + 1)


@replaces(RowWindows, "slide")
def slide_one_block_early(original, windows, row, position, end_position, **kwargs):
    original(windows, row, position + windows._page_tokens, end_position, **kwargs)


@replaces(RowWindows, "slide")
def slide_one_block_late(original, windows, row, position, end_position, **kwargs):
    original(windows, row, max(0, position - windows._page_tokens), end_position, **kwargs)


@replaces(RowWindows, "slide")
def slide_never(original, windows, row, position, end_position, **kwargs):
    pass


@replaces(RowWindows, "slide")
def slide_ignores_the_interval(original, windows, row, position, end_position, **kwargs):
    original(windows, row, position, end_position, **{**kwargs, "at_once": True})


@replaces(RowWindows, "lowest_resume")
def slide_leaves_no_block_more(original, windows, row, num_processed, num_computed):
    return num_processed


@replaces(RowWindows, "lowest_owned")
def what_a_prompts_end_needs_is_left_too_early(original, windows, row, num_processed, prompt_tokens):
    return num_processed


@replaces(RowWindows, "leave_found")
def a_row_leaves_nothing_of_what_it_found(original, windows, group, row, match):
    pass


@replaces(RowWindows, "leave_nothing")
def ends_of_rows_that_are_gone_want_pages(original, windows, row):
    pass


@replaces(PrefixTree, "evict_for_end")
def what_is_for_an_end_never_goes(original, tree):
    return False


@replaces(PageSupply, "evict_for")
def what_is_for_an_end_goes_before_spare_pages(original, supply, group):
    return supply._tree.evict_for_end() or original(supply, group)


@replaces(PageSupply, "evict_for")
def what_is_for_an_end_goes_after_places_to_resume(original, supply, group):
    return supply._tree.evict_one() or original(supply, group)


@replaces(RowWindows, "slide")
def first_kept_one_block_too_far(original, windows, row, position, end_position, **kwargs):
    before = windows._rows.first_kept[:, row].copy()
    original(windows, row, position, end_position, **kwargs)
    windows._rows.first_kept[:, row] += windows._rows.first_kept[:, row] > before


# Keys


class _ParentBlind(dict):  # type: ignore[type-arg]
    """A dictionary of (parent, tokens) that looks at the tokens only."""

    def __setitem__(self, key, value):
        super().__setitem__(key[1], value)

    def update(self, items):
        for key, value in items:
            self[key] = value

    def __getitem__(self, key):
        return super().__getitem__(key[1])

    def __delitem__(self, key):
        super().__delitem__(key[1])

    def __contains__(self, key):
        return super().__contains__(key[1])

    def get(self, key, default=None):
        return super().get(key[1], default)


@replaces(ChildIndex, "__init__")
def key_without_parent(original, index, is_source):
    original(index, is_source)
    assert type(index._nodes) is dict
    index._nodes = _ParentBlind()


@contextmanager
def salt_ignored() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(replaced(PrefixTree, "root", lambda original, tree, salt: original(tree, None)))
        stack.enter_context(
            replaced(PrefixTree, "match", lambda original, tree, ids, salt, most: original(tree, ids, None, most))
        )
        yield


FAULTS["salt_ignored"] = salt_ignored


@replaces(BlockManager, "release")
def partial_block_one_token_long(original, manager, row, token_ids, num_computed, **kwargs):
    longer = min(num_computed + 1, len(token_ids)) if num_computed % manager.layout.page_tokens else num_computed
    original(manager, row, token_ids, longer, **kwargs)


@replaces(BlockManager, "release")
def partial_block_one_token_short(original, manager, row, token_ids, num_computed, **kwargs):
    original(manager, row, token_ids, num_computed - (num_computed % manager.layout.page_tokens > 1), **kwargs)


# Matching


@replaces(PrefixTree, "_longest_resume")
def match_ignores_windows(original, tree, nodes, limit):
    return limit


@replaces(BlockManager, "match")
def nothing_left_to_compute(original, manager, token_ids, salt=None, boundaries=()):
    if not manager.settings.enable_prefix_caching:
        return original(manager, token_ids, salt)
    return manager.inspect().tree.match(token_ids, salt, len(token_ids))


@replaces(BlockManager, "match")
def hit_rounded_down_to_blocks(original, manager, *args, **kwargs):
    match = original(manager, *args, **kwargs)
    return match._replace(num_tokens=len(match.path) * manager.layout.page_tokens, tail_node=NO_NODE)
