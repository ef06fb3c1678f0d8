"""Mistral text models (arXiv 2310.06825): Llama's shape with a sliding window in every layer. Their GGUF files say
"llama" and state no window."""

from __future__ import annotations

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.llama_shape import model_from_json, shape_from_json
from lamella.model_executor.models.weight_map import TEXT_PREFIXES, TOWERS, WeightMap

# What transformers 5.24's MistralConfig fills in.
MISTRAL_DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_WINDOW = 4096
# Vision models around a text model of this family or of Ministral 3, and how they name its tensors.
MISTRAL3_WRAPPER = ("Mistral3ForConditionalGeneration", "mistral3")
MISTRAL_WEIGHTS = WeightMap(prefixes=TEXT_PREFIXES, other_parts=TOWERS)


def config_from_json(config: ConfigJson, text: ConfigJson, end_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """A window that is null is none; one that is left out is 4,096, as transformers has it."""
    shape = shape_from_json(text, MISTRAL_DEFAULTS)
    # transformers masks 0 <= q - k < sliding_window: the query itself is counted already.
    window = text.optional_integer("sliding_window") if "sliding_window" in text else _WINDOW
    layers = (shape.layer(window),) * shape.num_layers
    return model_from_json(text, MISTRAL_DEFAULTS, end_token_ids, "mistral", shape, layers, whole=config)


MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM", "MistralModel", "mistral"),
    multimodal_architectures=MISTRAL3_WRAPPER,
    config_from_json=config_from_json,
    weights=MISTRAL_WEIGHTS,
)
