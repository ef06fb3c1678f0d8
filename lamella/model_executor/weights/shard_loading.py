"""The weights of one worker of several, from the files of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from lamella.errors import ConfigError
from lamella.model_executor.layers.description import Model
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.sharding import Worker
from lamella.model_executor.weights.conversion import ParameterPlan, Piece, parameter_dtype
from lamella.model_executor.weights.forms import RowForm, WeightForm, collect, formed_pieces, stored_tensors
from lamella.model_executor.weights.loading import load_weights
from lamella.model_executor.weights.model_source import ModelSource
from lamella.model_executor.weights.shards import cut_weights, parameter_shards


def load_shard(
    source: ModelSource,
    config: ModelConfig,
    worker: Worker,
    dtype: torch.dtype,
    *,
    form: WeightForm,
    cache_dir: Path | None = None,
) -> dict[str, torch.Tensor]:
    """What `Model(shard_config(config, worker), dtype).load` takes. config: of the whole model.

    The whole model is read in rows; where its file is large these are a map of the converted copy, which the workers of
    a machine share, and each part of it is held only while it is cut. Raises ConfigError for a form that is not made of
    rows of floats, and as `load_weights`.
    """
    if not isinstance(form, RowForm):
        raise ConfigError(f"weights in the form {form.name!r} cannot be cut for workers: their blocks span what is cut")
    whole = load_weights(source, Model(config, dtype), cache_dir=cache_dir)
    shards = parameter_shards(config, worker)

    def pieces() -> Iterator[Piece]:
        for shard in shards:
            plan = ParameterPlan(shard.name, shard.shape, parameter_dtype(shard.name, dtype), ())
            yield Piece(plan, 0, cut_weights(whole, [shard])[shard.name])

    return collect(formed_pieces(pieces(), form), stored_tensors({one.name: one.shape for one in shards}, dtype, form))
