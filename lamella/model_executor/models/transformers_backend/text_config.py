"""A model's config as transformers reads it, with the installed classes alone."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config_ranges import POSITIONS, VOCABULARY
from lamella.model_executor.models.transformers_backend.gguf_config_copy import write_config_copy
from lamella.model_executor.models.typed_fields import is_integer, shown
from lamella.model_executor.weights.gguf_header import GgufHeader

logger = logging.getLogger(__name__)

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """What the engine needs to know of a model that transformers runs; the fields are those of ModelConfig.

    architecture: transformers' model_type. dtype: the checkpoint's own. short_text_tokens: None, as no text takes
    another rotary embedding than others.
    """

    architecture: str
    vocab_size: int
    num_layers: int
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    short_text_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RunBy:
    """What runs a model. config: the PreTrainedConfig that `model_class` is built from; text_config: the part of it
    that describes the decoder, and the same object where the decoder alone is built."""

    model_class: Any
    config: Any
    text_config: Any

    @property
    def is_text_alone(self) -> bool:
        return self.config is self.text_config


def read_configs(folder: Path, header: GgufHeader | None = None) -> tuple[Any, Any]:
    """The config of the model in `folder`, or of the GGUF file that `header` is of, as transformers reads it, and the
    part of it that describes the decoder (the same object, of a text model).

    Raises ModelLoadError: transformers does not know the model, or refuses a field.
    """
    from transformers import AutoConfig

    # False and not None: what transformers would ask on the terminal is whether to run code of the folder.
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    place = folder / "config.json" if header is None else header.path
    try:
        if header is None:
            config = AutoConfig.from_pretrained(folder, **options)
        else:
            with tempfile.TemporaryDirectory() as copies:
                copy = write_config_copy(header, Path(copies))
                config = AutoConfig.from_pretrained(copies, gguf_file=copy.name, **options)
            config.name_or_path = str(folder)
        text: Any = config.get_text_config(decoder=True)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{place}: transformers cannot read it: {_text(error)}") from error
    return config, text


def class_for(config: Any, text_config: Any) -> RunBy:
    """The installed class that runs a model: of a multimodal one that of the decoder alone, where there is one.

    Raises ModelLoadError where transformers has none that generates text.
    """
    classes, described = _classes_of(config, text_config)
    return RunBy(classes[type(described)], described, text_config)


def refuse_without_class(config: Any, text_config: Any) -> None:
    """`class_for`'s error, without importing what it would return."""
    _classes_of(config, text_config)


def _classes_of(config: Any, text_config: Any) -> tuple[Any, Any]:
    """transformers' table of classes, and the config, of the two, that is in it."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    for classes, described in (
        (MODEL_FOR_CAUSAL_LM_MAPPING, text_config),
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, config),
    ):
        if type(described) in classes:
            return classes, described
    raise ModelLoadError(
        f"transformers has no class of model_type {shown(text_config.model_type)} that generates text from tokens"
    )


def served_config(config: Any, place: object, end_token_ids: tuple[int, ...] | None) -> TransformersConfig:
    """end_token_ids: generation_config.json's, which win; None where it has none."""
    end_ids = end_token_ids
    if end_ids is None:
        given = getattr(config, "eos_token_id", None)
        end_ids = () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (given,)
    length = getattr(config, "max_position_embeddings", None)
    for name, value, (low, high) in (
        ("vocab_size", config.vocab_size, VOCABULARY),
        ("max_position_embeddings", length, POSITIONS),
    ):
        if not is_integer(value) or not low <= value <= high:
            raise ModelLoadError(f"{place}: {name}={shown(value)}: must be a whole number from {low} to {high}")
    # Ids that no token has come from defaults of config classes; nothing can end with them.
    end_ids = tuple(each for each in end_ids if is_integer(each) and 0 <= each < config.vocab_size)
    assert isinstance(length, int)
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return TransformersConfig(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        max_position_embeddings=_longest(config, length),
        bos_token_id=config.bos_token_id if is_integer(getattr(config, "bos_token_id", None)) else None,
        eos_token_ids=tuple(dict.fromkeys(end_ids)),
        dtype=dtype if dtype in DTYPES else "float32",
    )


def _longest(config: Any, length: int) -> int:
    """Positions that the model is served up to: all of `length`, but where a text longer than another number turns
    every position of a step by other angles (LongRoPE). In a batch it would turn its neighbours', and keys that are
    cached were turned by the old ones."""
    parameters = getattr(config, "rope_parameters", None) or {}
    of_kinds = [parameters] if "rope_type" in parameters else list(parameters.values())
    limits = [
        each["original_max_position_embeddings"]
        for each in of_kinds
        if isinstance(each, dict) and each.get("rope_type") == "longrope"
    ]
    shortest = min([length, *limits])
    if shortest < length:
        logger.warning(
            "texts end at %d of %d positions: beyond, longrope gives all tokens of a step other embeddings, which "
            "transformers' code cannot do for one text of a batch",
            shortest,
            length,
        )
    return shortest


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
