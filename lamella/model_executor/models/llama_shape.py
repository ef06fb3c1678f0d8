"""What configs of Llama's shape have in common: pre-norm layers that differ in nothing but their windows, and one
rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lamella.model_executor.models.config import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    RotaryConfig,
)
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson, read_rope
from lamella.model_executor.models.family import checked
from lamella.model_executor.models.typed_fields import TypedFields

_ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """qkv_bias, output_bias, mlp_bias: which projections have one."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rotary: RotaryConfig
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def layer(self, window_tokens: int | None = None) -> LayerConfig:
        """A layer with a sliding window of so many keys, the query's own included; None: full attention."""
        attention = AttentionConfig(
            kind="full_attention" if window_tokens is None else "sliding_attention",
            window_tokens=window_tokens,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            rotary=self.rotary,
            has_qkv_bias=self.qkv_bias,
            has_output_bias=self.output_bias,
        )
        return LayerConfig(attention, MLPConfig(self.mlp_width, "silu", has_bias=self.mlp_bias))


def shape_from_json(
    config: ConfigJson, defaults: Mapping[str, int], *, qkv_bias: bool, output_bias: bool, mlp_bias: bool
) -> LlamaShape:
    """defaults: what transformers fills in where a field is left out; KV heads that are null are as many as heads."""
    if config.string("hidden_act", "silu") != "silu":
        raise config.refuse("hidden_act", "it is not built; layers of this shape use silu")
    hidden_size, num_heads = _with(config, defaults, "hidden_size"), _with(config, defaults, "num_attention_heads")
    head_dim = config.optional_integer("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise config.refuse("hidden_size", f"must be a multiple of num_attention_heads, which is {num_heads}")
        head_dim = hidden_size // num_heads
    num_kv_heads = config.optional_integer("num_key_value_heads")
    if num_kv_heads is None:
        num_kv_heads = num_heads if "num_key_value_heads" in config else defaults.get("num_key_value_heads", num_heads)
    return LlamaShape(
        num_layers=_with(config, defaults, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_width=_with(config, defaults, "intermediate_size"),
        rotary=_rotary(config, head_dim),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
    )


def model_from_json(
    config: ConfigJson,
    defaults: Mapping[str, int],
    end_token_ids: tuple[int, ...] | None,
    architecture: str,
    shape: LlamaShape,
    layers: tuple[LayerConfig, ...],
) -> ModelConfig:
    """defaults: what transformers fills in, bos_token_id and eos_token_id included where it has them."""
    bos_token_id = config.optional_integer("bos_token_id")
    if "bos_token_id" not in config:
        bos_token_id = defaults.get("bos_token_id")
    if end_token_ids is None:
        if "eos_token_id" in config:
            end_token_ids = config.token_ids("eos_token_id")
        else:
            end_token_ids = (defaults["eos_token_id"],) if "eos_token_id" in defaults else ()
    return checked(
        ModelConfig(
            architecture=architecture,
            vocab_size=_with(config, defaults, "vocab_size"),
            hidden_size=shape.hidden_size,
            layers=layers,
            norm_eps=config.number("rms_norm_eps", 1e-6),
            max_position_embeddings=_with(config, defaults, "max_position_embeddings"),
            tie_word_embeddings=config.boolean("tie_word_embeddings", False),
            bos_token_id=bos_token_id,
            eos_token_ids=end_token_ids,
            dtype=config.dtype() or "float32",
        ),
        config.fields.place,
    )


def _with(config: ConfigJson, defaults: Mapping[str, int], key: str) -> int:
    return config.integer(key, defaults[key])


def _rotary(config: ConfigJson, head_dim: int) -> RotaryConfig:
    """The old key `rope_scaling` wins over `rope_parameters`, and a theta beside them fills in theirs, as in
    transformers (`convert_rope_params_to_dict`)."""
    key = "rope_scaling" if list(config.fields.optional_object("rope_scaling")) else "rope_parameters"
    parameters = config.fields.optional_object(key)
    if parameters.has_value("type") and not parameters.has_value("rope_type"):
        old_name = TypedFields({"rope_type": parameters.string("type"), "type": None}, parameters.place)
        parameters = parameters.overlaid(old_name)
    rope = read_rope(ConfigJson(parameters))
    if config.fields.has_value("partial_rotary_factor") and config.fields.number("partial_rotary_factor") != 1.0:
        raise config.refuse("partial_rotary_factor", "layers of this shape are built with whole heads rotated")
    theta = config.number("rope_theta", _ROPE_THETA)
    return RotaryConfig(head_dim, rope.theta or theta, rope.factor)


def model_from_gguf(
    config: ConfigGguf, architecture: str, *, qkv_bias: bool, output_bias: bool, has_head: bool
) -> ModelConfig:
    """has_head: whether the file holds an output matrix of its own."""
    hidden_size, num_heads = config.integer("embedding_length"), config.integer("attention.head_count")
    if hidden_size % num_heads and not config.has("attention.key_length"):
        raise config.refuse("embedding_length", f"{num_heads} attention heads cannot share it; give key_length")
    head_dim = config.integer("attention.key_length", hidden_size // num_heads)
    if config.integer("attention.value_length", head_dim) != head_dim:
        raise config.refuse("attention.value_length", f"it is built with heads of one length: {head_dim}")
    if config.integer("rope.dimension_count", head_dim) != head_dim:
        raise config.refuse("rope.dimension_count", f"it is built with whole heads rotated: {head_dim}")
    shape = LlamaShape(
        num_layers=config.integer("block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        mlp_width=config.integer("feed_forward_length"),
        rotary=RotaryConfig(head_dim, config.number("rope.freq_base", _ROPE_THETA), config.rope_factor()),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
    )
    return checked(
        ModelConfig(
            architecture=architecture,
            vocab_size=config.vocab_size(),
            hidden_size=hidden_size,
            layers=(shape.layer(),) * shape.num_layers,
            norm_eps=config.number("attention.layer_norm_rms_epsilon"),
            max_position_embeddings=config.integer("context_length"),
            tie_word_embeddings=not has_head,
            bos_token_id=config.bos_token_id(),
            eos_token_ids=config.end_token_ids(),
            dtype=config.dtype(),
        ),
        config.place,
    )
