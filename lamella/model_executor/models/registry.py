"""Which family of models a file is of, by the names that the file gives."""

from __future__ import annotations

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_gguf import ARCHITECTURE_KEY, ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.gemma3 import GEMMA3
from lamella.model_executor.models.llama import LLAMA
from lamella.model_executor.models.mistral import MISTRAL
from lamella.model_executor.models.qwen2 import QWEN2
from lamella.model_executor.models.typed_fields import TypedFields, shown
from lamella.model_executor.models.weight_map import WeightMap
from lamella.model_executor.weights.gguf_header import GgufHeader

FAMILIES: tuple[Family, ...] = (GEMMA3, LLAMA, MISTRAL, QWEN2)


def known_architectures() -> str:
    """The names that config.json may give, as text for messages."""
    names = [family.architectures[0] for family in FAMILIES]
    names += [f"{name} (its text model)" for family in FAMILIES for name in family.multimodal_architectures[:1]]
    return ", ".join(names)


def weight_map(config: ModelConfig) -> WeightMap:
    """How checkpoints of the model spell its tensors."""
    return next(family.weights for family in FAMILIES if family.name == config.architecture)


def is_known(fields: TypedFields) -> bool:
    """Whether a family is there for what config.json calls its model."""
    known = {name for family in FAMILIES for name in (*family.architectures, *family.multimodal_architectures)}
    return any(name in known for name in ConfigJson(fields).names())


def is_known_gguf(header: GgufHeader) -> bool:
    """Whether a family is there for a GGUF file's architecture."""
    name = header.fields().string(ARCHITECTURE_KEY)
    return any(family.gguf_architecture == name and family.config_from_gguf is not None for family in FAMILIES)


def parse_config(fields: TypedFields, end_token_ids: tuple[int, ...] | None = None) -> ModelConfig:
    """The ModelConfig of a config.json, read as transformers reads it. end_token_ids: generation_config.json's, which
    win; None where it has none.

    Raises ModelLoadError for a field out of its range, and for an architecture, or a variant of it, that is not built.
    """
    config = ConfigJson(fields)
    names = config.names()
    for name in names:
        for family in FAMILIES:
            if name in family.architectures:
                return family.config_from_json(config, config, end_token_ids)
            if name in family.multimodal_architectures:
                if not fields.has_value("text_config"):
                    raise ModelLoadError(
                        f"{fields.place} is for {name} but has no text_config, which describes the text model"
                    )
                return family.config_from_json(config, config.object("text_config"), end_token_ids)
    raise ModelLoadError(
        f"{fields.place}: architecture {names[0] if names else '(none named)'} is not known; "
        f"known: {known_architectures()}"
    )


def parse_gguf_config(header: GgufHeader) -> ModelConfig:
    """The ModelConfig of `header`. Raises ModelLoadError: unknown architecture, missing or unusable keys."""
    name = header.fields().string(ARCHITECTURE_KEY)
    family = next((family for family in FAMILIES if family.gguf_architecture == name), None)
    if family is None or family.config_from_gguf is None:
        known = ", ".join(family.gguf_architecture for family in FAMILIES if family.gguf_architecture)
        raise ModelLoadError(f"{header.path}: architecture {shown(name)} is not known; known: {known}")
    config = ConfigGguf(header)
    model_config = family.config_from_gguf(config, header.tensors)
    config.refuse_unread()
    return model_config
