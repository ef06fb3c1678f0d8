"""A model as data: what each of its layers is, whatever file or family it came from.

A family reads its own config into these; layers are built from them alone, so that nothing but `models/` knows a
family. What a layer can be is the list of docs/models.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) of the first `dim` elements of each head, the first half
    of them turned against the second.

    Element pair i turns by position / position_divisor / theta^(2i / dim) radians; the divisor is linear scaling's.
    """

    dim: int
    theta: float
    position_divisor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """How one layer attends.

    kind: "full_attention", "sliding_attention" or "chunked_attention" (transformers' layer_types).
    window_tokens: keys visible including the query itself, or the chunk's length; None for full.
    scale multiplies q.k; softcap c turns a score s into c * tanh(s / c). rotary None: positions are not embedded.
    has_head_norms: Q and K are normed head by head before they are rotated.
    kv_owner: the earlier layer whose K and V this one reads, computing only Q; None: it has its own.
    """

    kind: str
    window_tokens: int | None = None
    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    rotary: RotaryConfig | None
    softcap: float | None = None
    has_head_norms: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    kv_owner: int | None = None

    @property
    def query_columns(self) -> int:
        return self.num_heads * self.k_dim

    @property
    def key_columns(self) -> int:
        return self.num_kv_heads * self.k_dim

    @property
    def value_columns(self) -> int:
        return self.num_kv_heads * self.v_dim

    def spec(self, itemsize_bytes: int) -> KVCacheSpec:
        """What its KV needs, from the layer's own kind alone."""
        shape = dict(num_kv_heads=self.num_kv_heads, k_dim=self.k_dim, v_dim=self.v_dim, itemsize_bytes=itemsize_bytes)
        if self.kind == "full_attention":
            return FullAttentionSpec(**shape)
        assert self.window_tokens is not None
        if self.kind == "sliding_attention":
            return SlidingWindowSpec(window_tokens=self.window_tokens, **shape)
        return ChunkedLocalAttentionSpec(attention_chunk_tokens=self.window_tokens, **shape)


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """down(activation(gate(x)) * up(x)). activation: "silu" or "gelu_tanh"."""

    width: int
    activation: str
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class NormPlaces:
    """Where a layer has a norm. Llama's layers have the two that come before a part, Gemma's all four."""

    input: bool = True
    post_attention: bool = False  # of attention's output, before it joins the residual stream
    mlp: bool = True  # of the MLP's input
    post_mlp: bool = False


@dataclass(frozen=True, slots=True)
class LayerConfig:
    attention: AttentionConfig
    mlp: MLPConfig
    norms: NormPlaces = NormPlaces()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """embedding_scale multiplies a token's embedding; final_logit_softcap c turns a logit l into c * tanh(l / c)."""

    architecture: str  # the family's name
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    embedding_scale: float = 1.0
    final_logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # the checkpoint's own

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def layer_specs(config: ModelConfig, *, itemsize_bytes: int) -> list[KVCacheSpec]:
    """One KV spec per layer."""
    return [layer.attention.spec(itemsize_bytes) for layer in config.layers]


def kv_sharing(config: ModelConfig) -> dict[int, int]:
    """Layer -> the layer whose KV it reads, for the layers that have none of their own."""
    owners = ((layer, each.attention.kv_owner) for layer, each in enumerate(config.layers))
    return {layer: owner for layer, owner in owners if owner is not None}
