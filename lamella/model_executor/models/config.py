"""A model as data: what each of its layers is, whatever file or family it came from.

A family reads its own config into these; layers are built from them alone, so that nothing but `models/` knows a
family. What a layer can be is the list of docs/models.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.model_executor.models.mlp_config import ExpertsConfig, MLPConfig


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) of the first `dim` elements of each head, the first half
    of them turned against the second.

    Element pair i turns by position / position_divisor / theta^(2i / dim) radians; the divisor is linear scaling's.
    scaling: what else is done to these frequencies. magnitude: cosines and sines are multiplied by it (YaRN and
    LongRoPE call it the attention factor).
    """

    dim: int
    theta: float
    position_divisor: float = 1.0
    scaling: RotaryScaling | None = None
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class BlendedScaling:
    """Llama 3.1's: long wavelengths are divided by `factor`, short ones stay, those between are blended."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN's (arXiv 2309.00071): pairs that turn more than beta_fast times in `original_positions` stay, those that
    turn less than beta_slow times are divided by `factor`, with a ramp between. truncate: its ends are whole pairs."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE's (arXiv 2402.13753): a divisor for each pair, the short ones in texts of up to `original_positions`,
    the long ones in longer texts, from their first token on."""

    short_divisors: tuple[float, ...]
    long_divisors: tuple[float, ...]
    original_positions: int


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only the first `num_pairs` turn; theta's exponents are of the whole dim all the same (Gemma 4)."""

    num_pairs: int


@dataclass(frozen=True, slots=True)
class PairDivisors:
    """A divisor for each pair, as GGUF files state them."""

    divisors: tuple[float, ...]


RotaryScaling = BlendedScaling | YarnScaling | LongRopeScaling | ProportionalScaling | PairDivisors


@dataclass(frozen=True, slots=True)
class QueryScaleConfig:
    """Queries at position p are multiplied by 1 + coefficient * ln(1 + floor((p + offset) / period)), after all else
    (Llama 4; arXiv 2501.19399)."""

    coefficient: float
    period: float
    offset: int = 0


@dataclass(frozen=True, slots=True)
class GateConfig:
    """What attention gives is multiplied by activation(gate(x)), x being what Q is made of. activation: "sigmoid" or
    "softplus". is_per_head: one number for each head, else one for each element."""

    activation: str
    is_per_head: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """How one layer attends.

    kind: "full_attention", "sliding_attention" or "chunked_attention" (transformers' layer_types).
    window_tokens: keys visible including the query itself, or the chunk's length; None for full.
    scale multiplies q.k; softcap c turns a score s into c * tanh(s / c). rotary None: positions are not embedded.
    qk_norm: what is normed of Q and K before they are rotated: "heads", each by one weight; "heads_weightless"; or
    "projection", all heads as one row; None: nothing. qk_norm_eps: the epsilon of these norms; None: the model's.
    has_value_norm: each head of V is normed, without a weight.
    values_are_keys: V is what K's projection gives, before K is normed and rotated.
    value_scale multiplies V; it is part of the weights once they are loaded.
    has_sinks: each query head has a logit that takes part in the softmax and has no value (GPT-OSS).
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
    query_scale: QueryScaleConfig | None = None
    softcap: float | None = None
    qk_norm: str | None = None
    qk_norm_eps: float | None = None
    has_value_norm: bool = False
    values_are_keys: bool = False
    value_scale: float = 1.0
    has_sinks: bool = False
    gate: GateConfig | None = None
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
class NormPlaces:
    """Where a layer has a norm. Llama's layers have the two that come before a part, Gemma's all four, OLMo's the two
    that come after one."""

    input: bool = True
    post_attention: bool = False  # of attention's output, before it joins the residual stream
    mlp: bool = True  # of the MLP's input
    post_mlp: bool = False


AROUND = NormPlaces(input=True, post_attention=True, mlp=True, post_mlp=True)
BEHIND = NormPlaces(input=False, post_attention=True, mlp=False, post_mlp=True)


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """is_parallel: the MLP reads what attention reads, and both join the residual stream at once; there is no norm of
    the MLP's own input then. has_scalar: the stream that leaves the layer is multiplied by a stored number.

    experts_beside: experts that read the
    stream as the MLP does, whose output joins the MLP's; each has norms of its own before and after it, and so has the
    router before it (Gemma 4)."""

    attention: AttentionConfig
    mlp: MLPConfig | ExpertsConfig
    norms: NormPlaces = NormPlaces()
    is_parallel: bool = False
    has_scalar: bool = False
    experts_beside: ExpertsConfig | None = None


@dataclass(frozen=True, slots=True)
class PerLayerInputConfig:
    """Every layer gets a vector of `width` of each token beside the stream, made of a second embedding table and of the
    first one's rows (Gemma 3n and 4). activation: of the gate that it goes through."""

    width: int
    vocab_size: int
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """norm_kind: "rms", or "layer" for LayerNorm, with a bias if norm_has_bias; of every norm that is not of heads.
    embedding_scale multiplies a token's embedding. logits_scale multiplies logits; it is part of the last norm's weight
    once that is loaded. final_logit_softcap c turns a logit l into c * tanh(l / c). num_left_out_layers: those that
    files hold behind these, for predicting several tokens.

    A factor m of what every part adds to the residual stream needs no field: the stream divided by m gets the parts
    unscaled, so embedding_scale / m and norm_eps / m² say the same (Granite).
    """

    architecture: str  # the family's name
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    norm_kind: str = "rms"
    norm_has_bias: bool = False
    max_position_embeddings: int
    tie_word_embeddings: bool
    has_head_bias: bool = False
    embedding_scale: float = 1.0
    per_layer_input: PerLayerInputConfig | None = None
    logits_scale: float = 1.0
    final_logit_softcap: float | None = None
    num_left_out_layers: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # the checkpoint's own

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def short_text_tokens(self) -> int | None:
        """Texts of more tokens take another rotary embedding, from their first token on (LongRopeScaling); None: all
        texts take one."""
        rotaries = (layer.attention.rotary for layer in self.layers)
        scalings = (rotary.scaling for rotary in rotaries if rotary is not None)
        lengths = [each.original_positions for each in scalings if isinstance(each, LongRopeScaling)]
        return min(lengths, default=None)


def layer_specs(config: ModelConfig, *, itemsize_bytes: int) -> list[KVCacheSpec]:
    """One KV spec per layer."""
    return [layer.attention.spec(itemsize_bytes) for layer in config.layers]


def kv_sharing(config: ModelConfig) -> dict[int, int]:
    """Layer -> the layer whose KV it reads, for the layers that have none of their own."""
    owners = ((layer, each.attention.kv_owner) for layer, each in enumerate(config.layers))
    return {layer: owner for layer, owner in owners if owner is not None}
