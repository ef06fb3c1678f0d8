"""Whether tokens affect each other in nothing but attention: what a model keeps elsewhere, no KV cache gives back.

A convolution over tokens or a recurrent state inside of a layer calls no attention function, so no recorder of calls
sees it. Here attention gives each token its own value; then another first token must leave the others' logits as they
are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.models.transformers_backend.attention_interface import set_handler
from lamella.model_executor.models.transformers_backend.recorder import run_tokens

# Rounding differs with how many rows a product has, as when experts are chosen otherwise.
_TOLERANCE = 1e-3


def own_value(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    keywords: Mapping[str, Any],
) -> torch.Tensor:
    """An attention handler by which each token sees itself alone: [1, T, num_heads, v_dim]."""
    num_tokens = query.shape[2]
    own = value[:, :, -num_tokens:].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return own.transpose(1, 2).contiguous()


def refuse_mixing(model: torch.nn.Module, vocab_size: int, device: torch.device) -> None:
    """Raises ModelLoadError where a token's logits depend on an earlier token without attention. Leaves `own_value` as
    the model's handler."""
    set_handler(model, own_value)
    token_ids = torch.tensor([1, 2, 3, 4, 5], device=device) % vocab_size
    other = token_ids.clone()
    other[0] = vocab_size - 1
    one, two = (run_tokens(model, each).float()[1:] for each in (token_ids, other))
    if not (one - two).abs().max() <= _TOLERANCE * one.abs().max():
        raise ModelLoadError(
            "tokens affect each other outside of attention, as by a convolution or a recurrent state; its state is not "
            "built"
        )
