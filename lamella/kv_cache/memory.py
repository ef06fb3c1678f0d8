"""The one place that allocates KV memory, and how much of it there is to have."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lamella.kv_cache.layout import KVLayout


def allocate_arena(
    layout: KVLayout, num_slabs: int, device: torch.device, *, step_pages_bytes: int = 0
) -> torch.Tensor:
    """uint8 [num_slabs * slab_bytes + step_pages_bytes]; only the null slab is written, so the system commits the rest
    on use."""
    arena = torch.empty(num_slabs * layout.slab_bytes + step_pages_bytes, dtype=torch.uint8, device=device)
    arena[: layout.slab_bytes].zero_()
    return arena


def available_memory_bytes(device: torch.device) -> int:
    """Memory that an allocation could get now, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
