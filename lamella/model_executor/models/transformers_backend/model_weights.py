"""Weights for a transformers model, by transformers' own loading: its renamings, fusions and ties, from our files.

Only the files that `ModelSource` names are opened, and nothing but tensors is read from them: no hub is asked, and no
code of a model's folder is run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lamella.errors import ModelLoadError
from lamella.model_executor.models.transformers_backend.gguf_weights import gguf_state_dict
from lamella.model_executor.models.transformers_backend.text_config import RunBy
from lamella.model_executor.weights.gguf_split import read_gguf_model
from lamella.model_executor.weights.model_source import ModelSource
from lamella.model_executor.weights.safetensors_files import read_safetensors_header

logger = logging.getLogger(__name__)

# What a multimodal checkpoint writes before the names of its text model.
_HEADS = ("model.language_model.lm_head.", "language_model.lm_head.")
_WRAPPERS = ("model.language_model.model.", "model.language_model.", "language_model.model.", "model.text_model.")


def load_model(source: ModelSource, run_by: RunBy, config: Any, dtype: torch.dtype) -> Any:
    """A PreTrainedModel in evaluation mode on the CPU; random weights for a source of kind "dummy".

    Raises ModelLoadError: files that cannot be read, and weights that are missing, of another shape, or without a
    place.
    """
    model_class = run_by.model_class
    if source.kind == "dummy":
        return model_class._from_config(config, dtype=dtype).eval()
    if source.gguf_path is not None:
        tensors: Mapping[str, Any] = gguf_state_dict(read_gguf_model(source.gguf_path), model_class, config)
    else:
        tensors = _stored_tensors(source)
        if run_by.is_text_alone:
            tensors = _text_tensors(tensors)
    try:
        with _without_bars():
            model, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=dict(tensors),
                dtype=dtype,
                trust_remote_code=False,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelLoadError(f"{source.name}: transformers cannot load its weights: {text}") from error
    for what, advice in (
        ("missing_keys", "are not in its files"),
        ("mismatched_keys", "have another shape than the config says"),
        ("unexpected_keys", "have no place in the model"),
        ("error_msgs", "cannot be converted"),
    ):
        names = sorted(map(str, info.get(what) or ()))
        if names:
            raise ModelLoadError(
                f"{source.name}: {len(names)} of its weights {advice}: {', '.join(names[:5])}; the files and their "
                "config must be of one model"
            )
    model.eval()
    return model


@contextmanager
def _without_bars() -> Iterator[None]:
    """transformers draws a bar for every load, wanted or not."""
    from transformers.utils import logging as bars

    was_enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            bars.enable_progress_bar()


def _stored_tensors(source: ModelSource) -> dict[str, Any]:
    """Name -> tensor, read when it is asked for."""
    stored: dict[str, Any] = {}
    for path in source.paths:
        header = read_safetensors_header(path)  # says what is wrong with a file in words of its own
        try:
            file = safe_open(path, framework="pt")
            stored |= {name: file.get_slice(name) if header[name].shape else file.get_tensor(name) for name in header}
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: safetensors cannot open it: {error}") from error
    return stored


def _text_tensors(stored: dict[str, Any]) -> dict[str, Any]:
    """Those of a multimodal checkpoint's text model, by the text model's own names; all of another checkpoint."""
    if not any(name.startswith(_WRAPPERS) for name in stored):
        return stored
    text, left_out = {}, Counter[str]()
    for name, tensor in stored.items():
        wrapper = next((each for each in (*_HEADS, *_WRAPPERS) if name.startswith(each)), None)
        if wrapper is not None:
            text[("lm_head." if wrapper in _HEADS else "model.") + name.removeprefix(wrapper)] = tensor
        elif name.startswith("lm_head."):
            text[name] = tensor
        else:
            left_out[name.removeprefix("model.").split(".")[0]] += 1
    if left_out:
        parts = ", ".join(f"{part} ({count} tensors)" for part, count in left_out.items())
        logger.info("left out, for a text model does without: %s", parts)
    return text
