"""A model that transformers runs, from its files to a `TransformersModel`; what cannot be run is refused before weights
are read.

The order: config, layers by the config, a copy of the model on the meta device that records two tokens' attention
calls, their comparison; then the weights, and the same record and comparison on the model itself, where masks and sinks
have values, and the test that tokens are mixed by attention alone.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lamella.errors import ModelLoadError
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.models.transformers_backend.agreement import agreed_specs
from lamella.model_executor.models.transformers_backend.attention_call import UnsupportedCallError
from lamella.model_executor.models.transformers_backend.attention_interface import RECORDED_ATTENTION, register
from lamella.model_executor.models.transformers_backend.declared_layers import (
    DeclaredLayer,
    declared_layers,
    declared_owners,
)
from lamella.model_executor.models.transformers_backend.declared_passes import refuse_other_passes
from lamella.model_executor.models.transformers_backend.gguf_weights import refuse_other_reading, refuse_unread_metadata
from lamella.model_executor.models.transformers_backend.model_weights import load_model
from lamella.model_executor.models.transformers_backend.quantized_weights import prepare_quantization
from lamella.model_executor.models.transformers_backend.recorder import RecordedLayer, record_layers
from lamella.model_executor.models.transformers_backend.text_config import (
    RunBy,
    TransformersConfig,
    class_for,
    read_configs,
    refuse_without_class,
    served_config,
)
from lamella.model_executor.models.transformers_backend.text_model import TransformersModel
from lamella.model_executor.models.transformers_backend.token_mixing import refuse_mixing
from lamella.model_executor.models.typed_json import read_json_object
from lamella.model_executor.weights.gguf_split import read_gguf_model
from lamella.model_executor.weights.model_source import ModelSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A model that is known to run, as far as can be told without weights."""

    source: ModelSource
    config: TransformersConfig
    run_by: RunBy
    declared: Sequence[DeclaredLayer]


def check_model(source: ModelSource, end_token_ids: tuple[int, ...] | None) -> CheckedModel:
    """Read the config and record the model without weights. end_token_ids: generation_config.json's.

    Raises ModelLoadError with the reason why the model is not run.
    """
    gguf = source.gguf_path
    place = gguf or source.folder / "config.json"
    header = None if gguf is None else read_gguf_model(gguf)
    name = "the model"
    try:
        if header is None:  # what the file alone tells comes first: some classes of configs take seconds to import
            fields = read_json_object(place)
            name = fields.raw("model_type") or name
            refuse_other_passes(fields.raw, fields.raw)
    except ModelLoadError as error:
        raise _not_run(place, name, error) from error
    config, text_config = read_configs(source.folder, header)
    name = text_config.model_type
    if header is not None:
        refuse_unread_metadata(header, text_config)
    try:
        refuse_without_class(config, text_config)
        refuse_other_passes(partial(_field, config), partial(_field, text_config))
        prepare_quantization(config, text_config)
        declared = declared_layers(text_config)
        run_by = class_for(config, text_config)  # imports the model's code, so it comes after what is quicker
        name = run_by.model_class.__name__
        recorded = _record_without_weights(run_by)
        if recorded is not None:
            agreed_specs(text_config, declared, recorded, itemsize_bytes=torch.float32.itemsize)
            if header is not None:
                refuse_other_reading(header, text_config, recorded)
    except ModelLoadError as error:
        raise _not_run(place, name, error) from error
    return CheckedModel(source, served_config(text_config, place, end_token_ids), run_by, declared)


def recorded_specs(run_by: RunBy) -> tuple[Sequence[RecordedLayer] | None, Mapping[int, int]]:
    """The layers of a model without weights, and layer -> the layer whose KV it reads; for tables of models. None for
    layers that cannot be recorded without weights.

    Raises ModelLoadError with the reason why it is not run.
    """
    declared = declared_layers(run_by.text_config)
    recorded = _record_without_weights(run_by)
    if recorded is None:
        return None, declared_owners(run_by.text_config, declared)
    _, owners = agreed_specs(run_by.text_config, declared, recorded, itemsize_bytes=2)
    return recorded, owners


def load_checked(
    checked: CheckedModel, dtype: torch.dtype, device: torch.device, *, itemsize_bytes: int
) -> tuple[TransformersModel, list[KVCacheSpec], Mapping[int, int]]:
    """The model with its weights, its layers' specs for KV of `itemsize_bytes`, and layer -> the layer whose KV it
    reads.

    Raises ModelLoadError: weights that do not fit, and what shows only where there are numbers.
    """
    run_by, name = checked.run_by, checked.run_by.model_class.__name__
    model = load_model(checked.source, run_by, _for_recording(run_by), dtype).to(device)
    if dtype == torch.float32 != getattr(torch, checked.config.dtype):
        logger.info("%s: stored in %s, computed in float32", checked.source.name, checked.config.dtype)
    try:
        recorded = record_layers(model, device)
        specs, owners = agreed_specs(run_by.text_config, checked.declared, recorded, itemsize_bytes=itemsize_bytes)
        refuse_mixing(model, checked.config.vocab_size, device)
        runnable = TransformersModel(model, recorded, checked.config.max_position_embeddings)
    except ModelLoadError as error:
        raise _not_run(checked.source.name, name, error) from error
    logger.info(
        "%s runs by transformers' %s on lamella's attention%s",
        checked.source.name,
        name,
        "" if runnable.prunes else "; its layers compute every token of a step",
    )
    return runnable, specs, owners


def _field(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def _not_run(place: object, name: str, reason: ModelLoadError) -> ModelLoadError:
    return ModelLoadError(f"{place}: {name} is not run by transformers' backend: {reason}")


def _for_recording(run_by: RunBy) -> Any:
    register()
    config = copy.deepcopy(run_by.config)
    config._attn_implementation = RECORDED_ATTENTION
    return config


def _record_without_weights(run_by: RunBy) -> list[RecordedLayer] | None:
    """None: what the model does depends on numbers, so that it can be recorded only with its weights."""
    config = _for_recording(run_by)
    # One product per token: what other ways to run experts do depends on numbers, and there are none.
    config._experts_implementation = "batched_mm"
    device = torch.device("meta")
    try:
        with device:
            model = run_by.model_class._from_config(config).eval()
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (RECORDED_ATTENTION,):
            raise UnsupportedCallError("its attention does not go through transformers' attention interface") from error
        if device.type in str(error) and isinstance(error, (NotImplementedError, RuntimeError)):
            return None
        text = " ".join(str(error).split())
        raise ModelLoadError(f"transformers cannot build it: {type(error).__name__}: {text}") from error
    try:
        return record_layers(model, device)
    except ModelLoadError as error:
        if isinstance(error.__cause__, (NotImplementedError, RuntimeError)) and "meta" in str(error.__cause__):
            return None
        raise
