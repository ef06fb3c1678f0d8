"""An engine that uses step pages wherever it can."""

from __future__ import annotations

from lamella import Engine

NAN_BYTE = 0xFF  # four of them are a float32 NaN


def watch_step_pages(engine: Engine) -> list[int]:
    """From now on memory never idles, so that every block that can has a step page; their memory is NaN before each
    step. Returns a list that gets the number of tokens in step pages of each planned step."""
    loaded = engine.inspect()
    scheduler, manager, arena = loaded.scheduler, loaded.manager, loaded.runner.arena
    num_tokens: list[int] = []
    schedule = scheduler.schedule

    def watched():
        plan = schedule()
        pages = (manager.inspect().rows.pages >= manager.inspect().step_pages.first_page).sum()
        num_tokens.append(int(pages) * manager.layout.page_tokens)
        arena[manager.inspect().arena.num_slabs * loaded.layout.slab_bytes :] = NAN_BYTE
        return plan

    manager.inspect().supply.idle_bytes = lambda: 0
    scheduler.schedule = watched
    return num_tokens
