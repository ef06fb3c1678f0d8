"""What a step copies, commits and plans, and who runs in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from lamella.engine.scheduling import scheduler as scheduler_module
from lamella.engine.scheduling.admission import Admission
from lamella.engine.scheduling.scheduler import Scheduler
from lamella.kv_cache import gathered_tables
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.page_transfers import PageCopies
from lamella.kv_cache.prefix_tree import PrefixTree
from lamella.kv_cache.row_commits import RowCommits
from lamella.kv_cache.row_occupancy import RowOccupancy
from lamella.kv_cache.row_tables import RowTables
from tests.helpers.planted_faults.planting import replaced, replaces

# Copy on write


def _no_copies(copies):
    return [PageCopies(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)) for _ in copies]


@replaces(PageSupply, "planned_copies")
def copy_on_write_without_the_copy(original, supply):
    return _no_copies(original(supply))


@replaces(PageSupply, "planned_copies")
def copy_on_write_in_the_first_group_only(original, supply):
    copies = original(supply)
    return [*copies[:1], *_no_copies(copies[1:])]


@replaces(BlockManager, "begin")
def copy_source_not_locked(original, manager, row, *args, **kwargs):
    has_begun = original(manager, row, *args, **kwargs)
    for group, source, _ in manager.inspect().supply.copies.get(row, ()):
        manager.inspect().tree.refs[group, source] -= 1
    return has_begun


@replaces(Scheduler, "roll_back")
def failed_step_leaves_its_copies(original, scheduler):
    copies = dict(scheduler.manager.inspect().supply.copies)
    original(scheduler)
    scheduler.manager.inspect().supply.copies.update(copies)


# Pending blocks


@replaces(BlockManager, "commit_ahead")
def pending_block_copied_from(original, manager, *args, **kwargs):
    original(manager, *args, **kwargs)
    manager.inspect().tree.end_pending()


@replaces(BlockManager, "end_step")
def block_stays_pending(original, manager, **options):
    with replaced(PrefixTree, "end_pending", lambda _, tree: None):
        original(manager, **options)


@replaces(Scheduler, "_preempt")
def failed_step_keeps_what_was_never_computed(original, scheduler, row, **kwargs):
    return original(scheduler, row)


@replaces(RowOccupancy, "roll_back")
def failed_chunk_keeps_what_was_never_computed(original, occupancy, row, num_computed):
    occupancy._supply.drop_copies(row)
    return num_computed


@replaces(RowCommits, "commit")
def block_committed_before_it_is_computed(original, commits, row, token_ids, num_computed, **kwargs):
    # One block more than is complete, where the row has grown it already.
    page_tokens = commits._page_tokens
    ahead = min(num_computed + page_tokens, int(commits._rows.num_blocks[row]) * page_tokens)
    original(commits, row, token_ids, ahead, **kwargs)


# The scheduler and its plan


@replaces(BlockManager, "next_due")
def decode_grows_one_block_late(original, manager, row):
    return original(manager, row) + manager.layout.page_tokens


@replaces(gathered_tables._ArraySet, "_copy")
def changed_row_not_rewritten(original, arrays, group, rows, indices):
    original(arrays, group, rows, indices[:-1])


@replaces(RowTables, "stamp")
def changed_row_not_stamped(original, tables, group, row):
    pass


@replaces(gathered_tables.GatheredTables, "gather")
def plans_share_their_arrays(original, tables, rows):
    tables._turn = 0
    return original(tables, rows)


@replaces(PrefixTree, "insert_chain")
def chain_hangs_from_its_parent(original, tree, parent, blocks):
    """Every block of a chain becomes a child of the first one's parent."""
    return np.array([tree.insert(parent, tokens) for tokens in blocks])


@replaces(Admission, "has_room")
def admission_without_room(original, admission, *args):
    return True


@replaces(Scheduler, "_preempt")
def resume_counted_as_a_hit(original, scheduler, row, **kwargs):
    request = scheduler.rows.request(row)
    original(scheduler, row, **kwargs)
    request.num_cached_tokens = None
    return request


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
