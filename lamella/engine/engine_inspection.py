"""A look inside an engine, for tests and tools."""

from __future__ import annotations

from dataclasses import dataclass

from lamella.engine.scheduling.scheduler import Scheduler
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.sizing import PoolSize
from lamella.model_executor.runner import LaunchedStep, ModelRunner


@dataclass(frozen=True, slots=True)
class EngineInspection:
    """What an open engine is made of, as it is, not copies. To be looked at: what is changed here, no contract covers.
    Who keeps it keeps the engine's memory.

    launched: steps that are in flight, oldest first, when it was asked for.
    """

    layout: KVLayout
    pool: PoolSize
    manager: BlockManager
    scheduler: Scheduler
    runner: ModelRunner
    launched: tuple[LaunchedStep, ...]
