"""What the figures were made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, system, and the load that others put on it now. None where it is not known."""
    info = _cpu_info()
    flags = info.get("flags", "").split()
    return {
        "processor": info.get("model name") or platform.processor() or platform.machine(),
        "instruction_sets": [flag for flag in _FLAGS if flag in flags],
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": platform.platform(),
        "load_average_at_start": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _cpu_info() -> dict[str, str]:
    """The first processor's entry in /proc/cpuinfo; empty on systems without it."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
