"""The table of architectures in docs/models.md is what the registry and the families say."""

import pytest

from lamella.planner.registry import architectures
from tests.helpers.models_page import (
    BEGIN,
    END,
    PAGE,
    held_bytes,
    kv_bytes_per_token,
    owned_specs,
    pattern,
    render,
    row,
    walk,
)
from tests.helpers.transformers_models import RANDOM_MODELS


def test_the_page_is_what_the_registry_says():
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition(BEGIN)[2].partition(END)[0]
    assert table.strip() == render().strip(), "run: python -m tests.helpers.models_page"


def named(model_type):
    return next(each for each in architectures() if each.model_type == model_type)


def test_a_pattern_is_its_shortest_period_and_what_is_left():
    full, sliding = "full_attention", "sliding_attention"
    assert pattern([full] * 3) == "3: 3F"
    assert pattern(([sliding] * 5 + [full]) * 4 + [sliding] * 2) == "26: (5S F)x4 2S"
    assert pattern([full] * 2 + [sliding, full] * 6) == "14: 2F (S F)x6"
    assert pattern([]) == "-"


def test_gpt_oss_counted_by_hand():
    """36 layers, every second full, 8 heads of 64 + 64: 2,048 B a token in each. At 8,192 tokens a window of 128 is 9
    pages of 16 tokens: 18 * (8,192 + 144) * 2,048 B / 8,192. FLOPs: 64 query heads * 2 * 128 * keys, a layer."""
    gpt_oss = named("gpt_oss")
    assert kv_bytes_per_token(owned_specs(gpt_oss), 8192) == 18 * (8192 + 144) * 2048 // 8192
    cells = row(gpt_oss)
    assert cells[7] == f"{36 * 2048:,}"
    full, sliding = 18 * 2 * 64 * 128 * 8192, 18 * 2 * 64 * 128 * 128
    assert cells[8] == f"F {full / 1e6:,.0f}, S {sliding / 1e6:,.0f}"


def test_layers_that_share_kv_hold_none():
    gemma3n = named("gemma3n_text")
    own = [spec for layer, spec in enumerate(gemma3n.layer_specs(2).specs) if layer < 20]
    assert kv_bytes_per_token(owned_specs(gemma3n), 8192) == sum(held_bytes(spec, 8192) for spec in own) // 8192


def test_every_row_runs_or_says_why():
    assert len(architectures()) > 60
    for each in architectures():
        assert bool(each.layers) != bool(each.refusal)


@pytest.mark.slow
def test_the_registry_is_what_transformers_configs_say():
    import json

    from lamella.planner.registry import ARCHITECTURES

    assert json.loads(ARCHITECTURES.read_text(encoding="utf-8")) == walk()
    assert {each.model_type for each in architectures()} >= set(RANDOM_MODELS) - {"gemma3", "step3p7"}
