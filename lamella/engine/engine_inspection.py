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
    """The parts of an open engine themselves, not copies. They are for reading only: no contract covers what is changed
    through them. As long as this object is kept, the engine's memory is not freed.

    launched: the steps that were in flight when this object was made, oldest first.
    """

    layout: KVLayout
    pool: PoolSize
    manager: BlockManager
    scheduler: Scheduler
    runner: ModelRunner
    launched: tuple[LaunchedStep, ...]
