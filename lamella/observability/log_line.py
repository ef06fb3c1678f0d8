"""A line in the log every few seconds: how fast it goes, and what runs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lamella.observability.engine_snapshot import EngineSnapshot

logger = logging.getLogger("lamella.stats")
INTERVAL_SECONDS = 5.0


class LogLine:
    """Told of every step; at INFO of the logger `lamella.stats` it writes a line of the steps since the one before. A
    pause longer than the interval between two steps is left out."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot], interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._snapshot, self._interval = snapshot, interval_seconds
        self._due = 0.0  # when the next line is due; in the past: nothing has been measured for it
        self._since = 0.0
        self._before: EngineSnapshot | None = None

    def step(self, now: float) -> None:
        """A step has ended now."""
        if now < self._due:
            return
        if not logger.isEnabledFor(logging.INFO):
            self._before, self._due = None, now + self._interval
            return
        snapshot = self._snapshot()
        if self._before is not None and now - self._due < self._interval:
            logger.info("%s", self._text(self._before, snapshot, now - self._since))
        self._before, self._since, self._due = snapshot, now, now + self._interval

    @staticmethod
    def _text(before: EngineSnapshot, now: EngineSnapshot, seconds: float) -> str:
        num_prompt_tokens = now.num_prompt_tokens - before.num_prompt_tokens
        num_cached = now.num_cached_tokens - before.num_cached_tokens
        num_generated = now.num_generated_tokens - before.num_generated_tokens
        hits = f"{100 * num_cached / num_prompt_tokens:.1f} %" if num_prompt_tokens else "no new prompts"
        return (
            f"prompts {num_prompt_tokens / seconds:.1f} tokens/s, generation {num_generated / seconds:.1f} tokens/s, "
            f"{now.num_running} running, {now.num_waiting} waiting, KV memory in use {100 * now.kv_cache_usage:.1f} %, "
            f"prefix hits {hits}"
        )
