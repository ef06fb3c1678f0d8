"""Holds the block tables of every plan against the block manager's own, and every plan against the next."""

from __future__ import annotations

from lamella.kv_cache.arena import NULL_PAGE
from tests.helpers.simulation import Simulation


def watch_tables(simulation: Simulation) -> None:
    """From now on `schedule` asserts that a plan's tables are what the manager has, entry by entry, and that the
    arrays of the plan before are as they were, although its step may still be running."""
    scheduler, manager = simulation.scheduler, simulation.manager
    schedule = scheduler.schedule
    before = []  # (array of the plan before, its contents when it was planned)

    def watched():
        plan = schedule()
        for array, contents in before:
            assert array.tolist() == contents, "a plan changed while its step could be running"
        before.clear()
        for group, part in enumerate([] if plan is None else plan.groups):
            before.extend((array, array.tolist()) for array in (part.block_tables, part.first_blocks))
            for index, row in enumerate(scheduler._scheduled.tolist()):
                first = int(manager.inspect().rows.first_kept[group, row])
                own = manager.inspect().rows.pages[group, row].tolist()[first:]
                given = part.block_tables[index].tolist()
                length = max(len(own), len(given))
                own += [NULL_PAGE] * (length - len(own))
                given += [NULL_PAGE] * (length - len(given))
                assert part.first_blocks[index] == first
                assert given == own, f"group {group}, row {row}: the plan's table is not the row's"
        return plan

    scheduler.schedule = watched
