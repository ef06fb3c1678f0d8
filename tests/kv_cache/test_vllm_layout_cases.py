"""What vLLM's users met in pages and groups, and facts that its own tests pin, as cases for lamella."""

from __future__ import annotations

import numpy as np
import pytest

from lamella.kv_cache.arena import NULL_PAGE, RESERVED, Arena
from lamella.kv_cache.layout import build_layout, without_sliding
from lamella.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from tests.helpers.serving import serve
from tests.helpers.simulation import Simulation, chunked, full, sliding


def test_sliding_frees_what_the_window_has_left():
    """Pages of 2: tokens computed -> blocks that are gone, for W 4 and for chunks of 4. With prefix caching no block
    more is the request's: what it leaves for its end is the tree's."""
    for is_cached, spec, gone in (
        (False, sliding(4), {0: 0, 4: 0, 5: 1, 6: 1, 7: 2, 11: 4}),
        (False, chunked(4), {3: 0, 4: 2, 6: 2, 8: 4, 12: 6}),
        (True, sliding(4), {4: 0, 5: 1, 6: 1, 7: 2, 8: 2, 9: 3, 10: 3, 12: 4}),
        (True, chunked(4), {3: 0, 4: 2, 6: 2, 8: 4, 9: 4, 10: 4, 12: 6}),
    ):
        simulation = Simulation(
            [full(), spec], page_tokens=2, max_model_len=64, chunk_tokens=1, enable_prefix_caching=is_cached
        )
        manager = simulation.manager
        assert manager.begin(0, manager.match(np.arange(20, dtype=np.int32)))
        for computed in range(13):
            assert manager.grow(0, computed, 1, is_prefill=True)
            if computed in gone:
                pages = manager.inspect().rows.pages[1, 0, : int(manager.inspect().rows.num_blocks[0])]
                assert (pages == NULL_PAGE).tolist() == [block < gone[computed] for block in range(len(pages))]


def test_a_page_cannot_be_freed_twice():
    """A block given twice to be freed raised the count by two, and an assert somewhere else (vLLM #42571)."""
    layout = build_layout([full(), sliding(4)], page_tokens=2)
    arena = Arena(layout, 10)
    pages = arena.allocate(0, 3)
    before = arena.num_allocatable(0)
    arena.free(0, pages[0])
    with pytest.raises(ValueError, match="not in use"):
        arena.free(0, pages[0])
    assert arena.num_allocatable(0) == before + 1


def test_the_null_page_is_nobodys():
    """The null block's reference count ran to -381 before an assert on its hash (vLLM PR #22209)."""
    layout = build_layout([full(), sliding(4, 3)], page_tokens=2)
    arena = Arena(layout, 10)
    for group in (0, 1):
        with pytest.raises(ValueError, match="not in use"):
            arena.free(group, NULL_PAGE)
    pages = arena.allocate(0, arena.num_allocatable(0))
    assert min(pages) >= layout.slab_units
    assert arena.slab_group[0] == RESERVED
    with pytest.raises(ValueError, match="not in use"):
        arena.free(0, 0)


@pytest.mark.parametrize(
    ("counts", "num_groups"), [((19, 18), 2), ((20, 30), 2), ((12, 12), 2), ((10, 52), 2), ((3, 7), 2), ((6, 5), 2)]
)
def test_no_layer_is_padded(counts, num_groups):
    """19 + 18 layers became 37 + 17 of padding, 20 + 30 became 2 groups of 20 (vLLM PR #29303, #54104)."""
    specs = [full()] * counts[0] + [sliding(64)] * counts[1]
    layout = build_layout(specs, page_tokens=16)
    assert [len(group.layers) for group in layout.groups] == list(counts)
    assert len(layout.groups) == num_groups
    assert sum(group.page_bytes for group in layout.groups) == 16 * sum(spec.token_bytes for spec in specs)
    assert all(layout.slab_waste(group) < 0.01 for group in layout.groups)


def test_groups_are_as_many_as_kinds_of_layers():
    """Layers 30, 10, 5 and 1 of four kinds became 46 groups of one layer, each with its own tables and metadata
    (vLLM PR #51742); three equal local groups of Llama 4 rebuilt theirs three times (vLLM PR #21761)."""
    specs = [sliding(64)] * 30 + [full()] * 10 + [sliding(128)] * 5 + [chunked(64)]
    layout = build_layout(specs, page_tokens=16)
    assert [len(group.layers) for group in layout.groups] == [30, 10, 5, 1]
    assert len(build_layout([full(), chunked(64), chunked(64), chunked(64)], page_tokens=16).groups) == 2
    simulation = Simulation(specs, page_tokens=16)
    simulation.add("r", range(20), 2)
    assert len(simulation.scheduler.schedule().groups) == 4


def test_bytes_per_token_that_share_no_large_divisor_keep_the_page_size():
    """1,024 against 1,152 bytes a token made blocks of 13,824 tokens, and with them hits as coarse
    (vLLM #53007); heads of 64 and 32 changed one group's block size. Here a page is 16 tokens in every group."""
    specs = [
        FullAttentionSpec(num_kv_heads=1, k_dim=512, v_dim=512, itemsize_bytes=1),
        SlidingWindowSpec(num_kv_heads=1, k_dim=576, v_dim=576, itemsize_bytes=1, window_tokens=32),
    ]
    layout = build_layout(specs, page_tokens=16)
    assert [group.page_bytes for group in layout.groups] == [16 * 1024, 16 * 1152]
    assert all(layout.slab_waste(group) < 0.01 for group in layout.groups)
    simulation = Simulation(specs, page_tokens=16, max_model_len=128)
    serve(simulation, range(40))
    assert serve(simulation, [*range(33), 48, 49]) == 33


def test_without_hybrid_memory_half_as_many_blocks():
    """One full and one sliding layer: 64 blocks of one layer each, or 32 that hold both."""
    specs = [full(), sliding(64)]
    memory_bytes = 64 * 16 * specs[0].token_bytes
    hybrid, plain = build_layout(specs, page_tokens=16), build_layout(without_sliding(specs), page_tokens=16)
    assert [group.layers for group in hybrid.groups] == [(0,), (1,)]
    assert [group.layers for group in plain.groups] == [(0, 1)]
    assert memory_bytes // hybrid.slab_bytes * hybrid.groups[0].pages_per_slab == 64
    assert memory_bytes // plain.slab_bytes * plain.groups[0].pages_per_slab == 32
