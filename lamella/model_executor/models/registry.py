"""Which family of models a file is of, by the names that the file gives."""

from __future__ import annotations

from lamella.errors import ModelLoadError
from lamella.model_executor.models import gemma3_config
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_gguf import ARCHITECTURE_KEY, ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.typed_fields import TypedFields, shown
from lamella.model_executor.weights.gguf_header import GgufHeader

KNOWN_ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration (its text model)")
KNOWN_GGUF_ARCHITECTURES = (gemma3_config.GGUF_NAME,)


def parse_config(fields: TypedFields, end_token_ids: tuple[int, ...] | None = None) -> ModelConfig:
    """The ModelConfig of a config.json, read as transformers reads it. end_token_ids: generation_config.json's, which
    win; None where it has none.

    Raises ModelLoadError for a field out of its range, and for an architecture, or a variant of it, that is not built.
    """
    config = ConfigJson(fields)
    names = config.names()
    for name in names:
        family = _family(name)
        if family == "multimodal":
            if not fields.has_value("text_config"):
                raise ModelLoadError(
                    f"{fields.place} is for {name} but has no text_config, which describes the text model"
                )
            return gemma3_config.config_from_json(config, config.object("text_config"), end_token_ids)
        if family == "text":
            return gemma3_config.config_from_json(config, config, end_token_ids)
    raise ModelLoadError(
        f"{fields.place}: architecture {names[0] if names else '(none named)'} is not known; "
        f"known: {', '.join(KNOWN_ARCHITECTURES)}"
    )


def parse_gguf_config(header: GgufHeader) -> ModelConfig:
    """The ModelConfig of `header`. Raises ModelLoadError: unknown architecture, missing or unusable keys."""
    name = header.fields().string(ARCHITECTURE_KEY)
    if name not in KNOWN_GGUF_ARCHITECTURES:
        raise ModelLoadError(
            f"{header.path}: architecture {shown(name)} is not known; known: {', '.join(KNOWN_GGUF_ARCHITECTURES)}"
        )
    config = ConfigGguf(header)
    model_config = gemma3_config.config_from_gguf(config, header.tensors)
    config.refuse_unread()
    return model_config


def _family(name: str) -> str | None:
    if name in gemma3_config.TEXT_NAMES:
        return "text"
    return "multimodal" if name in gemma3_config.MULTIMODAL_NAMES else None
