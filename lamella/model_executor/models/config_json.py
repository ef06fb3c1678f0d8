"""config.json as typed fields: what each name may hold, whatever family of models it describes.

A family reads the names that it knows from here. What they mean to it, and what transformers fills in where they are
left out, is said in the family's own file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lamella.errors import InvariantError, ModelLoadError, UnbuiltVariantError
from lamella.model_executor.models import config_ranges as ranges
from lamella.model_executor.models.typed_fields import TypedFields, shown

DTYPES = ("float32", "float16", "bfloat16")
IS_ENCODER = "this is an encoder, and only causal models can generate; use the model it was made from"

_INTEGERS = {
    "vocab_size": ranges.VOCABULARY,
    "hidden_size": ranges.WIDTH,
    "intermediate_size": ranges.WIDTH,
    "num_hidden_layers": ranges.LAYERS,
    "num_attention_heads": ranges.HEADS,
    "num_key_value_heads": ranges.HEADS,
    "num_global_key_value_heads": ranges.HEADS,
    "swa_num_key_value_heads": ranges.HEADS,
    "head_dim": ranges.HEAD_DIM,
    "v_head_dim": ranges.HEAD_DIM,
    "global_head_dim": ranges.HEAD_DIM,
    "swa_head_dim": ranges.HEAD_DIM,
    "swa_v_head_dim": ranges.HEAD_DIM,
    "kv_lora_rank": ranges.IntegerRange(0, ranges.WIDTH.high),
    "max_position_embeddings": ranges.POSITIONS,
    "original_max_position_embeddings": ranges.POSITIONS,
    "sliding_window": ranges.POSITIONS,
    "sliding_window_size": ranges.POSITIONS,
    "attention_chunk_size": ranges.POSITIONS,
    "sliding_window_pattern": ranges.LAYERS,
    "_sliding_window_pattern": ranges.LAYERS,  # as transformers saves it
    "no_rope_layer_interval": ranges.LAYERS,
    "max_window_layers": ranges.IntegerRange(0, ranges.LAYERS.high),
    "num_kv_shared_layers": ranges.IntegerRange(0, ranges.LAYERS.high),
    "hidden_size_per_layer_input": ranges.IntegerRange(0, ranges.WIDTH.high),
    "vocab_size_per_layer_input": ranges.VOCABULARY,
    "bos_token_id": ranges.TOKEN_ID,
    "num_experts": ranges.EXPERTS,
    "num_local_experts": ranges.EXPERTS,
    "n_routed_experts": ranges.EXPERTS,
    "num_experts_per_tok": ranges.EXPERTS,
    "top_k_experts": ranges.EXPERTS,
    "num_shared_experts": ranges.EXPERTS,
    "moe_num_experts": ranges.EXPERTS,
    "moe_top_k": ranges.EXPERTS,
    "share_expert_dim": ranges.WIDTH,
    "share_expert_dims": ranges.WIDTH,
    "num_dense_layers": ranges.IntegerRange(0, ranges.LAYERS.high),
    "global_attn_every_n_layers": ranges.LAYERS,
    "n_group": ranges.EXPERTS,
    "topk_group": ranges.EXPERTS,
    "moe_intermediate_size": ranges.WIDTH,
    "shared_expert_intermediate_size": ranges.WIDTH,
    "shared_intermediate_size": ranges.IntegerRange(0, ranges.WIDTH.high),
    "intermediate_size_mlp": ranges.WIDTH,
    "decoder_sparse_step": ranges.LAYERS,
    "interleave_moe_layer_step": ranges.LAYERS,
    "floor_scale": ranges.POSITIONS,
}
_NUMBERS = {
    "rms_norm_eps": ranges.NORM_EPSILON,
    "query_pre_attn_scalar": ranges.QUERY_SCALAR,
    "attn_logit_softcapping": ranges.SOFTCAP,
    "final_logit_softcapping": ranges.SOFTCAP,
    "rope_theta": ranges.ROPE_THETA,
    "rope_local_base_freq": ranges.ROPE_THETA,
    "factor": ranges.ROPE_FACTOR,
    "swiglu_limit": ranges.MULTIPLIER,
    "swiglu_alpha": ranges.MULTIPLIER,
    "attn_scale": ranges.MULTIPLIER,
    "attention_value_scale": ranges.MULTIPLIER,
    "routed_scaling_factor": ranges.MULTIPLIER,
    "moe_routed_scaling_factor": ranges.MULTIPLIER,
    "moe_router_scaling_factor": ranges.MULTIPLIER,
    "route_scale": ranges.MULTIPLIER,
    "router_jitter_noise": ranges.MULTIPLIER,
    "low_freq_factor": ranges.ROPE_FACTOR,
    "high_freq_factor": ranges.ROPE_FACTOR,
    "beta_fast": ranges.ROPE_FACTOR,
    "beta_slow": ranges.ROPE_FACTOR,
    "attention_factor": ranges.MULTIPLIER,
    "mscale": ranges.MULTIPLIER,
    "mscale_all_dim": ranges.MULTIPLIER,
    "llama_4_scaling_beta": ranges.MULTIPLIER,
    "layer_norm_eps": ranges.NORM_EPSILON,
    "norm_epsilon": ranges.NORM_EPSILON,
    "logit_scale": ranges.MULTIPLIER,
    "embedding_multiplier": ranges.MULTIPLIER,
    "logits_scaling": ranges.MULTIPLIER,
    "residual_multiplier": ranges.MULTIPLIER,
    "attention_multiplier": ranges.MULTIPLIER,
}


class ConfigJson:
    """The typed fields of config.json, or of an object in it. Every reader raises ModelLoadError as TypedFields does.

    Fields that are null count as absent only in the `optional_` readers.
    """

    def __init__(self, fields: TypedFields) -> None:
        self.fields = fields

    def __contains__(self, key: str) -> bool:
        return key in self.fields

    def integer(self, key: str, default: int | None = None) -> int:
        if default is not None and key not in self.fields:
            return default
        low, high = _range(_INTEGERS, key)
        return self.fields.integer(key, low=low, high=high)

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if self.fields.has_value(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        if default is not None and key not in self.fields:
            return default
        above, high = _range(_NUMBERS, key)
        return self.fields.number(key, above=above, high=high)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.fields.has_value(key) else None

    def boolean(self, key: str, default: bool) -> bool:
        return self.fields.boolean(key, default)

    def optional_boolean(self, key: str) -> bool | None:
        return self.fields.optional_boolean(key)

    def string(self, key: str, default: str) -> str:
        return self.fields.string(key, default)

    def names(self) -> tuple[str, ...]:
        """What the file calls its model: `architectures`, then `model_type`."""
        architectures = self.fields.strings("architectures") if self.fields.has_value("architectures") else ()
        model_type = self.fields.optional_string("model_type")
        return (*architectures, *([model_type] if model_type else []))

    def object(self, key: str) -> ConfigJson:
        return ConfigJson(self.fields.object(key))

    def dtype(self) -> str | None:
        """The checkpoint's dtype, or None where the file does not say."""
        for key in ("dtype", "torch_dtype"):
            name = self.fields.optional_string(key)
            if name:
                if name.removeprefix("torch.") not in DTYPES:
                    raise self.fields.error(key, f"one of {', '.join(DTYPES)}")
                return name.removeprefix("torch.")
        return None

    def token_ids(self, key: str) -> tuple[int, ...]:
        return self.fields.token_ids(key, high=ranges.TOKEN_ID.high)

    def layer_types(self, num_layers: int, known: Collection[str]) -> tuple[str, ...] | None:
        """One of `known` per layer; None where the file does not list them."""
        if not self.fields.has_value("layer_types"):
            return None
        kinds = self.fields.strings("layer_types")
        if len(kinds) != num_layers:
            raise ModelLoadError(
                f"{self.fields.place}: {self.fields.prefix}layer_types names {len(kinds)} layers, but "
                f"num_hidden_layers is {num_layers}"
            )
        unknown = sorted(set(kinds) - set(known))
        if unknown:
            raise ModelLoadError(
                f"{self.fields.place}: {self.fields.prefix}layer_types has {', '.join(map(shown, unknown))}; known: "
                f"{', '.join(map(repr, known))}"
            )
        return kinds

    def refuse(self, key: str, why: str) -> ModelLoadError:
        """The error for a field that does not go with others, or with which nobody can run the model."""
        return ModelLoadError(self._about(key, why))

    def not_built(self, key: str, why: str) -> UnbuiltVariantError:
        """The error for a field that asks for a variant which the family is not built for, and transformers may be."""
        return UnbuiltVariantError(self._about(key, why))

    def _about(self, key: str, why: str) -> str:
        return f"{self.fields.place}: {self.fields.prefix}{key}={shown(self.fields.raw(key))}: {why}"

    def fields_of_layer(self, layer: int, known: Collection[str]) -> TypedFields:
        """What `per_layer_config` says of one layer, where layers differ: nothing but `known`, or UnbuiltVariantError.

        transformers pads the layer's number with zeros, to as many digits as the last layer's has.
        """
        every = self.fields.optional_object("per_layer_config")
        key = next((each for each in every if each.isdecimal() and int(each[-6:]) == layer), str(layer))
        own = every.optional_object(key)
        if others := sorted(set(own) - set(known)):
            raise ConfigJson(own).not_built(others[0], "it is not built layer by layer; leave it out")
        return own


def shared_kv_owners(layer_types: Sequence[str], num_shared_layers: int) -> dict[int, int]:
    """Layer -> the layer whose KV it reads, where the last `num_shared_layers` layers have none of their own.

    The rule of Gemma 3n and Gemma 4 (`num_kv_shared_layers`): each of them reads the last earlier layer of its kind
    that has KV. In transformers 5.24 this is `kv_sharing_modes` of configuration_gemma3n.py and
    configuration_gemma4.py, where the last layer of each kind before the shared ones "stores" its K and V, and the
    attention's forward, where a layer that "reuses" takes what its `layer_type` stored. With Gemma 3n E4B's 35 layers
    of which every fifth is full, layers 20 to 34 share: the sliding ones read layer 18, the full ones layer 19.
    Raises ModelLoadError when a shared layer has no earlier layer of its kind that keeps KV.
    """
    num_layers = len(layer_types)
    if isinstance(num_shared_layers, bool) or not isinstance(num_shared_layers, int) or num_shared_layers < 0:
        raise ModelLoadError(
            f"num_kv_shared_layers={num_shared_layers!r} in config.json: must be an integer of at least 0"
        )
    if num_shared_layers >= num_layers:
        raise ModelLoadError(
            f"num_kv_shared_layers={num_shared_layers} in config.json, of {num_layers} layers: no layer keeps KV, as "
            "in an assistant that reads another model's; use the model it assists"
        )
    num_own = num_layers - num_shared_layers
    last_of_kind = {kind: layer for layer, kind in enumerate(layer_types[:num_own])}
    for layer in range(num_own, num_layers):
        if layer_types[layer] not in last_of_kind:
            raise ModelLoadError(
                f"num_kv_shared_layers={num_shared_layers} in config.json: layer {layer} is {layer_types[layer]!r}, "
                f"but no layer before {num_own} is, whose KV it could read; share fewer layers"
            )
    return {layer: last_of_kind[layer_types[layer]] for layer in range(num_own, num_layers)}


def _range(table: dict[str, Any], key: str) -> Any:
    if key not in table:
        raise InvariantError(f"{key} is not in the table of config.json's fields; add it with its range")
    return table[key]
