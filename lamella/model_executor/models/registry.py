"""Which family of models a file is of, by the names that the file gives."""

from __future__ import annotations

from lamella.errors import ModelLoadError
from lamella.model_executor.models.afmoe import AFMOE
from lamella.model_executor.models.cohere2 import COHERE2
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.config_gguf import ARCHITECTURE_KEY, ConfigGguf
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.cwm import CWM
from lamella.model_executor.models.exaone4 import EXAONE4
from lamella.model_executor.models.family import Family
from lamella.model_executor.models.gemma2 import GEMMA2, VAULTGEMMA
from lamella.model_executor.models.gemma3 import GEMMA3
from lamella.model_executor.models.gemma4 import GEMMA4
from lamella.model_executor.models.gpt_oss import GPT_OSS
from lamella.model_executor.models.granite import GRANITE
from lamella.model_executor.models.granite_moe import GRANITE_MOE
from lamella.model_executor.models.granite_swa import GRANITE_SWA
from lamella.model_executor.models.laguna import LAGUNA
from lamella.model_executor.models.llama import LLAMA
from lamella.model_executor.models.llama4 import LLAMA4
from lamella.model_executor.models.mimo_v2 import MIMO_V2_FLASH
from lamella.model_executor.models.ministral import MINISTRAL, MINISTRAL3
from lamella.model_executor.models.mistral import MISTRAL
from lamella.model_executor.models.mixtral import MIXTRAL
from lamella.model_executor.models.olmo3 import OLMO2, OLMO3
from lamella.model_executor.models.phi3 import PHI3
from lamella.model_executor.models.phimoe import PHIMOE
from lamella.model_executor.models.qwen2 import QWEN2
from lamella.model_executor.models.qwen3 import QWEN3
from lamella.model_executor.models.qwen_moe import QWEN2_MOE, QWEN3_MOE
from lamella.model_executor.models.smollm3 import SMOLLM3
from lamella.model_executor.models.starcoder2 import STARCODER2
from lamella.model_executor.models.step3p5 import STEP3P5
from lamella.model_executor.models.typed_fields import TypedFields, shown
from lamella.model_executor.models.weight_map import WeightMap
from lamella.model_executor.weights.gguf_header import GgufHeader

FAMILIES: tuple[Family, ...] = (
    GEMMA3,
    LLAMA,
    MISTRAL,
    QWEN2,
    COHERE2,
    CWM,
    EXAONE4,
    GEMMA2,
    GEMMA4,
    GRANITE,
    GRANITE_SWA,
    GRANITE_MOE,
    MINISTRAL,
    MINISTRAL3,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN3,
    SMOLLM3,
    STARCODER2,
    VAULTGEMMA,
    GPT_OSS,
    LLAMA4,
    MIMO_V2_FLASH,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    AFMOE,
    LAGUNA,
    PHIMOE,
    STEP3P5,
)

# Architectures of GGUF files that are not read, although models of theirs are served from other files.
_NOT_BUILT = {
    "gemma3n": "its AltUp streams run by transformers' code alone, which does not read such files; use a Hugging Face "
    "folder of the model",
}


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
    """Whether a family is there for a GGUF file's architecture, or the reason why there is none."""
    name = header.fields().string(ARCHITECTURE_KEY)
    return name in _NOT_BUILT or any(
        family.gguf_architecture == name and family.config_from_gguf is not None for family in FAMILIES
    )


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
                _require_one_model(config, [family])
                return family.config_from_json(config, config, end_token_ids)
        wrapped = [family for family in FAMILIES if name in family.multimodal_architectures]
        if wrapped:
            _require_one_model(config, wrapped)
            if not fields.has_value("text_config"):
                raise ModelLoadError(
                    f"{fields.place} is for {name} but has no text_config, which describes the text model"
                )
            text = config.object("text_config")
            return _of_text(wrapped, text).config_from_json(config, text, end_token_ids)
    raise ModelLoadError(
        f"{fields.place}: architecture {names[0] if names else '(none named)'} is not known; "
        f"known: {known_architectures()}"
    )


def _require_one_model(config: ConfigJson, families: list[Family]) -> None:
    """Raise ModelLoadError where `architectures` names one of these, and `model_type`, by which transformers goes, is
    not theirs: what such a file describes is a guess."""
    model_type = config.fields.optional_string("model_type")
    known = {name for family in families for name in (*family.architectures, *family.multimodal_architectures)}
    if model_type is not None and model_type not in known:
        raise ModelLoadError(
            f"{config.fields.place}: model_type={shown(model_type)} is no model of architectures="
            f"{list(config.names()[:-1])}; they must name the same one"
        )


def _of_text(families: list[Family], text: ConfigJson) -> Family:
    """The one that the text model's own names belong to, where several are found in the same wrapper."""
    if len(families) == 1:
        return families[0]
    names = text.names()
    for family in families:
        if any(name in family.architectures for name in names):
            return family
    known = ", ".join(family.name for family in families)
    raise ModelLoadError(
        f"{text.fields.place}: {text.fields.prefix}model_type says {', '.join(map(shown, names)) or 'nothing'}; text "
        f"models of such files are {known}"
    )


def parse_gguf_config(header: GgufHeader) -> ModelConfig:
    """The ModelConfig of `header`. Raises ModelLoadError: unknown architecture, missing or unusable keys."""
    name = header.fields().string(ARCHITECTURE_KEY)
    family = next((family for family in FAMILIES if family.gguf_architecture == name), None)
    if name in _NOT_BUILT:
        raise ModelLoadError(f"{header.path}: architecture {shown(name)} is not built: {_NOT_BUILT[name]}")
    if family is None or family.config_from_gguf is None:
        known = ", ".join(family.gguf_architecture for family in FAMILIES if family.gguf_architecture)
        raise ModelLoadError(f"{header.path}: architecture {shown(name)} is not known; known: {known}")
    config = ConfigGguf(header)
    model_config = family.config_from_gguf(config, header.tensors)
    config.refuse_unread()
    return model_config
