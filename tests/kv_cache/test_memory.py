"""The arena's memory: who gives it, and what is said where nobody does."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import sys
from pathlib import Path

import pytest
import torch

from lamella.errors import CapacityError
from lamella.kv_cache.layout import KVLayout, build_layout
from lamella.kv_cache.memory import allocate_arena
from lamella.kv_cache.spec import FullAttentionSpec

CPU = torch.device("cpu")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def a_layout() -> KVLayout:
    spec = FullAttentionSpec(num_kv_heads=1, k_dim=16, v_dim=16, itemsize_bytes=4)
    return build_layout([spec], page_tokens=16)


def flags_of_mapping(address: int) -> list[str]:
    """The kernel's flags of the mapping that an address lies in."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping has the address {address:#x}")


def can_commit() -> bool:
    return sys.platform == "linux" and tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (5, 14)


@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_arena_has_its_bytes_and_keeps_what_is_written(has_huge_pages, monkeypatch):
    if not has_huge_pages:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    layout = a_layout()
    arena = allocate_arena(layout, 3, CPU, step_pages_bytes=160)
    assert arena.dtype == torch.uint8
    assert arena.shape == (3 * layout.slab_bytes + 160,)
    assert not arena[: layout.slab_bytes].any()
    values = torch.randint(256, arena.shape, dtype=torch.uint8)
    arena.copy_(values)
    assert torch.equal(arena, values)


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="a kernel without transparent huge pages")
def test_arena_asks_for_huge_pages():
    arena = allocate_arena(a_layout(), 3, CPU)
    assert "hg" in flags_of_mapping(arena.data_ptr())  # advised by MADV_HUGEPAGE: proc(5)


@pytest.mark.skipif(not can_commit(), reason="a kernel that commits no memory ahead")
@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_the_first_eighth_of_an_arena_is_there_before_it_is_used(has_huge_pages, monkeypatch):
    if not has_huge_pages:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    layout = a_layout()
    arena = allocate_arena(layout, (64 << 20) // layout.slab_bytes, CPU)
    page_bytes = 4 << 10
    present = (ctypes.c_ubyte * (arena.nbytes // page_bytes))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(arena.data_ptr()), ctypes.c_size_t(arena.nbytes), present) == 0
    is_there = [bool(one & 1) for one in present]
    eighth = len(is_there) // 8
    assert all(is_there[:eighth])
    huge_page = (2 << 20) // page_bytes  # the last one may go on behind the eighth
    assert not any(is_there[eighth + huge_page :])


def test_too_large_an_arena_says_what_would_help():
    layout = a_layout()
    num_slabs = 2**60 // layout.slab_bytes
    with pytest.raises(
        CapacityError, match=r"no 1073741824\.00 GiB of memory for the KV cache .*lower kv_cache_memory_bytes"
    ):
        allocate_arena(layout, num_slabs, CPU)
