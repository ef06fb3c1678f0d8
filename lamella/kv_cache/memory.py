"""The one place that allocates KV memory, and how much of it there is to have."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from lamella.errors import CapacityError, InvariantError
from lamella.kv_cache.layout import KVLayout

_MOST_READY_BYTES = 128 << 20
_MADV_POPULATE_WRITE = 23  # of Linux; Python's mmap has no name for it


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What takes a device's memory besides KV, in bytes.

    total_bytes: all memory of the device.
    foreign_bytes: held outside this process's tensors, by other processes, the driver and libraries.
    weights_bytes: held by the weights, between steps.
    step_bytes: the most that a step takes while it runs.
    graph_bytes: kept by captured graphs.
    """

    total_bytes: int
    foreign_bytes: int
    weights_bytes: int
    step_bytes: int
    graph_bytes: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise InvariantError(f"{field.name}={getattr(self, field.name)}: memory was measured as less than none")

    @property
    def taken_bytes(self) -> int:
        """All that takes memory besides KV."""
        return self.foreign_bytes + self.weights_bytes + self.step_bytes + self.graph_bytes

    def kv_bytes(self, utilization: float) -> int:
        """How many bytes are left for KV if this process may use the share `utilization` (above 0, at most 1) of the
        device: at least 1.

        Raises CapacityError where nothing is left; it says what takes the memory and what would help.
        """
        allowed = int(self.total_bytes * utilization)
        left = allowed - self.taken_bytes
        if left > 0:
            return left
        parts = (
            (self.foreign_bytes, "are held outside this process's tensors"),
            (self.weights_bytes, "by the weights"),
            (self.step_bytes, "by the largest step"),
            (self.graph_bytes, "by captured graphs"),
        )
        held = ", ".join(f"{_gib(size)} {what}" for size, what in parts)
        ways = ["lower max_num_batched_tokens or max_num_seqs"]
        if self.graph_bytes:
            ways.append("set enforce_eager=True")
        if self.taken_bytes < self.total_bytes:
            ways.insert(0, f"raise it above {self.taken_bytes / self.total_bytes:.3f}")
        raise CapacityError(
            f"gpu_memory_utilization={utilization:g} allows {_gib(allowed)} of the device's {_gib(self.total_bytes)}, "
            f"and {held}: nothing is left for the KV cache; {', '.join(ways)}, or free memory that others hold"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def allocate_arena(
    layout: KVLayout, num_slabs: int, device: torch.device, *, step_pages_bytes: int = 0
) -> torch.Tensor:
    """The arena with the step pages behind it: uint8 [num_slabs * slab_bytes + step_pages_bytes].

    Only the null slab is written, with zeros. On the host the system commits the first eighth at once (at most 128 MiB:
    the first requests, or a prefix from a file, are not to wait for it), and other memory when it is first used. Raises
    CapacityError where the host does not grant so much."""
    num_bytes = num_slabs * layout.slab_bytes + step_pages_bytes
    if device.type == "cpu":
        arena = host_memory(num_bytes, ready_bytes=min(num_bytes // 8, _MOST_READY_BYTES))
    else:
        arena = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    arena[: layout.slab_bytes].zero_()
    return arena


def host_memory(num_bytes: int, *, ready_bytes: int = 0) -> torch.Tensor:
    """uint8 [num_bytes], in the system's huge pages where it has some; the first `ready_bytes` of them are there before
    they are used, where the system can do that (Linux 5.14 and later).

    Attention reads KV from all over the arena. A processor does not prefetch beyond the end of a page, and it caches
    the addresses of a limited number of pages. With pages of 2 MiB instead of 4 KiB decode attention takes about a
    tenth less time. Raises CapacityError where the system does not grant so much.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(
            f"the system grants no {_gib(num_bytes)} of memory for the KV cache ({error}); lower kv_cache_memory_bytes"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    if ready_bytes and sys.platform == "linux":
        with contextlib.suppress(OSError):  # an older kernel, or no memory now: it comes when it is used
            memory.madvise(_MADV_POPULATE_WRITE, 0, ready_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8)


def total_memory_bytes(device: torch.device) -> int:
    """All memory of the device or, for the CPU, of this machine, in use or not, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
