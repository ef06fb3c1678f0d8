"""What a worker's model is, and which numbers of workers a model can be divided among."""

from __future__ import annotations

import pytest

from lamella.errors import ConfigError
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.mlp_config import ExpertsConfig, MLPConfig
from lamella.model_executor.models.sharding import Worker, shard_config
from tests.helpers.parsed_configs import parsed
from tests.helpers.sharded_layers import case_config


def heads(config: ModelConfig) -> list[tuple[int, int]]:
    return [(layer.attention.num_heads, layer.attention.num_kv_heads) for layer in config.layers]


def test_pieces_and_kv_heads() -> None:
    workers = [Worker(rank, 4) for rank in range(4)]
    assert [worker.piece(8) for worker in workers] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert [worker.kv_heads(8) for worker in workers] == [worker.piece(8) for worker in workers]
    assert [worker.kv_heads(2) for worker in workers] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [worker.kv_heads(1) for worker in workers] == [range(1)] * 4


@pytest.mark.parametrize(("rank", "num_workers"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_none_has(rank: int, num_workers: int) -> None:
    with pytest.raises(ConfigError, match=f"rank={rank} of num_workers={num_workers}: ranks count from 0"):
        Worker(rank, num_workers)


def test_one_worker_has_the_model() -> None:
    for name in ("gemma4, heads by layer", "qwen2, biases"):
        assert shard_config(case_config(name), Worker(0, 1, cuts_experts=True)) == case_config(name)


def test_heads_are_divided_layer_by_layer() -> None:
    """Gemma 4's full layers have one KV head, the others two."""
    config = case_config("gemma4, heads by layer")
    assert heads(config) == [(4, 2), (4, 1)] * 2
    assert heads(shard_config(config, Worker(0, 2))) == [(2, 1), (2, 1)] * 2
    assert heads(shard_config(config, Worker(3, 4))) == [(1, 1), (1, 1)] * 2
    laguna = case_config("laguna, gates of heads")
    assert heads(shard_config(laguna, Worker(1, 2))) == [(2, 1), (4, 1)]


def test_published_sizes() -> None:
    """GPT-OSS 120B's for eight workers."""
    sizes = {"num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 128, "vocab_size": 201088}
    config = parsed("GptOss", **sizes, num_hidden_layers=36, hidden_size=2880, intermediate_size=2880, head_dim=64)
    by_expert = shard_config(config, Worker(5, 8))
    assert heads(by_expert) == [(8, 1)] * 36
    assert by_expert.vocab_size == 25136
    experts = by_expert.layers[0].mlp
    assert isinstance(experts, ExpertsConfig)
    assert (experts.num_experts, experts.held_experts, experts.expert.width) == (128, range(80, 96), 2880)
    by_width = shard_config(config, Worker(5, 8, cuts_experts=True)).layers[0].mlp
    assert isinstance(by_width, ExpertsConfig)
    assert (by_width.held_experts, by_width.expert.width) == (range(128), 360)


def test_what_is_not_divided_stays() -> None:
    config = case_config("gemma3, one kv head")
    shard = shard_config(config, Worker(1, 2))
    assert (shard.hidden_size, shard.norm_eps, shard.num_layers) == (64, config.norm_eps, 2)
    for own, whole in zip(shard.layers, config.layers, strict=True):
        assert own.attention.rotary == whole.attention.rotary
        assert own.attention.scale == whole.attention.scale
        assert isinstance(own.mlp, MLPConfig)
        assert own.mlp.width == 48


@pytest.mark.parametrize(
    ("fields", "num_workers", "told"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6},
            4,
            r"num_workers=4: layers\[0\]\.attention\.num_heads=6 is not a multiple of it; "
            r"num_workers=1 or 2 or 3 or 6 would work$",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            6,
            r"num_workers=6: layers\[0\]\.attention\.num_kv_heads=4 is neither a multiple of it nor a divisor; "
            r"num_workers=1 or 2 or 4 or 12 would work$",
        ),
        (
            {"intermediate_size": 94},
            4,
            r"num_workers=4: layers\[0\]\.mlp\.width=94 is not a multiple of it; num_workers=1 or 2 would work$",
        ),
        ({"vocab_size": 321}, 2, "num_workers=2: vocab_size=321 is not a multiple of it; num_workers=1 would work$"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_divided(fields: dict[str, int], num_workers: int, told: str) -> None:
    sizes = {"vocab_size": 384, "hidden_size": 192, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = parsed("Llama", **{**sizes, **heads, **fields})
    with pytest.raises(ConfigError, match=told):
        shard_config(config, Worker(0, num_workers))


def test_experts_that_cannot_be_divided_one_way() -> None:
    sizes = {"vocab_size": 320, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    six = parsed("Mixtral", **sizes, num_hidden_layers=2, num_local_experts=6, intermediate_size=96)
    told = r"layers\[0\]\.mlp\.num_experts=6 is not a multiple of it; num_workers=1 or 2 would work, and so would "
    with pytest.raises(ConfigError, match=told + "cuts_experts=True$"):
        shard_config(six, Worker(0, 4))
    shard_config(six, Worker(0, 4, cuts_experts=True))
    narrow = parsed("Mixtral", **sizes, num_hidden_layers=2, num_local_experts=4, intermediate_size=90)
    with pytest.raises(ConfigError, match=r"layers\[0\]\.mlp\.expert\.width=90 .* and so would cuts_experts=False$"):
        shard_config(narrow, Worker(0, 4, cuts_experts=True))
