"""Gemma 3's configuration from config.json and from GGUF metadata: what each leaves out, and what is not built."""

from __future__ import annotations

import logging
from collections.abc import Collection

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config import LayerConfig, ModelConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson, read_rope

logger = logging.getLogger(__name__)

TEXT_NAMES = ("Gemma3ForCausalLM", "Gemma3TextModel", "gemma3_text")
MULTIMODAL_NAMES = ("Gemma3ForConditionalGeneration", "gemma3")
GGUF_NAME = "gemma3"

_KINDS = ("full_attention", "sliding_attention")
_ROPE_THETA = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
_FULL_EVERY = 6
_LAYERS_OF_27B = 62


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """config: the whole file; text: the part that describes the text model, which is the same in text-only files.

    Fields that are left out are what transformers 5.24's Gemma3TextConfig fills in. end_token_ids: those of
    generation_config.json, which win; None: it has none.
    Raises ModelLoadError for a variant that is not built.
    """
    _refuse_variants(text)
    vocab_size = text.integer("vocab_size", 262208)
    hidden_size, num_heads = text.integer("hidden_size", 2304), text.integer("num_attention_heads", 8)
    if hidden_size % num_heads:
        raise text.refuse("hidden_size", f"must be a multiple of num_attention_heads, which is {num_heads}")
    if text.optional_number("attn_logit_softcapping") is not None:
        logger.warning("attn_logit_softcapping is left out: transformers does not apply it to Gemma 3 either")
    bos_token_id, eos_token_ids = _special_tokens(config, text)
    return _checked(
        ModelConfig(
            architecture="gemma3",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=text.integer("intermediate_size", 9216),
            num_heads=num_heads,
            num_kv_heads=text.integer("num_key_value_heads", 4),
            head_dim=text.integer("head_dim", 256),
            rms_norm_eps=text.number("rms_norm_eps", 1e-6),
            max_position_embeddings=text.integer("max_position_embeddings", 131072),
            query_scale=text.number("query_pre_attn_scalar", 256) ** -0.5,
            layers=_layers(text),
            # transformers asks the whole config alone, even where the text part says otherwise.
            tie_word_embeddings=config.boolean("tie_word_embeddings", True),
            final_logit_softcap=text.optional_number("final_logit_softcapping"),
            bos_token_id=bos_token_id,
            eos_token_ids=eos_token_ids if end_token_ids is None else end_token_ids,
            dtype=text.dtype() or config.dtype() or "float32",
        ),
        config.fields.place,
    )


def _refuse_variants(text: ConfigJson) -> None:
    if text.optional_boolean("use_bidirectional_attention"):
        raise text.refuse(
            "use_bidirectional_attention",
            "this is an encoder, and only causal models can generate; use the model it was made from",
        )
    if text.boolean("attention_bias", False):
        raise text.refuse("attention_bias", "Gemma 3 layers are built without biases")
    if text.optional_integer("num_kv_shared_layers"):
        raise text.refuse(
            "num_kv_shared_layers",
            "Gemma 3 is built with K and V in every layer; use a checkpoint in which each layer has its own",
        )
    if text.string("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise text.refuse("hidden_activation", "it is not built; Gemma 3 uses gelu_pytorch_tanh")
    if text.fields.has_value("per_layer_config") and len(list(text.fields.optional_object("per_layer_config"))) > 0:
        raise text.refuse("per_layer_config", "Gemma 3 is built with layers of one shape; leave it out")


def _special_tokens(config: ConfigJson, text: ConfigJson) -> tuple[int | None, tuple[int, ...]]:
    """Token that begins a text and tokens that end one: of the whole config where it states them, else of its text
    part. null means none."""
    place = next((each for each in (config, text) if "bos_token_id" in each), None)
    bos_token_id = 2 if place is None else place.optional_integer("bos_token_id")
    place = next((each for each in (config, text) if each.fields.has_value("eos_token_id")), text)
    return bos_token_id, place.token_ids("eos_token_id") if "eos_token_id" in place else (1,)


def _layers(text: ConfigJson) -> tuple[LayerConfig, ...]:
    num_layers = text.integer("num_hidden_layers", 26)
    kinds = text.layer_types(num_layers, _KINDS)
    if kinds is None:
        period = text.integer("sliding_window_pattern", _FULL_EVERY)
        if text.integer("_sliding_window_pattern", period) != period:
            raise text.refuse("_sliding_window_pattern", "transformers reads sliding_window_pattern; write that")
        kinds = tuple(_KINDS[(layer + 1) % period != 0] for layer in range(num_layers))
    ropes = {kind: _rope(text, kind) for kind in _KINDS}
    # transformers masks 0 <= q - k < sliding_window for Gemma 3: the query itself is counted already.
    windows: dict[str, int | None] = {"full_attention": None}
    if "sliding_attention" in kinds:
        windows["sliding_attention"] = text.integer("sliding_window", 4096)
    layer_of = {kind: LayerConfig(kind, windows[kind], *ropes[kind]) for kind in windows}
    return tuple(layer_of[kind] for kind in kinds)


def _rope(text: ConfigJson, kind: str) -> tuple[float, float]:
    """(theta, position divisor) of the layers of `kind`. The old scaling keys speak of full layers only, and the new
    ones give way to them, as in transformers."""
    nested = ConfigJson(text.fields.optional_object("rope_parameters"))
    others = sorted(set(nested.fields) - set(_KINDS))
    if others:
        raise text.refuse(
            "rope_parameters",
            "rope_parameters must be given per layer type for Gemma 3, as {'full_attention': {...}, ...}",
        )
    parameters = nested.fields.optional_object(kind)
    if kind == "full_attention" and text.fields.has_value("rope_scaling"):
        parameters = parameters.overlaid(text.fields.object("rope_scaling"))
    rope = read_rope(ConfigJson(parameters))
    # Read even where it is not used, so that a value out of range is never passed over.
    old_theta = text.number("rope_theta" if kind == "full_attention" else "rope_local_base_freq", _ROPE_THETA[kind])
    return rope.theta or old_theta, rope.factor


def config_from_gguf(config: ConfigGguf, tensor_names: Collection[str]) -> ModelConfig:
    """Raises ModelLoadError: metadata that is missing or unusable, or a variant that is not built."""
    num_layers = config.integer("block_count")
    hidden_size, num_heads = config.integer("embedding_length"), config.integer("attention.head_count")
    head_dim = config.integer("attention.key_length")
    for key in ("attention.value_length", "rope.dimension_count"):
        if config.integer(key, head_dim) != head_dim:
            raise config.refuse(key, f"Gemma 3 is built with heads of one length, all of it rotated: {head_dim}")
    # GGUF does not store query_pre_attn_scalar. It is head_dim, except hidden_size / num_heads in the 27B model
    # (google/gemma-3-27b: 168 with head_dim 128).
    query_scalar = hidden_size // num_heads if num_layers == _LAYERS_OF_27B else head_dim
    return _checked(
        ModelConfig(
            architecture="gemma3",
            vocab_size=config.vocab_size(),
            hidden_size=hidden_size,
            intermediate_size=config.integer("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=config.integer("attention.head_count_kv"),
            head_dim=head_dim,
            rms_norm_eps=config.number("attention.layer_norm_rms_epsilon"),
            max_position_embeddings=config.integer("context_length"),
            query_scale=query_scalar**-0.5,
            layers=_gguf_layers(config, num_layers),
            tie_word_embeddings="output.weight" not in tensor_names,
            # llama.cpp, whose format this is, applies no cap to the attention of Gemma 3 and takes 0 as "no cap".
            final_logit_softcap=config.number_or_off("final_logit_softcapping"),
            bos_token_id=config.bos_token_id(),
            eos_token_ids=config.end_token_ids(),
            dtype=config.dtype(),
        ),
        config.place,
    )


def _gguf_layers(config: ConfigGguf, num_layers: int) -> tuple[LayerConfig, ...]:
    # llama.cpp scales the full layers of Gemma 3 alone.
    local_theta = config.number("rope.freq_base_swa", _ROPE_THETA["sliding_attention"])
    sliding = LayerConfig("sliding_attention", config.integer("attention.sliding_window"), local_theta)
    full = LayerConfig("full_attention", None, config.number("rope.freq_base"), config.rope_factor())
    slides = config.sliding_pattern(num_layers, _FULL_EVERY)  # files seldom state it
    return tuple(sliding if each else full for each in slides)


def _checked(config: ModelConfig, place: str) -> ModelConfig:
    """`config`, once its parts are known to fit each other."""
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"{place}: {config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads evenly; "
            "one must divide the other"
        )
    if config.head_dim % 2:
        raise ModelLoadError(f"{place}: head_dim={config.head_dim}: rotary embeddings turn pairs; it must be even")
    for name, token_ids in (("bos_token_id", (config.bos_token_id,)), ("eos_token_id", config.eos_token_ids)):
        for token_id in token_ids:
            if token_id is not None and token_id >= config.vocab_size:
                raise ModelLoadError(
                    f"{place}: {name}={token_id}, but the vocabulary has {config.vocab_size} tokens; give a smaller id"
                )
    return config
