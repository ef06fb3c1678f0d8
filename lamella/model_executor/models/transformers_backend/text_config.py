"""A model's config as transformers reads it, with the installed classes alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import is_integer, shown

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """What the engine needs to know of a model that transformers runs; the fields are those of ModelConfig.

    architecture: transformers' model_type. dtype: the checkpoint's own.
    """

    architecture: str
    vocab_size: int
    num_layers: int
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"


def read_text_config(folder: Path, gguf_file: str | None = None) -> Any:
    """The PreTrainedConfig of the text model in `folder` (of a multimodal model: its decoder), or of its GGUF file.

    Raises ModelLoadError: transformers does not know the model or refuses a field.
    """
    from transformers import AutoConfig

    place = folder / (gguf_file or "config.json")
    try:
        # False and not None: what transformers would ask on the terminal is whether to run code of the folder.
        config = AutoConfig.from_pretrained(folder, gguf_file=gguf_file, trust_remote_code=False, local_files_only=True)
        text: Any = config.get_text_config(decoder=True)
    except Exception as error:
        raise ModelLoadError(f"{place}: transformers cannot read it: {_text(error)}") from error
    return copy.deepcopy(text)


def causal_lm_class(config: Any, place: object) -> Any:
    """The installed class that runs `config`; ModelLoadError where transformers has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError as error:
        raise ModelLoadError(
            f"{place}: transformers has no causal language model of model_type {shown(config.model_type)}; models that "
            "generate text from tokens are run"
        ) from error


def served_config(config: Any, place: object, end_token_ids: tuple[int, ...] | None) -> TransformersConfig:
    """end_token_ids: generation_config.json's, which win; None where it has none."""
    end_ids = end_token_ids
    if end_ids is None:
        given = getattr(config, "eos_token_id", None)
        end_ids = () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (given,)
    length = getattr(config, "max_position_embeddings", None)
    for name, value in (("vocab_size", config.vocab_size), ("max_position_embeddings", length)):
        if not is_integer(value) or value < 1:
            raise ModelLoadError(f"{place}: {name}={shown(value)}: must be a positive number")
    for token_id in end_ids:
        if not is_integer(token_id) or not 0 <= token_id < config.vocab_size:
            raise ModelLoadError(f"{place}: eos_token_id={shown(token_id)}: must be below {config.vocab_size}")
    assert isinstance(length, int)
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return TransformersConfig(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        max_position_embeddings=length,
        bos_token_id=config.bos_token_id if is_integer(getattr(config, "bos_token_id", None)) else None,
        eos_token_ids=tuple(dict.fromkeys(end_ids)),
        dtype=dtype if dtype in DTYPES else "float32",
    )


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
