"""Where the pins find what they hold: the one file to change when modules move."""

from __future__ import annotations

from lamella.benchmark.kv_replay.drive import replay
from lamella.benchmark.kv_replay.layouts import layer_specs
from lamella.benchmark.kv_replay.replay_table import budget_in_bytes
from lamella.benchmark.kv_replay.systems import Limits, System, build_scheduler
from lamella.benchmark.kv_replay.traces import TraceRequest
from lamella.kv_cache.counters import count_kv_cache

__all__ = [
    "Limits",
    "System",
    "TraceRequest",
    "budget_in_bytes",
    "build_scheduler",
    "count_kv_cache",
    "layer_specs",
    "replay",
]
