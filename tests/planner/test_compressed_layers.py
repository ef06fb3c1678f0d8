"""DeepSeek-V4 and Inkling are sized from their configs as transformers' classes fill them in."""

import pytest

from lamella.errors import ModelLoadError
from lamella.planner.known_models import known_specs
from lamella.planner.model_specs import config_specs


def token_bytes(specs, *, windowed):
    return sum(spec.token_bytes for spec in specs.specs if spec.is_windowed == windowed)


def test_deepseek_v4_counted_by_hand():
    """43 layers of 512 elements, K and V at once: a window of 128 tokens in each, and beside it 512 / 128 = 4 elements
    a token at rate 128 (layers 0, 1 and every even one), or (512 + 128) / 4 = 160 with the indexer's key at rate 4."""
    specs = known_specs("deepseek-v4", 2)
    assert token_bytes(specs, windowed=True) == 43 * 512 * 2
    num_sparse = len(range(3, 43, 2))
    assert token_bytes(specs, windowed=False) == ((43 - num_sparse) * 4 + num_sparse * 160) * 2


def test_configs_of_deepseek_v4_say_the_same_in_either_spelling():
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config()
    rates = [config.compress_rates.get(kind, 0) for kind in config.layer_types]
    bare = {"model_type": "deepseek_v4", "num_hidden_layers": 43}
    by_code = config_specs(bare, 2)
    assert list(by_code.specs) == list(config_specs(config.to_dict(), 2).specs)
    assert list(by_code.specs) == list(config_specs({**bare, "compress_ratios": rates}, 2).specs)
    assert list(by_code.specs) == list(known_specs("deepseek-v4", 2).specs)


def test_a_rate_that_is_not_known_is_refused():
    with pytest.raises(ModelLoadError, match="each must be 0, 4 or 128"):
        config_specs({"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [4, 16]}, 2)


def test_inkling_is_read_as_transformers_reads_it():
    from transformers.models.inkling.configuration_inkling import InklingTextConfig

    config = InklingTextConfig()
    specs = config_specs({"model_type": "inkling_text", "num_hidden_layers": 66}, 2)
    assert list(specs.specs) == list(config_specs(config.to_dict(), 2).specs) == list(known_specs("inkling", 2).specs)
    sliding = [kind == "hybrid_sliding" for kind in config.layer_types]
    assert [spec.is_windowed for spec in specs.specs] == sliding
    assert {spec.reach_tokens for spec in specs.specs} == {512, None}
    assert {spec.num_kv_heads for spec in specs.specs if spec.is_windowed} == {16}
    assert specs.default_ratio == 0.1
