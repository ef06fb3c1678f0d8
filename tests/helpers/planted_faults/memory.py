"""What keeps pages, who gets them, and what is evicted."""

from __future__ import annotations

from lamella.engine.scheduling.waiting_queue import WaitingQueue
from lamella.kv_cache.arena import NULL_PAGE, Arena
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.child_index import NO_NODE, ChildIndex
from lamella.kv_cache.expectations import Expectations
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.prefix_tree import PrefixTree
from lamella.kv_cache.resume_points import ResumePoints
from lamella.kv_cache.row_commits import RowCommits
from lamella.kv_cache.row_occupancy import RowOccupancy
from lamella.kv_cache.spec import SlidingWindowSpec
from tests.helpers.planted_faults.planting import replaced, replaces

# References


@replaces(BlockManager, "begin")
def match_does_not_lock(original, manager, *args, **kwargs):
    with replaced(PrefixTree, "lock", lambda _, tree, group, node: int(tree.page[group, node])):
        return original(manager, *args, **kwargs)


@replaces(BlockManager, "begin")
def hit_locks_one_window_page_too_few(original, manager, *args, **kwargs):
    def too_far(first_visible, spec, position):
        return first_visible(spec, position) + manager.layout.page_tokens

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


@replaces(PrefixTree, "_release_window_page")
def window_page_freed_under_a_reader(original, tree, group, node):
    references = int(tree.refs[group, node])
    tree.refs[group, node] = 0
    original(tree, group, node)
    tree.refs[group, node] = references


@replaces(RowOccupancy, "leave")
def last_pages_kept_by_a_row_that_leaves(original, occupancy, row):
    rows = occupancy._rows
    if rows.num_blocks[row]:
        rows.pages[:, row, rows.num_blocks[row] - 1] = NULL_PAGE
    original(occupancy, row)


# Retention and eviction


@replaces(PrefixTree, "add_resume_point")
def last_window_page_not_held(original, tree, node, window_nodes):
    original(tree, node, window_nodes[:-1])


@replaces(RowCommits, "add_resume_point")
def no_block_more_kept(original, commits, row, last_block, **kwargs):
    original(commits, row, last_block, **{**kwargs, "since": (last_block + 1) * commits._page_tokens})


@replaces(RowCommits, "commit")
def end_of_prompt_not_kept(original, commits, *args, **kwargs):
    original(commits, *args, **{**kwargs, "ends_prompt": False})


@replaces(BlockManager, "release")
def end_of_generation_not_kept(original, manager, *args, **kwargs):
    original(manager, *args, **{**kwargs, "keep": False})


@replaces(BlockManager, "begin")
def divergence_not_kept(original, manager, row, *args, **kwargs):
    has_begun = original(manager, row, *args, **kwargs)
    manager.inspect().rows.junction[row] = -1
    return has_begun


@replaces(PrefixTree, "evict_one")
def newest_evicted_first(original, tree):
    def reverse():
        for node in list(tree.resume_points)[::-1]:
            tree.resume_points.touch(node)

    reverse()
    evicted = original(tree)
    reverse()
    return evicted


@replaces(PrefixTree, "touch")
def use_does_not_refresh(original, tree, node):
    pass


@replaces(PageSupply, "_allocate")
def evicts_while_memory_is_free(original, supply, *args):
    supply._tree.evict_one()
    return original(supply, *args)


@replaces(RowCommits, "_commit_block")
def revival_takes_the_wrong_page(original, commits, row, block, key, **options):
    """Where a tombstone comes back to life, hand over the page of the block after."""
    tree, rows = commits._tree, commits._rows
    node = tree.child(int(rows.frontier[row]), key)
    for group in tree.windowed_groups:
        is_tombstone = node != NO_NODE and tree.page[group, node] == NULL_PAGE
        if is_tombstone and block + 1 < rows.num_blocks[row] and rows.pages[group, row, block] != NULL_PAGE:
            rows.pages[group, row, [block, block + 1]] = rows.pages[group, row, [block + 1, block]]
    original(commits, row, block, key, **options)


# The arena


@replaces(PageSupply, "release_block")
def null_page_freed(original, supply, group, row, block):
    if supply._rows.pages[group, row, block] == NULL_PAGE:
        supply.arena.free(group, NULL_PAGE)
    original(supply, group, row, block)


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


# Expectations, spare pages and passed resume points


@replaces(Expectations, "turn")
def expected_evicted_in_the_order_of_need(original, expectations, node):
    rank, since = original(expectations, node)
    return -rank, since


@replaces(ResumePoints, "_worth")
def expected_prefix_evicted_first(original, points, node):
    is_expected, *others = original(points, node)
    return (not is_expected, *others)


@replaces(ResumePoints, "note_unused_page")
def set_aside_for_good(original, points, page):
    pass


@replaces(ResumePoints, "note_unused")
def set_aside_though_nothing_else_keeps_it(original, points, node):
    pass


@replaces(ChildIndex, "note_source")
def tombstone_stays_a_source(original, index, node):
    if index._is_source(node):
        original(index, node)


@replaces(BlockManager, "withdraw")
def withdrawal_forgotten(original, manager, expectation):
    pass


@replaces(WaitingQueue, "expect_first")
def preempted_request_expects_nothing(original, queue, request):
    pass


@replaces(BlockManager, "rerank")
def rank_ignores_the_policy(original, manager, expectation, rank):
    pass


@replaces(PrefixTree, "lock")
def spare_page_stays_listed_when_locked(original, tree, group, node):
    was_spare = (group, node) in tree.spare
    page = original(tree, group, node)
    if was_spare:
        tree.spare[group, node] = None
    return page


@replaces(PrefixTree, "add_resume_point")
def spare_page_stays_listed_when_held(original, tree, node, window_nodes):
    spare = [page for page in window_nodes if page in tree.spare]
    original(tree, node, window_nodes)
    tree.spare.update(dict.fromkeys(spare))


@replaces(PrefixTree, "evict_one")
def spare_evicted_last(original, tree):
    points = tree.resume_points
    if not any(tree._keeps_memory(node) for node in points):
        return original(tree)
    spare = list(tree.spare)
    tree.spare.clear()
    has_evicted = original(tree)
    tree.spare.update((page, None) for page in spare if tree.page[page] != NULL_PAGE)
    return has_evicted


@replaces(PrefixTree, "_release_window_page")
def nothing_is_spare(original, tree, group, node):
    keeps_spare, tree.keep_spare = tree.keep_spare, False
    original(tree, group, node)
    tree.keep_spare = keeps_spare


@replaces(PrefixTree, "pass_by")
def nothing_is_passed(original, tree, path):
    pass


@replaces(PrefixTree, "pass_by")
def branch_points_are_passed(original, tree, path):
    for node in path:
        tree.resume_points.pass_by(node)


@replaces(PrefixTree, "pass_by_short_blocks")
def short_block_is_not_passed(original, tree, parent, block):
    pass


@replaces(BlockManager, "release")
def passed_by_its_own_answer(original, manager, row, token_ids, num_computed, **kwargs):
    rows = manager.inspect().rows
    manager.inspect().tree.pass_by(rows.nodes[row, : rows.num_committed[row]].tolist())
    original(manager, row, token_ids, num_computed, **kwargs)
