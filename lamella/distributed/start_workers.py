"""Starts the workers that compute with an engine, by what its config names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lamella.distributed.workers import Workers, start_processes
from lamella.engine.config import EngineConfig

# What only scheduling needs.
_LEFT_OUT = ("structured_outputs_config", "speculative_config", "ray_actor_options")


def start_workers(config: EngineConfig) -> Workers:
    """Those of `config.tensor_parallel_size` beside the engine itself. Raises ConfigError where they cannot be had."""
    settings = {"config": worker_config(config)}
    seconds = float(config.distributed_timeout_seconds)
    if config.distributed_executor_backend == "ray":
        from lamella.distributed.ray_workers import start_actors

        return start_actors(settings, config.tensor_parallel_size, seconds, config.ray_actor_options or {})
    return start_processes(settings, config.tensor_parallel_size, seconds)


def worker_config(config: EngineConfig) -> dict[str, Any]:
    """What a worker must know of the engine, as JSON has it."""
    return {one.name: getattr(config, one.name) for one in fields(config) if one.name not in _LEFT_OUT}
