"""Where the pinned counters find the replay of traces, which is among the benchmarks."""

from __future__ import annotations

from kv_replay.drive import replay
from kv_replay.layouts import layer_specs
from kv_replay.replay_table import budget_in_bytes
from kv_replay.systems import Limits, System, build_scheduler
from kv_replay.traces import TraceRequest

__all__ = ["Limits", "System", "TraceRequest", "budget_in_bytes", "build_scheduler", "layer_specs", "replay"]
