"""What every layer gets of a token beside the residual stream, where a model has such inputs (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import torch

from lamella.model_executor.layers.contract import Operators
from lamella.model_executor.layers.description import PerLayerInputs


def of_tokens(
    operators: Operators, inputs: PerLayerInputs, token_ids: torch.Tensor, x: torch.Tensor
) -> list[torch.Tensor]:
    """For each layer [T, width]: its part of a second table's row, scaled, and of a projection of the embeddings x
    [T, hidden_size], scaled and normed; their sum, divided by the root of 2."""
    width = inputs.config.width
    rows = operators.embed(inputs.embed_tokens, token_ids, width**0.5)
    projection = inputs.projection
    projected = operators.multiply(projection, x, slice(0, projection.num_out)) * projection.num_in**-0.5
    parts = projected.reshape(-1, width)  # [T * num_layers, width]
    summed = (operators.norm(parts, inputs.norm) + rows.reshape(-1, width)) * 2.0**-0.5
    by_layer = summed.view(len(x), -1, width).transpose(0, 1).contiguous()
    return list(by_layer)
