"""Compaction: pages that move, and who must hear of it."""

from __future__ import annotations

import dataclasses

from lamella.engine.scheduling import scheduler as scheduler_module
from lamella.engine.scheduling.scheduler import Scheduler
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.page_supply import PageSupply
from lamella.model_executor.runner import ModelRunner
from tests.helpers.planted_faults.planting import replaces


@replaces(PageSupply, "compact")
def move_forgets_a_row(original, supply, group, in_hand=()):
    pages = supply._rows.pages
    before = pages.copy()
    has_moved = original(supply, group, in_hand)
    if has_moved:
        row = next((row for row in range(pages.shape[1]) if (before[:, row] != pages[:, row]).any()), None)
        if row is not None:
            pages[:, row] = before[:, row]
    return has_moved


@replaces(PageSupply, "compact")
def move_forgets_the_tree(original, supply, group, in_hand=()):
    page = supply._tree.page.copy()
    has_moved = original(supply, group, in_hand)
    supply._tree.page[:] = page
    return has_moved


@replaces(PageSupply, "compact")
def moved_row_not_stamped(original, supply, group, in_hand=()):
    stamps = supply._rows.stamps.copy()
    has_moved = original(supply, group, in_hand)
    supply._rows.stamps[:] = stamps
    return has_moved


@replaces(PageSupply, "compact")
def move_source_and_target_swapped(original, supply, group, in_hand=()):
    has_moved = original(supply, group, in_hand)
    if has_moved:
        last = supply.moves[-1]
        supply.moves[-1] = dataclasses.replace(last, src_pages=last.dst_pages, dst_pages=last.src_pages)
    return has_moved


@replaces(PageSupply, "compact")
def pages_in_hand_move(original, supply, group, in_hand=()):
    return original(supply, group, ())


@replaces(PageSupply, "compact")
def copy_target_moves(original, supply, group, in_hand=()):
    copies, supply.copies = supply.copies, {}
    has_moved = original(supply, group, in_hand)
    supply.copies = copies
    return has_moved


@replaces(PageSupply, "compact")
def last_page_of_a_move_not_copied(original, supply, group, in_hand=()):
    has_moved = original(supply, group, in_hand)
    if has_moved:
        last = supply.moves[-1]
        supply.moves[-1] = dataclasses.replace(last, src_pages=last.src_pages[:-1], dst_pages=last.dst_pages[:-1])
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
    moves = list(scheduler.manager.inspect().supply.moves)
    original(scheduler)
    scheduler.manager.inspect().supply.moves[:] = moves


@replaces(Scheduler, "roll_back")
def failed_moves_are_trusted(original, scheduler):
    scheduler.manager.inspect().supply.moves.clear()
    original(scheduler)


@replaces(BlockManager, "end_step")
def moves_run_again(original, manager, **options):
    moves = list(manager.inspect().supply.moves)
    original(manager, **options)
    manager.inspect().supply.moves[:] = moves


@replaces(ModelRunner, "_copy_pages")
def moves_run_after_the_copies(original, runner, plan):
    for group, part in enumerate(plan.groups):
        runner._copy(group, part.copies.src_pages, part.copies.dst_pages)
    for move in plan.moves:
        runner._copy(move.group, move.src_pages, move.dst_pages)
