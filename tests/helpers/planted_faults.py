"""Faults to plant: each breaks one rule of the real code while its context is open.

A fault replaces a method of a class (or a name in a module), so it acts on all objects that are made or
used inside the context. What it replaces must exist, or opening the context fails with AttributeError,
which no test takes for a fault that was noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from lamella.engine import gathered_tables
from lamella.engine import scheduler as scheduler_module
from lamella.engine.scheduler import Scheduler
from lamella.kv_cache.arena import NULL_PAGE, Arena
from lamella.kv_cache.block_manager import HybridBlockManager
from lamella.kv_cache.prefix_tree import NO_NODE, PrefixTree
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, SlidingWindowSpec

FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {}


def replaces(owner: Any, attribute: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the fault of its own name: it is called in place of `owner.attribute`, with the
    original as first argument."""

    def register(faulty: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS[faulty.__name__] = lambda: replaced(owner, attribute, faulty)
        return faulty

    return register


@contextmanager
def replaced(owner: Any, attribute: str, faulty: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, attribute)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return faulty(original, *args, **kwargs)

    with mock.patch.object(owner, attribute, stand_in):
        yield


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


@replaces(HybridBlockManager, "_slide")
def slide_one_block_early(original, manager, row, num_computed, **kwargs):
    original(manager, row, num_computed + manager.page_tokens, **kwargs)


@replaces(HybridBlockManager, "_slide")
def slide_one_block_late(original, manager, row, num_computed, **kwargs):
    original(manager, row, max(0, num_computed - manager.page_tokens), **kwargs)


@replaces(HybridBlockManager, "_slide")
def slide_never(original, manager, row, num_computed, **kwargs):
    pass


@replaces(HybridBlockManager, "_slide")
def slide_ignores_the_interval(original, manager, row, num_computed, **kwargs):
    original(manager, row, num_computed, **{**kwargs, "is_prefill": True})


@replaces(HybridBlockManager, "_slide")
def first_kept_one_block_too_far(original, manager, row, num_computed, **kwargs):
    before = manager.first_kept[:, row].copy()
    original(manager, row, num_computed, **kwargs)
    manager.first_kept[:, row] += manager.first_kept[:, row] > before


# References


@replaces(HybridBlockManager, "begin")
def match_does_not_lock(original, manager, *args, **kwargs):
    with replaced(PrefixTree, "lock", lambda _, tree, group, node: int(tree.page[group, node])):
        return original(manager, *args, **kwargs)


@replaces(HybridBlockManager, "begin")
def hit_locks_one_window_page_too_few(original, manager, *args, **kwargs):
    def too_far(first_visible, spec, position):
        return first_visible(spec, position) + manager.page_tokens

    with replaced(SlidingWindowSpec, "first_visible", too_far):
        return original(manager, *args, **kwargs)


@replaces(PrefixTree, "unlock")
def unlock_twice(original, tree, group, node):
    original(tree, group, node)
    original(tree, group, node)


@replaces(PrefixTree, "unpin")
def pin_never_given_back(original, tree, node):
    pass


@replaces(PrefixTree, "prune")
def dead_leaf_kept(original, tree, node):
    pass


@replaces(PrefixTree, "_drop_unkept_window_page")
def window_page_freed_under_a_reader(original, tree, group, node):
    references = int(tree.refs[group, node])
    tree.refs[group, node] = 0
    original(tree, group, node)
    tree.refs[group, node] = references


@replaces(HybridBlockManager, "_drop_row")
def last_pages_kept_by_a_row_that_leaves(original, manager, row):
    if manager.num_blocks[row]:
        manager.tables[:, row, manager.num_blocks[row] - 1] = NULL_PAGE
    original(manager, row)


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


@replaces(PrefixTree, "__init__")
def key_without_parent(original, tree, *args, **kwargs):
    original(tree, *args, **kwargs)
    assert type(tree._children) is dict
    tree._children = _ParentBlind()


@contextmanager
def salt_ignored() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(replaced(PrefixTree, "root", lambda original, tree, salt: original(tree, None)))
        stack.enter_context(
            replaced(PrefixTree, "match", lambda original, tree, ids, salt, most: original(tree, ids, None, most))
        )
        yield


FAULTS["salt_ignored"] = salt_ignored


@replaces(HybridBlockManager, "release")
def partial_block_one_token_long(original, manager, row, token_ids, num_computed, **kwargs):
    longer = min(num_computed + 1, len(token_ids)) if num_computed % manager.page_tokens else num_computed
    original(manager, row, token_ids, longer, **kwargs)


@replaces(HybridBlockManager, "release")
def partial_block_one_token_short(original, manager, row, token_ids, num_computed, **kwargs):
    original(manager, row, token_ids, num_computed - (num_computed % manager.page_tokens > 1), **kwargs)


# Matching


@replaces(PrefixTree, "_longest_resume")
def match_ignores_windows(original, tree, nodes, limit):
    return limit


@replaces(HybridBlockManager, "match")
def nothing_left_to_compute(original, manager, token_ids, salt=None):
    return manager.tree.match(token_ids, salt, len(token_ids)) if manager.enable_prefix_caching else original(
        manager, token_ids, salt
    )  # fmt: skip


@replaces(HybridBlockManager, "match")
def hit_rounded_down_to_blocks(original, manager, *args, **kwargs):
    match = original(manager, *args, **kwargs)
    return match._replace(num_tokens=len(match.path) * manager.page_tokens, tail_node=NO_NODE)


# Copy on write


def _no_copies(copies):
    return [tuple(np.zeros(0, dtype=np.int64) for _ in pair) for pair in copies]


@replaces(HybridBlockManager, "planned_copies")
def copy_on_write_without_the_copy(original, manager):
    return _no_copies(original(manager))


@replaces(HybridBlockManager, "planned_copies")
def copy_on_write_in_the_first_group_only(original, manager):
    copies = original(manager)
    return [*copies[:1], *_no_copies(copies[1:])]


@replaces(HybridBlockManager, "begin")
def copy_source_not_locked(original, manager, row, *args, **kwargs):
    has_begun = original(manager, row, *args, **kwargs)
    for group, source, _ in manager.copies.get(row, ()):
        manager.tree.refs[group, source] -= 1
    return has_begun


@replaces(Scheduler, "roll_back")
def failed_step_leaves_its_copies(original, scheduler):
    copies = dict(scheduler.manager.copies)
    original(scheduler)
    scheduler.manager.copies.update(copies)


# Pending blocks


@replaces(HybridBlockManager, "commit_ahead")
def pending_block_copied_from(original, manager, *args, **kwargs):
    original(manager, *args, **kwargs)
    manager.tree.pending.clear()


@replaces(HybridBlockManager, "end_step")
def pending_block_never_settles(original, manager):
    pending = set(manager.tree.pending)
    original(manager)
    manager.tree.pending.update(pending)


@replaces(Scheduler, "_preempt")
def failed_step_keeps_what_was_never_computed(original, scheduler, row, **kwargs):
    original(scheduler, row)


@replaces(HybridBlockManager, "roll_back")
def failed_chunk_keeps_what_was_never_computed(original, manager, row, num_computed):
    manager._unlock_copy_sources(row)
    return num_computed


@replaces(HybridBlockManager, "commit")
def block_committed_before_it_is_computed(original, manager, row, token_ids, num_computed, **kwargs):
    # One block more than is complete, where the row has grown it already.
    ahead = min(num_computed + manager.page_tokens, int(manager.num_blocks[row]) * manager.page_tokens)
    original(manager, row, token_ids, ahead, **kwargs)


# Retention and eviction


@replaces(PrefixTree, "add_resume_point")
def last_window_page_not_held(original, tree, node, window_nodes):
    original(tree, node, window_nodes[:-1])


@replaces(HybridBlockManager, "_add_resume_point")
def no_block_more_kept(original, manager, row, last_block, **kwargs):
    original(manager, row, last_block, **{**kwargs, "since": (last_block + 1) * manager.page_tokens})


@replaces(HybridBlockManager, "commit")
def end_of_prompt_not_kept(original, manager, *args, **kwargs):
    original(manager, *args, **{**kwargs, "ends_prompt": False})


@replaces(HybridBlockManager, "release")
def end_of_generation_not_kept(original, manager, *args, **kwargs):
    original(manager, *args, **{**kwargs, "keep": False})


@replaces(HybridBlockManager, "begin")
def divergence_not_kept(original, manager, row, *args, **kwargs):
    has_begun = original(manager, row, *args, **kwargs)
    manager._junction[row] = -1
    return has_begun


@replaces(PrefixTree, "evict_one")
def newest_evicted_first(original, tree):
    def reverse():
        for node in list(tree.resume_points)[::-1]:
            tree.resume_points.move_to_end(node)

    reverse()
    evicted = original(tree)
    reverse()
    return evicted


@replaces(PrefixTree, "touch")
def use_does_not_refresh(original, tree, node):
    pass


@replaces(HybridBlockManager, "_allocate")
def evicts_while_memory_is_free(original, manager, *args):
    manager.tree.evict_one()
    return original(manager, *args)


@replaces(HybridBlockManager, "_commit_block")
def revival_takes_the_wrong_page(original, manager, row, block, key):
    """Where a tombstone comes back to life, hand over the page of the block after."""
    tree, tables = manager.tree, manager.tables
    node = tree.child(int(manager.frontier[row]), key)
    for group in tree.windowed_groups:
        is_tombstone = node != NO_NODE and tree.page[group, node] == NULL_PAGE
        if is_tombstone and block + 1 < manager.num_blocks[row] and tables[group, row, block] != NULL_PAGE:
            tables[group, row, [block, block + 1]] = tables[group, row, [block + 1, block]]
    original(manager, row, block, key)


# The arena


@replaces(HybridBlockManager, "_release_block")
def null_page_freed(original, manager, group, row, block):
    if manager.tables[group, row, block] == NULL_PAGE:
        manager.arena.free(group, NULL_PAGE)
    original(manager, group, row, block)


@replaces(Arena, "free")
def page_freed_for_the_wrong_group(original, arena, group, page):
    original(arena, (group + 1) % len(arena.layout.groups), page)


@replaces(Arena, "free")
def page_never_freed(original, arena, group, page):
    pass


@replaces(Arena, "allocate")
def page_handed_out_twice(original, arena, group, count, near_page=NULL_PAGE):
    pages = original(arena, group, count, near_page)
    if pages and near_page != NULL_PAGE:
        original_free_pages = arena.free_pages_of(group)
        assert near_page not in original_free_pages
        pages[-1] = near_page
    return pages


@replaces(Arena, "allocate")
def null_slab_handed_out(original, arena, group, count, near_page=NULL_PAGE):
    pages = original(arena, group, count, near_page)
    return pages and [page % arena.layout.slab_units for page in pages]


# The scheduler and its plan


@replaces(HybridBlockManager, "next_due")
def decode_grows_one_block_late(original, manager, row):
    return original(manager, row) + manager.page_tokens


@replaces(gathered_tables._ArraySet, "_copy")
def changed_row_not_rewritten(original, arrays, group, rows, indices):
    original(arrays, group, rows, indices[:-1])


@replaces(HybridBlockManager, "_stamp")
def changed_row_not_stamped(original, manager, group, row):
    pass


@replaces(gathered_tables.GatheredTables, "gather")
def plans_share_their_arrays(original, tables, rows):
    tables._turn = 0
    return original(tables, rows)


@replaces(PrefixTree, "insert_chain")
def chain_hangs_from_its_parent(original, tree, parent, blocks):
    """Every block of a chain becomes a child of the first one's parent."""
    return [tree.insert(parent, tokens) for tokens in blocks]


@replaces(Scheduler, "_has_room")
def admission_without_room(original, scheduler, *args):
    return True


@replaces(Scheduler, "_preempt")
def resume_counted_as_a_hit(original, scheduler, row, **kwargs):
    request = scheduler.rows.request(row)
    original(scheduler, row, **kwargs)
    request.num_cached_tokens = None


def _change_groups(plan, change: Callable[[Any], Any]):
    return dataclasses.replace(plan, groups=tuple(change(group) for group in plan.groups))


@replaces(scheduler_module, "build_step_plan")
def slot_mapping_off_by_one(original, *args):
    return _change_groups(
        original(*args), lambda group: dataclasses.replace(group, slot_mapping=group.slot_mapping + 1)
    )


@replaces(scheduler_module, "build_step_plan")
def table_trimmed_one_block_too_far(original, *args):
    return _change_groups(
        original(*args),
        lambda group: dataclasses.replace(
            group, block_tables=group.block_tables[:, 1:], first_blocks=group.first_blocks + 1
        ),
    )


@replaces(scheduler_module, "build_step_plan")
def groups_swapped_in_the_plan(original, *args):
    plan = original(*args)
    return dataclasses.replace(plan, groups=plan.groups[::-1])
