"""What fits into how much."""

from __future__ import annotations

import pytest

from lamella.errors import CapacityError
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.sizing import request_slabs, size_pool, step_pages_bytes
from tests.helpers.simulation import Simulation, full, sliding


def gemma_layout():
    return build_layout([full()] * 3 + [sliding(8)] * 15, page_tokens=4)


def pool(layout, **changes):
    arguments = {
        "memory_bytes": 2**20,
        "max_model_len": 64,
        "longest_model_len": 1024,
        "chunk_tokens": 16,
        "interval_tokens": 4,
    }
    return size_pool(layout, **{**arguments, **changes})


def test_the_named_memory_is_just_enough():
    layout = gemma_layout()
    with pytest.raises(CapacityError, match=r"needs \d+ bytes") as refused:
        pool(layout, memory_bytes=layout.slab_bytes)
    named = int(str(refused.value).split(" needs ")[1].split()[0])
    assert pool(layout, memory_bytes=named).max_model_len == 64
    with pytest.raises(CapacityError):
        pool(layout, memory_bytes=named - 1)


def test_the_named_length_is_the_longest_that_fits():
    layout = gemma_layout()
    memory_bytes = 12 * layout.slab_bytes
    with pytest.raises(CapacityError, match=r"max_model_len to at most \d+") as refused:
        pool(layout, memory_bytes=memory_bytes, max_model_len=1000)
    named = int(str(refused.value).split("at most ")[1].split()[0])
    assert pool(layout, memory_bytes=memory_bytes, max_model_len=None).max_model_len == named
    assert pool(layout, memory_bytes=memory_bytes, max_model_len=named)
    with pytest.raises(CapacityError):
        pool(layout, memory_bytes=memory_bytes, max_model_len=named + 1)


def test_a_small_pool_caps_the_chunk():
    layout = gemma_layout()
    tight = 1 + request_slabs(layout, max_model_len=64, chunk_tokens=4, interval_tokens=4)
    assert pool(layout, memory_bytes=tight * layout.slab_bytes).chunk_tokens < 16
    assert pool(layout, memory_bytes=2**40).chunk_tokens == 16


def test_memory_is_slabs_and_step_pages():
    """A block is 16 B in each layer: pages of 3 and 15, slabs of 15 (240 B). Of 36,000 B at most 375 are step pages:
    240 B for the first block and 8 times 16 B more, 36 tokens, or what the largest chunk needs."""
    layout = gemma_layout()
    assert pool(layout, memory_bytes=36_000, chunk_tokens=100)[::3] == ((36_000 - 368) // 240, 368)
    assert pool(layout, memory_bytes=36_000, chunk_tokens=16)[::3] == ((36_000 - 288) // 240, 288)
    assert pool(layout, memory_bytes=36_000, chunk_tokens=100, with_step_pages=False)[::3] == (150, 0)
    assert pool(build_layout([full()] * 3, page_tokens=4), memory_bytes=36_000)[::3] == (750, 0)


def test_step_pages_give_way_to_the_longest_request():
    """To the byte: where it just fits beside them they are there, a byte less and they are not."""
    layout = gemma_layout()
    need = 1 + request_slabs(layout, max_model_len=4000, chunk_tokens=4, interval_tokens=4)
    memory_bytes = next(
        size
        for size in range(need * layout.slab_bytes, 2 * need * layout.slab_bytes)
        if size - step_pages_bytes(layout, memory_bytes=size, chunk_tokens=16) >= need * layout.slab_bytes
    )
    sizes = {"max_model_len": 4000, "chunk_tokens": 16}
    assert pool(layout, memory_bytes=memory_bytes, **sizes).num_slabs == need
    assert pool(layout, memory_bytes=memory_bytes, **sizes).step_pages_bytes == 240 + 3 * 16
    assert pool(layout, memory_bytes=memory_bytes - 1, **sizes).step_pages_bytes == 0
    assert pool(layout, memory_bytes=memory_bytes - 1, **sizes).num_slabs >= need


@pytest.mark.parametrize("page_tokens", [1, 3, 4])
@pytest.mark.parametrize(
    "specs", [[full()] * 3 + [sliding(8)] * 15, [full()] * 5 + [sliding(6)], [sliding(5)]], ids=str
)
def test_the_smallest_pool_runs_the_longest_request(specs, page_tokens):
    """What start-up accepts must run: one request of max_model_len in the least memory it allows."""
    simulation = Simulation(specs, page_tokens=page_tokens, max_model_len=64, extra_slabs=0, chunk_tokens=16)
    simulation.add("longest", range(40), 24)
    simulation.run()
    assert len(simulation.outputs["longest"]) == 24
    assert simulation.scheduler.counters().num_preemptions == 0
