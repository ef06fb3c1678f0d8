"""Steps in flight: what may be done before they are processed. A list of its own, for only a LateSimulation has any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from lamella.engine.scheduling import scheduler as scheduler_module
from lamella.engine.scheduling import step_builder
from lamella.engine.scheduling.planned_steps import PlannedStep
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.engine.scheduling.scheduler import Scheduler
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.prefix_match import PrefixMatch
from tests.helpers.planted_faults.planting import replaces

ASYNC_FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {}


def _as_if_none_were_in_flight(original, supply, *args, **kwargs):
    in_flight, supply.in_flight = supply.in_flight, False
    try:
        return original(*args, **kwargs)
    finally:
        supply.in_flight = in_flight


@replaces(BlockManager, "grow", ASYNC_FAULTS)
def slides_by_the_position_that_is_launched(original, manager, row, *args, num_processed=None, **kwargs):
    return original(manager, row, *args, **kwargs)


@replaces(BlockManager, "grow", ASYNC_FAULTS)
def step_pages_taken_while_others_are_in_use(original, manager, row, *args, **kwargs):
    return _as_if_none_were_in_flight(original, manager.inspect().supply, manager, row, *args, **kwargs)


@replaces(PageSupply, "compact", ASYNC_FAULTS)
def pages_move_while_a_step_reads_them(original, supply, *args):
    return _as_if_none_were_in_flight(original, supply, supply, *args)


@replaces(PageSupply, "give_up", ASYNC_FAULTS)
def page_given_up_is_free_at_once(original, supply, *args):
    return _as_if_none_were_in_flight(original, supply, supply, *args)


@replaces(PageSupply, "free_given_up", ASYNC_FAULTS)
def page_given_up_is_never_free(original, supply):
    pass


@replaces(Scheduler, "_is_in_flight", ASYNC_FAULTS)
def ended_request_leaves_at_once(original, scheduler, row):
    return False


@replaces(Scheduler, "_leave_row", ASYNC_FAULTS)
def ended_request_is_released_twice(original, scheduler, row):
    rows = scheduler.rows
    if scheduler._is_in_flight(row):
        scheduler.manager.release(row, rows.tokens[row], int(rows.num_computed[row]))
    original(scheduler, row)


@replaces(Scheduler, "_vacate", ASYNC_FAULTS)
def token_computed_for_nothing_enters_the_tree(original, scheduler, row, **kwargs):
    if row in scheduler._leaving or scheduler.manager.inspect().supply.in_flight:
        scheduler.rows.num_computed[row] += 1
    original(scheduler, row, **kwargs)


@replaces(PlannedStep, "without", ASYNC_FAULTS)
def token_sampled_for_nothing_is_given(original, step, leaving, result):
    return step, result


@replaces(PlannedStep, "without", ASYNC_FAULTS)
def discarded_tokens_shift_the_others(original, step, leaving, result):
    kept, shortened = original(step, leaving, result)
    return kept, dataclasses.replace(shortened, token_ids=result.token_ids[: len(shortened.token_ids)])


@replaces(Scheduler, "schedule", ASYNC_FAULTS)
def blocks_committed_when_planned(original, scheduler):
    plan = original(scheduler)
    if len(scheduler._planned) == 2:
        rows, step = scheduler.rows, scheduler._planned[0]
        for row, num_new in zip(step.rows.tolist(), step.num_new.tolist(), strict=True):
            if row not in scheduler._leaving:
                commits = scheduler.manager.inspect().commits
                commits.commit(row, rows.tokens[row], int(rows.num_computed[row]) + num_new)
    return plan


@replaces(Scheduler, "roll_back", ASYNC_FAULTS)
def only_the_last_step_rolled_back(original, scheduler):
    while len(scheduler._planned) > 1:
        scheduler._planned.popleft()
    original(scheduler)


@replaces(PrefixMatch, "is_plain", ASYNC_FAULTS)
def copies_planned_while_others_are_in_flight(original, *args):
    return True


@replaces(step_builder, "_token_sources", ASYNC_FAULTS)
def samples_of_the_step_before_mixed_up(original, *args):
    sources = original(*args)
    return None if sources is None else np.where(sources >= 0, sources[::-1].max() - sources, -1)


@replaces(RequestRows, "sampling_batch", ASYNC_FAULTS)
def draws_counted_by_known_tokens(original, rows, sampled, num_tokens=None):
    return original(rows, sampled)


@replaces(scheduler_module, "build_step_plan", ASYNC_FAULTS)
def planned_from_what_is_processed(original, rows, manager, scheduled, num_new, reached, *rest):
    reached = reached._replace(num_computed=rows.num_computed)
    return original(rows, manager, scheduled, num_new, reached, *rest)


@replaces(Scheduler, "_grow_decodes", ASYNC_FAULTS)
def planned_beyond_the_last_token(original, scheduler, reached):
    limits = scheduler.rows.max_total_tokens.copy()
    scheduler.rows.max_total_tokens[:] = 2**40
    decodes = original(scheduler, reached)
    scheduler.rows.max_total_tokens[:] = limits
    return decodes
