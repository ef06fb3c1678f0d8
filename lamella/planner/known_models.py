"""KV layouts of published models by name, from their public configs, so that planning needs no files."""

from __future__ import annotations

from collections.abc import Callable

from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.model_executor.models.config_json import shared_kv_owners
from lamella.planner.compressed_layers import deepseek_v4_kinds, deepseek_v4_specs, inkling_specs
from lamella.planner.layer_specs import LayerSpecs

Heads = tuple[int, int, int]  # KV heads, K dim, V dim


def known_specs(name: str, itemsize_bytes: int) -> LayerSpecs | None:
    """The layers of the model called `name` ("gpt-oss-20b", "openai/gpt-oss-20b"); None: not known."""
    known = name.lower().rsplit("/", 1)[-1]
    if known == "deepseek-v4":
        return deepseek_v4_specs(deepseek_v4_kinds(43), itemsize_bytes)
    if known == "inkling":
        return inkling_specs([(layer + 1) % 6 != 0 for layer in range(66)], itemsize_bytes)
    build = _MODELS.get(known)
    if build is None:
        return None
    specs = build(itemsize_bytes)
    kinds = ["sliding_attention" if spec.is_windowed else "full_attention" for spec in specs]
    return LayerSpecs(specs, shared_kv_owners(kinds, _NUM_KV_SHARED_LAYERS.get(known, 0)))


def known_names() -> tuple[str, ...]:
    return (*_MODELS, "deepseek-v4", "inkling")


def _gpt_oss(num_layers: int) -> Callable[[int], list[KVCacheSpec]]:
    def build(itemsize_bytes: int) -> list[KVCacheSpec]:
        shape = _shape((8, 64, 64), itemsize_bytes)
        return [
            FullAttentionSpec(**shape) if layer % 2 else SlidingWindowSpec(window_tokens=128, **shape)
            for layer in range(num_layers)
        ]

    return build


def _gemma(num_layers: int, window_tokens: int, heads: Heads, *, full_every: int) -> Callable[[int], list[KVCacheSpec]]:
    def build(itemsize_bytes: int) -> list[KVCacheSpec]:
        shape = _shape(heads, itemsize_bytes)
        sliding, full = SlidingWindowSpec(window_tokens=window_tokens, **shape), FullAttentionSpec(**shape)
        return [sliding if (layer + 1) % full_every else full for layer in range(num_layers)]

    return build


def _mimo_v2_flash(itemsize_bytes: int) -> list[KVCacheSpec]:
    # Its config says sliding_window_size = 128 and means previous tokens; transformers 5 reads it as 129 keys.
    full = FullAttentionSpec(**_shape((4, 192, 128), itemsize_bytes))
    sliding = SlidingWindowSpec(window_tokens=129, **_shape((8, 192, 128), itemsize_bytes))
    return [full if layer == 0 or (layer + 1) % 6 == 0 else sliding for layer in range(48)]


def _mistral_7b(itemsize_bytes: int) -> list[KVCacheSpec]:
    # v0.1; from v0.2 on, Mistral 7B has no window.
    return [SlidingWindowSpec(window_tokens=4096, **_shape((8, 128, 128), itemsize_bytes))] * 32


def _llama_4_scout(itemsize_bytes: int) -> list[KVCacheSpec]:
    shape = _shape((8, 128, 128), itemsize_bytes)
    return [
        ChunkedLocalAttentionSpec(attention_chunk_tokens=8192, **shape)
        if (layer + 1) % 4
        else FullAttentionSpec(**shape)
        for layer in range(48)
    ]


def _shape(heads: Heads, itemsize_bytes: int) -> dict[str, int]:
    num_kv_heads, k_dim, v_dim = heads
    return {"num_kv_heads": num_kv_heads, "k_dim": k_dim, "v_dim": v_dim, "itemsize_bytes": itemsize_bytes}


_MODELS: dict[str, Callable[[int], list[KVCacheSpec]]] = {
    "gpt-oss-20b": _gpt_oss(24),
    "gpt-oss-120b": _gpt_oss(36),
    "gemma-3-27b": _gemma(62, 1024, (16, 128, 128), full_every=6),
    "gemma-3-270m": _gemma(18, 512, (1, 256, 256), full_every=6),
    "gemma-3n-e4b": _gemma(35, 512, (2, 256, 256), full_every=5),
    "mimo-v2-flash": _mimo_v2_flash,
    "mistral-7b": _mistral_7b,
    "llama-4-scout": _llama_4_scout,
}

_NUM_KV_SHARED_LAYERS = {"gemma-3n-e4b": 15}
