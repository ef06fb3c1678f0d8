"""The planner: the article's figures, counts by hand, and configs read as transformers reads them."""

from __future__ import annotations

import json

import pytest

from lamella.errors import CapacityError, ConfigError, ModelLoadError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from lamella.model_executor.models.registry import parse_config
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.planner.known_models import known_names, known_specs
from lamella.planner.layer_specs import LayerSpecs
from lamella.planner.model_specs import config_specs, model_specs
from lamella.planner.plan import PlanOptions
from tests.helpers.plans import lines_of, plan_of, requests_of
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf

# Plans


def test_the_plan_reproduces_the_articles_figures_for_mimo_v2_flash():
    lines = lines_of(plan_of("mimo-v2-flash").report())
    assert ["r=0.8", "71.4", "F", "87.4%", "469,936", "375,936", "1.00x"] in lines
    assert ["r=0.05", "12.9", "F", "30.2%", "2,601,104", "130,048", "5.53x"] in lines
    assert ["r=1", "87.0", "F", "89.7%", "385,680", "385,680", "0.82x"] in lines


def test_requests_of_mimo_v2_flash_counted_by_hand():
    """Step pages for 8,192 tokens are 511 blocks of 81,920 B in one layer and a page of 39: 80 GiB less 45,056,000 B
    are 8,957 slabs, one of them null, of 26 full pages or 3 sliding ones. A chunk beside them holds two windows of 129
    and 5 blocks more, less one token, at most ceil((128 + 129 + 64 + 15) / 16) = 21 pages. So 109 requests take
    8,586 slabs of full pages and ceil((108 * 9 + 21) / 3) = 331 of sliding ones, 110 would take 8,665 + 334.
    r = 0.05: 2,601,104 tokens hold 79.4 requests of full pages, and 130,048 windowed tokens far more.
    Uniform: 80 GiB / (87 * 2,560 B) = 385,683 tokens, 11.8 requests."""
    requests = requests_of(plan_of("mimo-v2-flash"))
    assert requests["elastic"] == 109
    assert requests["fixed pools, r=0.05"] == 79
    assert requests["fixed pools, r=0.8"] == 14
    assert requests["uniform (hybrid off)"] == 11


def test_requests_of_gpt_oss_20b_counted_by_hand():
    """Pages of both groups are one slab of 393,216 B; 80 GiB are 218,452 of them beside the null slab.
    Elastic: 43.6 slabs are for step pages (511 blocks of 32,768 B and a page), and a chunk holds 21 pages beside them:
    2,048 k + 9 (k - 1) + 21 <= 218,408 up to k = 106. r = 1: 109,226 each, 53.3 requests of full pages."""
    requests = requests_of(plan_of("gpt-oss-20b"))
    assert requests["elastic"] == 106
    assert requests["fixed pools, r=1"] == 53


def test_gemma_3n_e4b_counted_by_hand():
    """35 layers, every fifth full; 0 to 19 keep KV (16 sliding, 4 full), 20 to 34 read 18's or 19's.
    A token is 2 heads * (256 + 256) elements * 2 B = 2,048 B in each of 20 layers, a page of 16 tokens 32,768 B a
    layer (one unit): 131,072 B full, 524,288 B sliding (one slab); four full pages to a slab. All layers that read
    another's KV come last, so there are step pages: 127 units and a page for 2,048 tokens. 1 GiB less 4,685,824 B is
    2,039 slabs, one of them null. A request of 8,192 tokens decodes in 512 full pages (128 slabs) and
    1 + ceil((511 + 16) / 16) = 34 sliding ones: 162 slabs. One request prefills in
    2 ceil(511 / 16) + 4 = 68: 128 k + 34 (k - 1) + 68 <= 2,038 up to k = 12.
    Uniform: 20 layers are 655,360 B a page, so 1,638 pages, one null, for 512 a request: 3."""
    plan = plan_of("gemma-3n-e4b", PlanOptions(memory_bytes=1 << 30, context_tokens=8192))
    requests = requests_of(plan)
    assert requests["elastic"] == 12
    assert requests["uniform (hybrid off)"] == 3
    text = plan.report()
    lines = lines_of(text)
    assert ["full", "4", "131,072", "4", "4", "0.00%"] in lines
    assert ["sliding_512", "16", "524,288", "16", "1", "0.00%"] in lines
    sliding, full = ["sliding_512", "sliding", "window", "512"], ["full", "full", "all"]
    assert ["15-18", *sliding, "2", "256", "256", "2,048"] in lines
    assert ["19", *full, "2", "256", "256", "2,048"] in lines
    assert ["20-23", *sliding, "2", "256", "256", "shares", "layer", "18's"] in lines
    assert ["34", *full, "2", "256", "256", "shares", "layer", "19's"] in lines
    # 512 * 131,072 + 34 * 524,288 B; with every layer its own it would be 7/4 of the full and 7/4 of the sliding part.
    assert "step pages: 4,685,824 B (4.5 MiB) behind them, for 2,048 prompt tokens a step" in text
    assert ["8,192", "12", "81.0", "MiB", "34", "512"] in lines
    # F = 2,048 B: 4 F + 0.8 * 16 F.
    cell = next(cell for cell in plan.cells if cell.ratio == 0.8)
    assert cell.num_units == pytest.approx(16.8)
    assert cell.num_full_tokens == (1 << 30) * 10 // (168 * 2048) // 16 * 16


@pytest.mark.parametrize("name", known_names())
def test_no_fixed_ratio_holds_more_requests_than_elastic_memory(name):
    plan = plan_of(name, PlanOptions(memory_bytes=40 << 30, context_tokens=16_384))
    elastic, *others = plan.outcomes
    assert elastic.system == "elastic"
    assert all(outcome.num_requests <= elastic.num_requests for outcome in others)
    assert plan.curves["elastic"][plan.curve_contexts.index(16_384)] == elastic.num_requests


def test_a_ratio_too_small_for_the_window_is_refused_in_the_plan():
    """1 GiB at r = 0.003: 136 windowed tokens, and the window of 129 and a page are 145."""
    options = PlanOptions(memory_bytes=1 << 30, context_tokens=2048, ratios=(0.003, 0.05))
    text = plan_of("mimo-v2-flash", options).report()
    lines = lines_of(text)
    assert ["fixed", "pools,", "r=0.003", "refused", "-"] in lines
    assert "must be more than window + page = 129 + 16" in text
    assert not any(line[:3] == ["fixed", "pools,", "r=0.05"] and "refused" in line for line in lines)


def test_models_of_one_kind_have_no_ratios():
    plan = plan_of("mistral-7b")
    assert [outcome.system for outcome in plan.outcomes] == ["elastic", "uniform (hybrid off)"]
    assert plan.cells == ()
    with pytest.raises(ConfigError, match="no full-attention layers"):
        plan_of("mistral-7b", PlanOptions(memory_bytes=1 << 34, context_tokens=4096, ratios=(0.8,)))


def test_memory_below_one_request_is_refused_and_what_would_do_does():
    options = {"context_tokens": 8192, "chunk_tokens": 512}
    with pytest.raises(CapacityError, match=r"needs \d+ bytes") as error:
        plan_of("gemma-3-27b", PlanOptions(memory_bytes=20 << 20, **options))
    named = int(str(error.value).split(" needs ")[1].split()[0])
    assert requests_of(plan_of("gemma-3-27b", PlanOptions(memory_bytes=named, **options)))["elastic"] == 1


def test_options_must_be_positive():
    with pytest.raises(ConfigError, match="context_tokens=0"):
        PlanOptions(memory_bytes=1, context_tokens=0)


# Known models


@pytest.mark.parametrize(
    ("name", "num_full", "full_heads", "num_other", "other_heads", "reach", "kind"),
    [
        ("gpt-oss-20b", 12, (8, 64, 64), 12, (8, 64, 64), 128, SlidingWindowSpec),
        ("gpt-oss-120b", 18, (8, 64, 64), 18, (8, 64, 64), 128, SlidingWindowSpec),
        ("gemma-3-27b", 10, (16, 128, 128), 52, (16, 128, 128), 1024, SlidingWindowSpec),
        ("google/Gemma-3-270M", 3, (1, 256, 256), 15, (1, 256, 256), 512, SlidingWindowSpec),
        ("MiMo-V2-Flash", 9, (4, 192, 128), 39, (8, 192, 128), 129, SlidingWindowSpec),
        ("mistral-7b", 0, None, 32, (8, 128, 128), 4096, SlidingWindowSpec),
        ("llama-4-scout", 12, (8, 128, 128), 36, (8, 128, 128), 8192, ChunkedLocalAttentionSpec),
    ],
)
def test_known_layouts(name, num_full, full_heads, num_other, other_heads, reach, kind):
    layers = known_specs(name, 2)
    specs = layers.specs
    assert layers.kv_sharing == {}
    full = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
    other = [spec for spec in specs if not isinstance(spec, FullAttentionSpec)]
    assert (len(full), len(other)) == (num_full, num_other)
    assert {(spec.num_kv_heads, spec.k_dim, spec.v_dim) for spec in full} == ({full_heads} if full_heads else set())
    assert {(spec.num_kv_heads, spec.k_dim, spec.v_dim) for spec in other} == {other_heads}
    assert {(type(spec), spec.reach_tokens) for spec in other} == {(kind, reach)}
    assert {spec.itemsize_bytes for spec in specs} == {2}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ModelLoadError, match=r"'gpt-oss-21b' is neither a file nor .* gpt-oss-20b"):
        model_specs("gpt-oss-21b", 2)


# Configs


CONFIG_CLASSES = {
    "GptOssConfig": {},
    "Gemma2Config": {},
    "Gemma3TextConfig": {},
    "Cohere2Config": {},
    "Olmo3Config": {},
    "Exaone4Config": {},
    "MistralConfig": {},
    "MixtralConfig": {"sliding_window": 300},
    "Phi3Config": {},
    "Qwen2Config": {"use_sliding_window": True, "max_window_layers": 20},
    "Qwen3Config": {},
    "Llama4TextConfig": {},
    "MiMoV2FlashConfig": {},
    "LlamaConfig": {},
}


@pytest.mark.parametrize("without_layer_types", [False, True])
@pytest.mark.parametrize("name", CONFIG_CLASSES)
def test_configs_are_read_as_transformers_reads_them(name, without_layer_types):
    """Also where the file leaves the kinds of layers to transformers' defaults. The oracle is the config object."""
    import transformers

    config = getattr(transformers, name)(**CONFIG_CLASSES[name])
    values = json.loads(json.dumps(config.to_dict(), default=str))
    if without_layer_types:
        values.pop("layer_types", None)
    layers = config_specs(values, 2)
    specs = layers.specs
    assert layers.kv_sharing == {}
    default_kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = getattr(config, "layer_types", None) or [default_kind] * config.num_hidden_layers
    assert len(specs) == config.num_hidden_layers
    for spec, kind in zip(specs, kinds, strict=True):
        reach = {
            "full_attention": None,
            "sliding_attention": getattr(config, "sliding_window", None),
            "chunked_attention": getattr(config, "attention_chunk_size", None),
        }[kind]
        assert (isinstance(spec, ChunkedLocalAttentionSpec), spec.reach_tokens) == (kind == "chunked_attention", reach)
        is_wide = name == "MiMoV2FlashConfig" and kind == "sliding_attention"  # its code doubles them
        assert spec.num_kv_heads == (config.num_key_value_heads or config.num_attention_heads) * (1 + is_wide)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        assert (spec.k_dim, spec.v_dim) == (head_dim, getattr(config, "v_head_dim", None) or head_dim)


def test_mimos_published_config_counts_previous_tokens():
    config = {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "sliding_window_size": 128,
        "hybrid_layer_pattern": [int(layer > 0 and (layer + 1) % 6 != 0) for layer in range(48)],
    }
    assert config_specs(config, 2) == known_specs("mimo-v2-flash", 2)


def sharing_config(**changes):
    text = {
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", *["full_attention"] * 2],
        "num_kv_shared_layers": 2,
        **changes,
    }
    return {"model_type": "anything", "text_config": text}


def test_layers_that_share_kv_keep_none():
    layers = config_specs(sharing_config(), 4)
    assert [spec.reach_tokens for spec in layers.specs] == [32, None, 32, None, None]
    assert layers.kv_sharing == {3: 1, 4: 1}
    # 16 tokens * 2 heads * (8 + 8) elements * 4 bytes, of two sliding layers and one full.
    assert [group.page_bytes for group in layers.layout(16).groups] == [2 * 2048, 2048]
    assert [group.page_bytes for group in layers.uniform_layout(16).groups] == [3 * 2048]
    assert layers.uniform_layout(16).layer_address(4) == (0, 2048)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 4}, "layer 1 is 'full_attention', but no layer before 1 is"),
        ({"num_kv_shared_layers": 5}, "of 5 layers: no layer keeps KV"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1"),
        ({"num_kv_shared_layers": "2"}, "num_kv_shared_layers='2'"),
    ],
)
def test_sharing_without_an_owner_is_refused(changes, message):
    with pytest.raises(ModelLoadError, match=message):
        config_specs(sharing_config(**changes), 4)


SHARING_CONFIGS = [
    ("Gemma3nTextConfig", {}),
    ("Gemma3nTextConfig", {"num_hidden_layers": 30, "num_kv_shared_layers": 10}),
    ("Gemma3nTextConfig", {"num_kv_shared_layers": 0}),
    ("Gemma4TextConfig", {"num_kv_shared_layers": 13}),
    # The last layer is full although the pattern would have it slide; its KV owner is layer 11.
    ("Gemma4TextConfig", {"num_hidden_layers": 35, "num_kv_shared_layers": 18, "num_key_value_heads": 1}),
    (
        "Gemma4TextConfig",
        {"num_kv_shared_layers": 6, "global_head_dim": 384, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
    ),
    ("Gemma4UnifiedTextConfig", {"num_kv_shared_layers": 6}),
]


@pytest.mark.parametrize("dropped", [(), ("layer_types",), ("per_layer_config",)])
@pytest.mark.parametrize(("name", "arguments"), SHARING_CONFIGS)
def test_shared_layers_read_what_transformers_stores_for_them(name, arguments, dropped):
    """The oracle is the config object: a layer that reuses KV takes what the last layer of its type stored, and a
    layer's heads are its own config's. Dropped keys are left to transformers' defaults, or given as Gemma 4's are
    published."""
    import transformers

    config = getattr(transformers, name)(**arguments)
    values = json.loads(json.dumps(config.to_dict(), default=str))
    for key in dropped:
        if values.pop(key, None) is not None and key == "per_layer_config":
            values.update({key: value for key, value in arguments.items() if "global" in key})
    layers = config_specs(values, 2)
    stored, expected = {}, {}
    for layer, (kind, mode) in enumerate(zip(config.layer_types, config.kv_sharing_modes, strict=True)):
        if mode == "store":
            stored[kind] = layer
        elif mode == "reuse":
            expected[layer] = stored[kind]
    assert layers.kv_sharing == expected
    assert len(expected) == config.num_kv_shared_layers
    per_layer = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    for layer, spec in enumerate(layers.specs):
        window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        heads = per_layer[layer].num_key_value_heads
        assert (spec.reach_tokens, spec.num_kv_heads, spec.k_dim) == (window, heads, per_layer[layer].head_dim)


def test_gemma_3n_leaves_its_number_of_shared_layers_to_transformers():
    import transformers

    values = json.loads(json.dumps(transformers.Gemma3nTextConfig().to_dict(), default=str))
    del values["num_kv_shared_layers"]
    assert config_specs(values, 2) == known_specs("gemma-3n-e4b", 2)


def test_a_gemma_3_config_with_shared_layers_is_planned_but_not_run():
    import transformers

    values = json.loads(json.dumps(transformers.Gemma3TextConfig().to_dict(), default=str))
    values["num_kv_shared_layers"] = 6
    with pytest.raises(ModelLoadError, match="num_kv_shared_layers=6: Gemma 3 is built with K and V in every layer"):
        parse_config(TypedFields(values, "config.json"))
    assert config_specs(values, 2).kv_sharing == {**dict.fromkeys(range(20, 26), 19), 23: 17}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "names 1 layers, but num_hidden_layers is 2"),
        ({"sliding_window": 16}, "does not say which layers slide; add layer_types"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ],
)
def test_configs_that_do_not_say_enough_are_refused(changes, message):
    config = {"model_type": "new", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, **changes}
    with pytest.raises(ModelLoadError, match=message):
        config_specs(config, 2)


ODD = ("x", -1, 0.5, True, [1], {"a": 1}, 2**70, 10**400, float("nan"))
PLANNED = {
    "num_hidden_layers": ODD,
    "num_attention_heads": ODD,
    "num_key_value_heads": ODD,
    "hidden_size": ODD,
    "head_dim": ODD,
    "v_head_dim": ODD,
    "sliding_window": ODD,
    "num_kv_shared_layers": ODD,
    "kv_lora_rank": ODD,
    "layer_types": (*ODD[:4], {"a": 1}, [1, 2], [["full_attention"]] * 2),
    "model_type": (1, [1], {"a": 1}),
    "per_layer_config": ("x", [1], {"x": {}}, {"7": {}}, {"-1": {}}, {"0": 1}, {"0": {"head_dim": "x"}}),
    "text_config": ("x", [1], 1),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in PLANNED.items() for value in values])
def test_a_field_out_of_its_range_is_refused_by_its_name(key, value):
    config = {
        "model_type": "new", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    assert len(config_specs(config, 2).specs) == 2
    with pytest.raises(ModelLoadError, match=rf"config\.json.*{key}"):
        config_specs({**config, key: value}, 2)


PATTERNS = {
    "hybrid_layer_pattern": ("x", [2], ["a"], {"a": 1}),
    "attention_chunk_size": ODD,
    "no_rope_layer_interval": ODD,
    "no_rope_layers": ("x", ["x"], [2], {"a": 1}),
    "use_sliding_window": ("x", 1, [1]),
    "sliding_window_pattern": (-1, 0.5, True, [1], {"a": 1}, 2**70),
    "max_window_layers": ODD,
    "swa_head_dim": ODD,
    "swa_num_key_value_heads": ODD,
    "global_head_dim": ODD,
    "attention_k_eq_v": ("x", 1),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in PATTERNS.items() for value in values])
def test_a_pattern_of_layers_out_of_its_range_is_refused_by_its_name(key, value):
    """Keys of which some kinds of models alone are asked."""
    chunked = {"attention_chunk_size": 8} if key.startswith("no_rope") else {}
    config = {
        "model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16,
        "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1, "global_head_dim": 8, **chunked,
    }  # fmt: skip
    assert len(config_specs(config, 2).specs) == 2
    with pytest.raises(ModelLoadError, match=rf"config\.json.*{key}"):
        config_specs({**config, key: value}, 2)


def test_names_that_no_system_can_hold_are_not_known():
    for name in ("a\0b", "~nobody-of-this-name/m", "x" * 5000):
        with pytest.raises(ModelLoadError, match="neither a file nor a name"):
            model_specs(name, 2)


def test_a_folder_a_config_and_a_gguf_of_one_model_give_the_same_specs(tmp_path):
    model = save_tiny_gemma(tmp_path / "folder", sliding_window_pattern=6)
    save_tiny_gguf(tmp_path / "tiny.gguf", model)
    (tmp_path / "folder" / "model.safetensors").unlink()  # planning reads no weights
    shape = {"num_kv_heads": 2, "k_dim": 16, "v_dim": 16, "itemsize_bytes": 2}
    expected = [SlidingWindowSpec(window_tokens=16, **shape)] * 5 + [FullAttentionSpec(**shape)]
    for place in ("folder", "folder/config.json", "tiny.gguf"):
        assert model_specs(str(tmp_path / place), 2) == LayerSpecs(expected)
