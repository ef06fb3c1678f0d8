"""Where the pins find what they hold: the one file to change when modules move."""

from __future__ import annotations

from pathlib import Path

import torch

from lamella.model_executor.device_tables import DeviceTables
from lamella.model_executor.runner import ModelRunner
from lamella.model_executor.step_buffers import PackedShape
from lamella.native.build import targets
from lamella.native.library import BUILDS, NativeLibrary, load_library

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ATTENTION_REPORT = str(_BENCHMARKS / "attention_compile_report.py")  # scripts to run
OPERATORS_REPORT = str(_BENCHMARKS / "operator_compile_report.py")
SAMPLING_REPORT = str(_BENCHMARKS / "sampling_compile_report.py")

__all__ = [
    "ATTENTION_REPORT",
    "OPERATORS_REPORT",
    "SAMPLING_REPORT",
    "DeviceTables",
    "ModelRunner",
    "NativeLibrary",
    "PackedShape",
]


def native_build() -> str | None:
    """Which build of the native kernels this process runs: "avx2", "avx512" or "neon"."""
    library = load_library()
    return None if library is None else library.path.stem.removeprefix("lamella_kernels_")


def native_builds_here() -> list[str]:
    """Those that this processor can run, the fastest first, compiled or not."""
    runnable = BUILDS.get(torch.backends.cpu.get_cpu_capability(), ())
    return [name for name in runnable if name in targets()]
