"""The engine of an LLM: one in this process, or several that share its requests."""

from __future__ import annotations

from typing import cast

from lamella.distributed.replicated_engine import ReplicatedEngine
from lamella.engine.config import EngineConfig
from lamella.engine.engine import Engine


def open_engine(config: EngineConfig, *, shows_progress: bool = False) -> Engine:
    """An Engine; or, for a data_parallel_size above 1, what has those of its methods that an LLM calls."""
    if config.data_parallel_size == 1:
        return Engine(config, shows_progress=shows_progress)
    return cast(Engine, ReplicatedEngine(config))
