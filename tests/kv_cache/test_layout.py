"""Groups, units and slabs, with the figures of known models."""

from __future__ import annotations

import pytest

from lamella.errors import ConfigError
from lamella.kv_cache.layout import build_layout, without_sliding
from lamella.kv_cache.report import kv_cache_report
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
        (model(9, 4, 39, 8, k_dim=192), 40_960, (9, 78), 234),  # MiMo-V2-Flash
        (model(10, 16, 52, 16), 131_072, (10, 52), 260),  # Gemma 3 27B, 10 full + 52 SWA
        (model(12, 8, 12, 8, k_dim=64, v_dim=64), 32_768, (12, 12), 12),  # gpt-oss-20b
        (model(3, 1, 15, 1, k_dim=256, v_dim=256, itemsize=4), 32_768, (3, 15), 15),  # Gemma 3 270M
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


def test_shared_layers_are_in_no_page():
    """sliding(8) and full() keep 4 B a token: 4 tokens of two sliding owners are 32 B, of one full owner 16 B."""
    specs = [sliding(8), full(), sliding(8), sliding(8), full(), sliding(8)]
    layout = build_layout(specs, page_tokens=4, kv_sharing={3: 2, 4: 1, 5: 0})
    assert [group.layers for group in layout.groups] == [(0, 2), (1,)]
    assert [group.page_bytes for group in layout.groups] == [32, 16]
    assert (layout.unit_bytes, [group.page_units for group in layout.groups]) == (16, [2, 1])
    assert layout.owners == (0, 1, 2, 2, 1, 0)
    assert [layout.is_shared(layer) for layer in range(6)] == [False] * 3 + [True] * 3
    assert [layout.layer_address(layer) for layer in range(6)] == [(0, 0), (1, 0), (0, 16), (0, 16), (1, 0), (0, 0)]
    assert layout.groups == build_layout(specs[:3], page_tokens=4).groups


def test_a_shared_layer_in_between_leaves_no_gap():
    layout = build_layout([full(), full(), full()], page_tokens=4, kv_sharing={1: 0})
    assert [(group.layers, group.page_bytes) for group in layout.groups] == [((0, 2), 32)]
    assert [layout.layer_address(layer) for layer in range(3)] == [(0, 0), (0, 0), (0, 16)]


def test_sharing_goes_with_one_lifetime_for_all():
    """Without sliding the owners make one group: layer 1 lies behind layer 0, and layers 2 and 3 read the two."""
    specs = [sliding(8), full(), sliding(8), full()]
    layout = build_layout(without_sliding(specs), page_tokens=4, kv_sharing={2: 0, 3: 1})
    assert [(group.layers, group.page_bytes) for group in layout.groups] == [((0, 1), 32)]
    assert [layout.layer_address(layer) for layer in range(4)] == [(0, 0), (0, 16), (0, 0), (0, 16)]


@pytest.mark.parametrize("nothing", [None, {}])
def test_layers_keep_their_own_kv_unless_told(nothing):
    layout = build_layout([full(), sliding(8)], page_tokens=4, kv_sharing=nothing)
    assert layout == build_layout([full(), sliding(8)], page_tokens=4)
    assert layout.owners == (0, 1)


@pytest.mark.parametrize(
    ("kv_sharing", "message"),
    [
        ({1: 2}, r"\{1: 2\}: when layer 1 runs, layer 2 has not written its KV yet; name an earlier layer"),
        ({2: 2}, r"\{2: 2\}: when layer 2 runs, layer 2 has not written"),
        ({2: 0, 4: 2}, r"\{4: 2\}: layer 2 keeps no KV, it reads layer 0's; name a layer that keeps its own"),
        ({5: 0}, r"\{5: 0\}: the model has layers 0 to 4 only"),
        ({3: -1}, r"\{3: -1\}: the model has layers 0 to 4 only"),
        ({-1: 0}, r"\{-1: 0\}: the model has layers 0 to 4 only"),
        ({3: 0}, r"\{3: 0\}: layer 3 wants SlidingWindowSpec\(.*but layer 0 keeps FullAttentionSpec\("),
        ({4: 3}, r"\{4: 3\}: layer 4 wants .*window_tokens=4\), but layer 3 keeps .*window_tokens=8\)"),
    ],
)
def test_kv_that_cannot_be_shared(kv_sharing, message):
    with pytest.raises(ConfigError, match=message):
        build_layout([full(), full(), full(), sliding(8), sliding(4)], page_tokens=4, kv_sharing=kv_sharing)


@pytest.mark.parametrize("layer", [-1, 3])
def test_layers_that_are_not_there_have_no_address(layer):
    layout = build_layout([full(), sliding(8), full()], page_tokens=4, kv_sharing={2: 0})
    with pytest.raises(KeyError, match=f"layer {layer} is in no group"):
        layout.layer_address(layer)


def test_the_report_says_whose_kv_is_read():
    specs = [sliding(8), full(), sliding(8), sliding(8), full(), sliding(8)]
    layout = build_layout(specs, page_tokens=4, kv_sharing={2: 0, 3: 0, 4: 1})
    text = kv_cache_report(layout, 9, max_model_len=64, chunk_tokens=4, interval_tokens=4)
    lines = [line.split() for line in text.splitlines()]
    window = ["sliding_8", "sliding", "window", "8", "1", "2", "2"]
    assert lines[1:6] == [
        ["0", *window, "4"],
        ["1", "full", "full", "all", "1", "2", "2", "4"],
        ["2-3", *window, "shares", "layer", "0's"],
        ["4", "full", "full", "all", "1", "2", "2", "shares", "layer", "1's"],
        ["5", *window, "4"],
    ]
    assert ["sliding_8", "2", "32", "2", "1", "0.00%"] in lines
    assert ["full", "1", "16", "1", "2", "0.00%"] in lines


def test_bad_arguments():
    with pytest.raises(ConfigError, match="at least one layer"):
        build_layout([], page_tokens=4)
    with pytest.raises(ConfigError, match="page_size=0"):
        build_layout([full()], page_tokens=0)
