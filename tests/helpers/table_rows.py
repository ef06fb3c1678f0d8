"""Folders for the rows of the table of architectures in docs/models.md, as transformers saves them.

A row that runs gets a small random model; one that does not, its config class's defaults, and a file of weights that
nobody comes to read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lamella.errors import ModelLoadError
from lamella.model_executor.models.transformers_backend.text_config import refuse_without_class
from lamella.planner.registry import Architecture, architectures
from tests.helpers.models_page import COMPLETED, is_native
from tests.helpers.tiny_gemma import save_tiny_tokenizer
from tests.helpers.transformers_models import RANDOM_MODELS, save_random_model

# Of MiMo-V2-Flash's heads a third is turned; a third of the other random models' heads is odd, which none has.
_CHANGES: dict[str, dict[str, Any]] = {"mimo_v2_flash": {"head_dim": 24}}


def runnable() -> list[tuple[str, str]]:
    """Row and way in, of all that run."""
    rows = []
    for each in architectures():
        rows += [(each.model_type, "native")] if is_native(each.model_type) else []
        rows += [(each.model_type, "transformers")] if each.refusal is None else []
    return rows


def refused() -> dict[str, Architecture]:
    return {
        each.model_type: each for each in architectures() if each.refusal is not None and not is_native(each.model_type)
    }


def save_runnable(folder: Path, model_type: str) -> Any:
    """Write a small random model of the row, alone or as another's text model, and return transformers' own."""
    saved_in = [name for name, model in RANDOM_MODELS.items() if _text_type(model) == model_type]
    name = model_type if model_type in RANDOM_MODELS else saved_in[0]
    return save_random_model(folder, name, **_CHANGES.get(model_type, {}))


def _text_type(model: Mapping[str, Any]) -> str | None:
    found: str | None = model.get("text_config", {}).get("model_type")
    return found


def save_refused(folder: Path, model_type: str) -> None:
    config = _default_config(model_type)
    config.save_pretrained(folder)
    save_file({"model.norm.weight": torch.ones(4)}, folder / "model.safetensors")
    save_tiny_tokenizer(folder)


def _default_config(model_type: str) -> Any:
    configs = _default_configs()
    assert model_type in configs, f"no config of transformers has model_type {model_type!r}"
    return configs[model_type]


@cache
def _default_configs() -> dict[str, Any]:
    """Text model's model_type -> its config at the defaults of its class, or the wrapper that transformers runs it in:
    those by which the registry knows it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: dict[str, Any] = {}
    runs: set[str] = set()
    for name in CONFIG_MAPPING:
        try:
            whole = CONFIG_MAPPING[name](**COMPLETED.get(name, {}))
            text = whole.get_text_config(decoder=True)
        except Exception:  # a class without defaults is not in the registry
            continue
        found.setdefault(text.model_type, whole)
        if text.model_type not in runs:
            with contextlib.suppress(ModelLoadError):
                refuse_without_class(whole, text)
                found[text.model_type] = whole
                runs.add(text.model_type)
    return found
