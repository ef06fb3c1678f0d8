"""Compaction: pages that move, and who must hear of it."""

from __future__ import annotations

import dataclasses

from lamella.engine.scheduling import scheduler as scheduler_module
from lamella.engine.scheduling.scheduler import Scheduler
from lamella.kv_cache.block_manager import HybridBlockManager
from lamella.model_executor.runner import ModelRunner
from tests.helpers.planted_faults.planting import replaces


@replaces(HybridBlockManager, "_compact")
def move_forgets_a_row(original, manager, group, in_hand):
    tables = manager.tables.copy()
    has_moved = original(manager, group, in_hand)
    if has_moved:
        row = next((row for row in range(tables.shape[1]) if (tables[:, row] != manager.tables[:, row]).any()), None)
        if row is not None:
            manager.tables[:, row] = tables[:, row]
    return has_moved


@replaces(HybridBlockManager, "_compact")
def move_forgets_the_tree(original, manager, group, in_hand):
    page = manager.tree.page.copy()
    has_moved = original(manager, group, in_hand)
    manager.tree.page[:] = page
    return has_moved


@replaces(HybridBlockManager, "_compact")
def moved_row_not_stamped(original, manager, group, in_hand):
    stamps = manager.table_stamps.copy()
    has_moved = original(manager, group, in_hand)
    manager.table_stamps[:] = stamps
    return has_moved


@replaces(HybridBlockManager, "_compact")
def move_source_and_target_swapped(original, manager, group, in_hand):
    has_moved = original(manager, group, in_hand)
    if has_moved:
        last = manager.moves[-1]
        manager.moves[-1] = last._replace(sources=last.targets, targets=last.sources)
    return has_moved


@replaces(HybridBlockManager, "_compact")
def pages_in_hand_move(original, manager, group, in_hand):
    return original(manager, group, ())


@replaces(HybridBlockManager, "_compact")
def copy_target_moves(original, manager, group, in_hand):
    copies, manager.copies = manager.copies, {}
    has_moved = original(manager, group, in_hand)
    manager.copies = copies
    return has_moved


@replaces(HybridBlockManager, "_compact")
def last_page_of_a_move_not_copied(original, manager, group, in_hand):
    has_moved = original(manager, group, in_hand)
    if has_moved:
        last = manager.moves[-1]
        manager.moves[-1] = last._replace(sources=last.sources[:-1], targets=last.targets[:-1])
    return has_moved


@replaces(scheduler_module, "build_step_plan")
def moves_not_planned(original, *args):
    return dataclasses.replace(original(*args), moves=())


@replaces(scheduler_module, "build_step_plan")
def moves_in_reverse_order(original, *args):
    plan = original(*args)
    return dataclasses.replace(plan, moves=plan.moves[::-1])


@replaces(Scheduler, "roll_back")
def moves_survive_a_failed_step(original, scheduler):
    moves = list(scheduler.manager.moves)
    original(scheduler)
    scheduler.manager.moves[:] = moves


@replaces(Scheduler, "roll_back")
def failed_moves_are_trusted(original, scheduler):
    scheduler.manager.moves.clear()
    original(scheduler)


@replaces(HybridBlockManager, "end_step")
def moves_run_again(original, manager):
    moves = list(manager.moves)
    original(manager)
    manager.moves[:] = moves


@replaces(ModelRunner, "_copy_pages")
def moves_run_after_the_copies(original, runner, plan):
    for group, part in enumerate(plan.groups):
        runner._copy(group, part.copies.src_pages, part.copies.dst_pages)
    for move in plan.moves:
        runner._copy(move.group, move.src_pages, move.dst_pages)
