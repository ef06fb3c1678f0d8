"""What configs of Llama's shape have in common: sizes of heads, norms before both parts or wherever a family has them,
one rotary embedding, and layers that differ in little else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lamella.model_executor.models.config import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    NormPlaces,
    RotaryConfig,
)
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import checked
from lamella.model_executor.models.rope_json import flat_rotary

FULL, SLIDING = KINDS = ("full_attention", "sliding_attention")
_ROPE_THETA = 10_000.0
# transformers' names (activations.py) -> ours. Some are one formula in several spellings.
_ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}

_PRE_NORMS = NormPlaces()

Defaults = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """qkv_bias, output_bias, mlp_bias: which projections have one. qk_norm, softcap: see AttentionConfig."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rotary: RotaryConfig
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    scale: float | None = None  # None: the root of 1 / head_dim
    softcap: float | None = None
    norms: NormPlaces = _PRE_NORMS
    is_parallel: bool = False
    has_gated_mlp: bool = True

    def with_scale(self, scale: float) -> LlamaShape:
        return replace(self, scale=scale)

    def layers(
        self,
        kinds: Sequence[str],
        window_tokens: int | None,
        rotaries: Mapping[str, RotaryConfig] | None = None,
        **attention: Any,
    ) -> tuple[LayerConfig, ...]:
        """A layer of each of these kinds, those of one kind being one object; the sliding ones have the window.
        rotaries: of each kind, where that makes a difference. attention: as for `layer`."""

        def of(kind: str) -> LayerConfig:
            own = attention if rotaries is None else {**attention, "rotary": rotaries[kind]}
            return self.layer(window_tokens if kind == SLIDING else None, **own)

        built = {kind: of(kind) for kind in set(kinds)}
        return tuple(built[kind] for kind in kinds)

    def layer(self, window_tokens: int | None = None, **attention: Any) -> LayerConfig:
        """A layer with a sliding window of so many keys, the query's own included; None: full attention. attention:
        fields of its AttentionConfig that differ."""
        config = AttentionConfig(
            **{
                "kind": KINDS[window_tokens is not None],
                "window_tokens": window_tokens,
                "num_heads": self.num_heads,
                "num_kv_heads": self.num_kv_heads,
                "k_dim": self.head_dim,
                "v_dim": self.head_dim,
                "scale": self.head_dim**-0.5 if self.scale is None else self.scale,
                "rotary": self.rotary,
                "softcap": self.softcap,
                "qk_norm": self.qk_norm,
                "has_qkv_bias": self.qkv_bias,
                "has_output_bias": self.output_bias,
                **attention,
            }
        )
        mlp = MLPConfig(self.mlp_width, self.activation, has_bias=self.mlp_bias, is_gated=self.has_gated_mlp)
        return LayerConfig(config, mlp, self.norms, self.is_parallel)


def shape_from_json(
    config: ConfigJson,
    defaults: Defaults,
    *,
    rotary: RotaryConfig | None = None,
    activation_key: str = "hidden_act",
    attention_bias: bool = False,
    **fields: Any,
) -> LlamaShape:
    """defaults: what transformers fills in where a field is left out; KV heads that are null are as many as heads.

    rotary: where the family reads it itself. attention_bias: whether the config may ask for biases of all four of
    attention's projections. fields: of LlamaShape, as the family has them.
    """
    hidden_size, num_heads = with_default(config, defaults, "hidden_size"), heads(config, defaults)
    head_dim = head_size(config, defaults)
    num_kv_heads = config.optional_integer("num_key_value_heads")
    if num_kv_heads is None:
        num_kv_heads = num_heads if "num_key_value_heads" in config else defaults.get("num_key_value_heads", num_heads)
    if attention_bias:
        has_bias = config.boolean("attention_bias", defaults.get("attention_bias", False))
        fields = {"qkv_bias": has_bias, "output_bias": has_bias, **fields}
    if rotary is None:
        rotary = flat_rotary(
            config,
            head_dim,
            max_positions=with_default(config, defaults, "max_position_embeddings"),
            theta=defaults.get("rope_theta", _ROPE_THETA),
        )
    return LlamaShape(
        num_layers=with_default(config, defaults, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_width=with_default(config, defaults, "intermediate_size"),
        activation=activation(config, activation_key, defaults.get(activation_key, "silu")),
        rotary=rotary,
        **fields,
    )


def with_default(config: ConfigJson, defaults: Defaults, key: str) -> int:
    return config.integer(key, defaults[key])


def heads(config: ConfigJson, defaults: Defaults) -> int:
    return with_default(config, defaults, "num_attention_heads")


def head_size(config: ConfigJson, defaults: Defaults) -> int:
    """head_dim, or what the heads share evenly of hidden_size."""
    if "head_dim" not in config and "head_dim" in defaults:
        return int(defaults["head_dim"])
    head_dim = config.optional_integer("head_dim")
    if head_dim is not None:
        return head_dim
    hidden_size, num_heads = with_default(config, defaults, "hidden_size"), heads(config, defaults)
    if hidden_size % num_heads:
        raise config.refuse("hidden_size", f"must be a multiple of num_attention_heads, which is {num_heads}")
    return hidden_size // num_heads


def activation(config: ConfigJson, key: str, default: str) -> str:
    name = config.string(key, default)
    if name not in _ACTIVATIONS:
        raise config.not_built(key, f"it is not built; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def layer_kinds(config: ConfigJson, num_layers: int, is_full: Callable[[int], bool]) -> tuple[str, ...]:
    """`layer_types`, or where that is left out full attention for the layers that `is_full` names."""
    kinds = config.layer_types(num_layers, KINDS)
    return kinds or tuple(KINDS[not is_full(layer)] for layer in range(num_layers))


def window_of_sliding(config: ConfigJson, kinds: tuple[str, ...], default: int | None) -> int | None:
    """`sliding_window`: how many keys a sliding layer sees, the query's own included, as transformers masks
    0 <= q - k < sliding_window. Raises ModelLoadError where there are such layers and it is null."""
    window = config.optional_integer("sliding_window") if "sliding_window" in config else default
    if window is None and SLIDING in kinds:
        raise config.refuse("sliding_window", "there are sliding layers, so it must be a number of keys")
    return window


def model_from_json(
    config: ConfigJson,
    defaults: Defaults,
    end_token_ids: tuple[int, ...] | None,
    architecture: str,
    shape: LlamaShape,
    layers: tuple[LayerConfig, ...],
    *,
    whole: ConfigJson | None = None,
    eps_key: str = "rms_norm_eps",
    **fields: Any,
) -> ModelConfig:
    """defaults: what transformers fills in, bos_token_id and eos_token_id included where it has them; those outside of
    the vocabulary are none. whole: the file, where `config` is a part of it: tokens that begin and end a text are its
    own where it states them, and transformers reads `tie_word_embeddings` from there alone. eps_key: the norms'
    epsilon. fields: of ModelConfig, as the family has them."""
    whole = whole or config
    vocab_size = with_default(config, defaults, "vocab_size")
    place = whole if "bos_token_id" in whole else config
    bos_token_id = place.optional_integer("bos_token_id")
    if "bos_token_id" not in place and defaults.get("bos_token_id", vocab_size) < vocab_size:
        bos_token_id = defaults["bos_token_id"]
    place = whole if whole.fields.has_value("eos_token_id") else config
    own_end_ids = tuple(token_id for token_id in end_tokens(defaults) if token_id < vocab_size)
    if "eos_token_id" in place:  # read even where it is not used, so that a value out of range is always refused
        own_end_ids = place.token_ids("eos_token_id")
    end_token_ids = own_end_ids if end_token_ids is None else end_token_ids
    is_tied = whole.boolean("tie_word_embeddings", defaults.get("tie_word_embeddings", False))
    return checked(
        ModelConfig(
            **{
                "architecture": architecture,
                "vocab_size": vocab_size,
                "hidden_size": shape.hidden_size,
                "layers": layers,
                "norm_eps": config.number(eps_key, defaults.get(eps_key, 1e-6)),
                "max_position_embeddings": with_default(config, defaults, "max_position_embeddings"),
                "tie_word_embeddings": is_tied,
                "bos_token_id": bos_token_id,
                "eos_token_ids": end_token_ids,
                "dtype": config.dtype() or whole.dtype() or "float32",
                **fields,
            }
        ),
        config.fields.place,
    )


def end_tokens(defaults: Defaults) -> tuple[int, ...]:
    default = defaults.get("eos_token_id", ())
    return default if isinstance(default, tuple) else (default,)


def shape_from_gguf(
    config: ConfigGguf,
    tensor_names: Collection[str],
    *,
    has_partial: bool = False,
    has_own_v_dim: bool = False,
    rotary: Callable[[int], RotaryConfig] | None = None,
    **fields: Any,
) -> LlamaShape:
    """Which projections have biases is told by the tensors. has_partial: whether the family turns a part of its heads;
    has_own_v_dim: whether it reads the size of V itself. rotary: where the family reads it itself, of how many
    elements. fields: of LlamaShape, as the family has them; numbers that it reads itself, as they differ from layer to
    layer, are not read here."""
    hidden_size = config.integer("embedding_length")
    num_heads = fields.pop("num_heads", None) or config.integer("attention.head_count")
    if hidden_size % num_heads and not config.has("attention.key_length"):
        raise config.refuse("embedding_length", f"{num_heads} attention heads cannot share it; give key_length")
    head_dim = config.integer("attention.key_length", hidden_size // num_heads)
    if not has_own_v_dim and config.integer("attention.value_length", head_dim) != head_dim:
        raise config.refuse("attention.value_length", f"it is built with heads of one length: {head_dim}")
    rotary_dim = config.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not (has_partial and rotary_dim < head_dim):
        raise config.refuse("rope.dimension_count", f"it is built with whole heads rotated: {head_dim}")
    return LlamaShape(
        num_layers=config.num_layers(),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.pop("num_kv_heads", None) or config.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        mlp_width=fields.pop("mlp_width", None) or config.integer("feed_forward_length"),
        rotary=rotary(rotary_dim) if rotary else config.rotary(rotary_dim, _ROPE_THETA),
        qkv_bias="blk.0.attn_q.bias" in tensor_names or "blk.0.attn_qkv.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_down.bias" in tensor_names,
        **fields,
    )


def model_from_gguf(
    config: ConfigGguf,
    architecture: str,
    shape: LlamaShape,
    layers: tuple[LayerConfig, ...],
    tensor_names: Collection[str],
    *,
    eps_key: str = "attention.layer_norm_rms_epsilon",
    **fields: Any,
) -> ModelConfig:
    """fields: of ModelConfig, as the family has them."""
    return checked(
        ModelConfig(
            **{
                "architecture": architecture,
                "vocab_size": config.vocab_size(),
                "hidden_size": shape.hidden_size,
                "layers": layers,
                "norm_eps": config.number(eps_key),
                "max_position_embeddings": config.integer("context_length"),
                "tie_word_embeddings": "output.weight" not in tensor_names,
                "num_left_out_layers": config.num_extra_layers(),
                "bos_token_id": config.bos_token_id(),
                "eos_token_ids": config.end_token_ids(),
                "dtype": config.dtype(),
                **fields,
            }
        ),
        config.place,
    )
