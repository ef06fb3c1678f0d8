"""Where the pins find what they hold: the one file to change when modules move."""

from __future__ import annotations

import torch

from kv_replay.drive import replay
from kv_replay.layouts import layer_specs
from kv_replay.replay_table import budget_in_bytes
from kv_replay.systems import Limits, System, build_scheduler
from kv_replay.traces import TraceRequest
from lamella.kv_cache.counters import count_kv_cache
from lamella.model_executor.runner import ModelRunner
from lamella.model_executor.step_buffers import PackedShape
from lamella.native.build import targets
from lamella.native.library import BUILDS, NativeLibrary, load_library

ATTENTION_REPORT = "attention_compile_report"  # modules to run
OPERATORS_REPORT = "operator_compile_report"
SAMPLING_REPORT = "tests.triton.compile_sampling"

__all__ = [
    "ATTENTION_REPORT",
    "OPERATORS_REPORT",
    "SAMPLING_REPORT",
    "Limits",
    "ModelRunner",
    "NativeLibrary",
    "PackedShape",
    "System",
    "TraceRequest",
    "budget_in_bytes",
    "build_scheduler",
    "count_kv_cache",
    "layer_specs",
    "replay",
]


def native_build() -> str | None:
    """Which build of the native kernels this process runs: "avx2", "avx512" or "neon"."""
    library = load_library()
    return None if library is None else library.path.stem.removeprefix("lamella_kernels_")


def native_builds_here() -> list[str]:
    """Those that this processor can run, the fastest first, compiled or not."""
    runnable = BUILDS.get(torch.backends.cpu.get_cpu_capability(), ())
    return [name for name in runnable if name in targets()]
