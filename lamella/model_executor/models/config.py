"""A model's shape, as the executor needs it, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass

from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """How one layer attends.

    kind: "full_attention", "sliding_attention" or "chunked_attention" (transformers' layer_types).
    window_tokens: keys visible including the query itself, or the chunk's length; None for full.
    rope_theta, rope_scale: rotary base; positions are divided by rope_scale (linear scaling).
    kv_owner: the earlier layer whose K and V this one reads, computing only Q; None: it has its own.
    """

    kind: str
    window_tokens: int | None
    rope_theta: float
    rope_scale: float = 1.0
    kv_owner: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str  # "gemma3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    query_scale: float
    layers: tuple[LayerConfig, ...]
    tie_word_embeddings: bool = True
    attn_logit_softcap: float | None = None
    final_logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # the checkpoint's own

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def layer_specs(config: ModelConfig, *, itemsize_bytes: int) -> list[KVCacheSpec]:
    """One KV spec per layer, from the layer's own kind alone."""

    def spec_of(layer: LayerConfig) -> KVCacheSpec:
        shape = dict(
            num_kv_heads=config.num_kv_heads,
            k_dim=config.head_dim,
            v_dim=config.head_dim,
            itemsize_bytes=itemsize_bytes,
        )
        if layer.kind == "sliding_attention":
            assert layer.window_tokens is not None
            return SlidingWindowSpec(window_tokens=layer.window_tokens, **shape)
        if layer.kind == "chunked_attention":
            assert layer.window_tokens is not None
            return ChunkedLocalAttentionSpec(attention_chunk_tokens=layer.window_tokens, **shape)
        return FullAttentionSpec(**shape)

    return [spec_of(layer) for layer in config.layers]


def kv_sharing(config: ModelConfig) -> dict[int, int]:
    """Layer -> the layer whose KV it reads, for the layers that have none of their own."""
    return {layer: each.kv_owner for layer, each in enumerate(config.layers) if each.kv_owner is not None}
