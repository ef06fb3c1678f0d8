"""Whether a checkpoint holds what a configuration claims, told from headers before anything is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.weights.checkpoint import Checkpoint
from lamella.model_executor.weights.conversion import plan_parameters
from lamella.model_executor.weights.parameters import Parameter

logger = logging.getLogger(__name__)

_HEAD, _EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"


def fitted_config(
    checkpoint: Checkpoint,
    config: ModelConfig,
    parameters_of: Callable[[ModelConfig], Sequence[Parameter]],
) -> ModelConfig:
    """`config`, with the output matrix tied to the embeddings exactly where the checkpoint's own does not differ.

    A stored head counts whatever the configuration says, as in transformers (`tie_weights` of modeling_utils.py); where
    it equals the embeddings, it is not kept twice.
    Raises ModelLoadError when a tensor is missing, of another shape, cannot be read, or has no place in the model.
    """
    head, embeddings = checkpoint.tensors.get(_HEAD), checkpoint.tensors.get(_EMBEDDINGS)
    if head is not None:
        is_readable = embeddings is not None and head.problem is None and embeddings.problem is None
        is_tied = is_readable and checkpoint.same_values(_HEAD, _EMBEDDINGS)
        if config.tie_word_embeddings and not is_tied:
            logger.warning(
                "tie_word_embeddings is true, but %s differs from the embeddings: it is used as it is stored",
                head.stored_name,
            )
        config = replace(config, tie_word_embeddings=is_tied)
    plan_parameters(checkpoint, config, parameters_of(config), torch.float32)
    if checkpoint.left_out:
        families = ", ".join(f"{family} ({count} tensors)" for family, count in checkpoint.left_out.items())
        logger.info("left out, for a text model does without: %s", families)
    return config
