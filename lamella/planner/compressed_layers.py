"""What layers of DeepSeek-V4 and Inkling keep, for planning: lamella does not run them (docs/models.md).

DeepSeek-V4 (transformers 5.24, modeling_deepseek_v4.py) keeps in every layer a window of one tensor that is both K and
V, and in most layers beside it one compressed entry of the same width for every 4 or 128 tokens; at rate 4 also an
indexer's key. A spec stands for each: halves of a width for K and V, as specs have both. Inkling keeps K and V of
sliding and full layers with heads of their own; the states of its convolutions are a few tokens a request, which is not
counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamella.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.model_executor.models.config_json import ConfigJson
from lamella.planner.layer_specs import LayerSpecs

DEFAULT_RATIO = 0.1
RATES = {"heavily_compressed_attention": 128, "compressed_sparse_attention": 4, "sliding_attention": 0}


def deepseek_v4_specs(
    kinds: Sequence[str], itemsize_bytes: int, *, head_dim: int = 512, index_dim: int = 128, window_tokens: int = 128
) -> LayerSpecs:
    """kinds: of all layers, as in RATES."""
    windows: list[KVCacheSpec] = [
        SlidingWindowSpec(window_tokens=window_tokens, **_halves(head_dim, itemsize_bytes)) for _ in kinds
    ]
    # Elements per token: an entry's width over its rate, and the indexer's key where there is one.
    widths = {128: head_dim // 128, 4: (head_dim + index_dim) // 4}
    compressed = [FullAttentionSpec(**_halves(widths[rate], itemsize_bytes)) for kind in kinds if (rate := RATES[kind])]
    return LayerSpecs([*windows, *compressed], default_ratio=DEFAULT_RATIO)


def deepseek_v4_kinds(num_layers: int) -> list[str]:
    """Where the config leaves it to transformers' code: two heavily compressed layers, then alternating kinds."""
    heavy, sparse = "heavily_compressed_attention", "compressed_sparse_attention"
    return [heavy if layer < 2 or layer % 2 == 0 else sparse for layer in range(num_layers)]


def deepseek_v4_config(config: ConfigJson, itemsize_bytes: int) -> LayerSpecs:
    """From a config.json."""
    num_layers = config.integer("num_hidden_layers")
    kinds: Sequence[str] | None = config.layer_types(num_layers, tuple(RATES))
    if kinds is None and config.fields.has_value("compress_ratios"):
        of_rate = {rate: kind for kind, rate in RATES.items()}
        rates = config.fields.integers("compress_ratios", high=128)[:num_layers]
        if any(rate not in of_rate for rate in rates):
            raise config.refuse("compress_ratios", "each must be 0, 4 or 128")
        kinds = [of_rate[rate] for rate in rates]
    return deepseek_v4_specs(
        kinds or deepseek_v4_kinds(num_layers),
        itemsize_bytes,
        head_dim=config.integer("head_dim", 512),
        index_dim=config.fields.integer("index_head_dim", 128, low=1, high=4096),
        window_tokens=config.integer("sliding_window", 128),
    )


def inkling_specs(
    slides: Sequence[bool],
    itemsize_bytes: int,
    *,
    full_heads: tuple[int, int] = (8, 128),
    sliding_heads: tuple[int, int] = (16, 128),
    window_tokens: int = 512,
) -> LayerSpecs:
    """slides: for each layer. full_heads, sliding_heads: KV heads and their size."""
    full = FullAttentionSpec(
        num_kv_heads=full_heads[0], k_dim=full_heads[1], v_dim=full_heads[1], itemsize_bytes=itemsize_bytes
    )
    sliding = SlidingWindowSpec(
        num_kv_heads=sliding_heads[0],
        k_dim=sliding_heads[1],
        v_dim=sliding_heads[1],
        itemsize_bytes=itemsize_bytes,
        window_tokens=window_tokens,
    )
    return LayerSpecs([sliding if each else full for each in slides], default_ratio=DEFAULT_RATIO)


def inkling_config(config: ConfigJson, itemsize_bytes: int) -> LayerSpecs:
    """From a config.json."""
    num_layers = config.integer("num_hidden_layers")
    kinds = config.layer_types(num_layers, ("hybrid", "hybrid_sliding"))
    if kinds is not None:
        slides = [kind == "hybrid_sliding" for kind in kinds]
    elif config.fields.has_value("local_layer_ids"):
        local = set(config.fields.integers("local_layer_ids", high=num_layers - 1))
        slides = [layer in local for layer in range(num_layers)]
    else:
        slides = [(layer + 1) % 6 != 0 for layer in range(num_layers)]
    return inkling_specs(
        slides,
        itemsize_bytes,
        full_heads=(config.integer("num_key_value_heads", 8), config.integer("head_dim", 128)),
        sliding_heads=(config.integer("swa_num_key_value_heads", 16), config.integer("swa_head_dim", 128)),
        window_tokens=config.integer("sliding_window_size", 512),
    )


def _halves(width: int, itemsize_bytes: int) -> dict[str, int]:
    return {"num_kv_heads": 1, "k_dim": width // 2, "v_dim": width - width // 2, "itemsize_bytes": itemsize_bytes}
