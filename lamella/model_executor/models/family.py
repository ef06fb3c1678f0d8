"""What a family of models is: how its config is read, and how its checkpoints name their tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.weight_map import WeightMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """architectures: of config.json's `architectures` and `model_type`, those whose whole file describes the text
    model; multimodal_architectures: those where `text_config` does.

    config_from_json(whole file, the part that describes the text model, generation_config.json's end tokens or None)
    and config_from_gguf(metadata, tensor names) raise ModelLoadError for a variant that is not built. The GGUF fields
    are None where files of the family come under another architecture's name.
    """

    name: str
    architectures: tuple[str, ...]
    multimodal_architectures: tuple[str, ...] = ()
    config_from_json: Callable[[ConfigJson, ConfigJson, tuple[int, ...] | None], ModelConfig]
    gguf_architecture: str | None = None
    config_from_gguf: Callable[[ConfigGguf, Collection[str]], ModelConfig] | None = None
    weights: WeightMap


def checked(config: ModelConfig, place: str) -> ModelConfig:
    """`config`, once its parts are known to fit each other. place: the file, for the ModelLoadError of those that do
    not."""
    for layer in config.layers:
        attention = layer.attention
        if attention.num_heads % attention.num_kv_heads:
            raise ModelLoadError(
                f"{place}: {attention.num_heads} attention heads cannot share {attention.num_kv_heads} key-value heads "
                "evenly; one must divide the other"
            )
        if attention.rotary is not None and attention.rotary.dim % 2:
            raise ModelLoadError(
                f"{place}: head_dim={attention.rotary.dim}: rotary embeddings turn pairs; it must be even"
            )
    for name, token_ids in (("bos_token_id", (config.bos_token_id,)), ("eos_token_id", config.eos_token_ids)):
        for token_id in token_ids:
            if token_id is not None and token_id >= config.vocab_size:
                raise ModelLoadError(
                    f"{place}: {name}={token_id}, but the vocabulary has {config.vocab_size} tokens; give a smaller id"
                )
    return config
