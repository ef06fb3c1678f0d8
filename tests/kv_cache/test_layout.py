"""Groups, units and slabs, with the figures of known models."""

from __future__ import annotations

import pytest

from lamella.errors import ConfigError
from lamella.kv_cache.layout import build_layout, without_sliding
from lamella.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from tests.helpers.simulation import chunked, full, sliding


def model(num_full, full_heads, num_sliding, sliding_heads, *, k_dim=128, v_dim=128, itemsize=2, window=1024):
    sizes = {"k_dim": k_dim, "v_dim": v_dim, "itemsize_bytes": itemsize}
    return [FullAttentionSpec(num_kv_heads=full_heads, **sizes)] * num_full + [
        SlidingWindowSpec(num_kv_heads=sliding_heads, window_tokens=window, **sizes)
    ] * num_sliding


@pytest.mark.parametrize(
    ("specs", "unit_bytes", "page_units", "slab_units"),
    [
        (model(9, 4, 39, 8, k_dim=192), 122_880, (3, 26), 78),  # MiMo-V2-Flash
        (model(10, 16, 52, 16), 262_144, (5, 26), 130),  # Gemma 3 27B, 10 full + 52 SWA
        (model(12, 8, 12, 8, k_dim=64, v_dim=64), 393_216, (1, 1), 1),  # gpt-oss-20b
        (model(3, 1, 15, 1, k_dim=256, v_dim=256, itemsize=4), 98_304, (1, 5), 5),  # Gemma 3 270M
    ],
    ids=["mimo", "gemma-27b", "gpt-oss", "gemma-270m"],
)
def test_units_and_slabs_of_known_models(specs, unit_bytes, page_units, slab_units):
    layout = build_layout(specs, page_tokens=16)
    assert layout.unit_bytes == unit_bytes
    assert tuple(group.page_units for group in layout.groups) == page_units
    assert layout.slab_units == slab_units
    assert all(layout.slab_waste(group) < 0.01 for group in layout.groups)


def test_no_padding_layers_and_equal_specs_share_a_group():
    specs = [sliding(8), full(), sliding(8), sliding(4), full(2)]
    layout = build_layout(specs, page_tokens=4)
    assert [group.layers for group in layout.groups] == [(0, 2), (1,), (3,), (4,)]
    assert [group.name for group in layout.groups] == ["sliding_8", "full", "sliding_4", "full#2"]
    assert sum(group.page_bytes for group in layout.groups) == 4 * sum(spec.token_bytes for spec in specs)


def test_layer_addresses_tile_the_page():
    specs = [sliding(8), full(), sliding(8), sliding(8)]
    layout = build_layout(specs, page_tokens=4)
    token_bytes = specs[0].token_bytes
    assert [layout.layer_address(layer) for layer in range(4)] == [
        (0, 0), (1, 0), (0, 4 * token_bytes), (0, 8 * token_bytes)
    ]  # fmt: skip


def test_a_slab_that_cannot_be_exact_wastes_least():
    """Coprime page sizes: the slab is bounded, and no group loses more than one page of it."""
    layout = build_layout([full(101), sliding(4, heads=97), chunked(4, heads=89)], page_tokens=1)
    assert layout.slab_units <= 64 * 101
    assert all(layout.slab_waste(group) < 0.02 for group in layout.groups)


def test_without_sliding_keeps_sizes_and_makes_one_lifetime():
    specs = [sliding(8), full(), chunked(4)]
    stored = without_sliding(specs)
    assert [spec.token_bytes for spec in stored] == [spec.token_bytes for spec in specs]
    assert len(build_layout(stored, page_tokens=4).groups) == 1


def test_bad_arguments():
    with pytest.raises(ConfigError, match="at least one layer"):
        build_layout([], page_tokens=4)
    with pytest.raises(ConfigError, match="page_size=0"):
        build_layout([full()], page_tokens=0)
