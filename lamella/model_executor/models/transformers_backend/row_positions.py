"""Whether a model's layers take a token's position from where they are told it, and not from its row in the batch.

Some layers count: the row, and the tokens that a cache says came before. In a batch of several texts' tokens that is
another number for each token. Such a model is handed a cache that holds nothing and says so for every token; where even
that is not enough, it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.models.transformers_backend.attention_interface import set_handler
from lamella.model_executor.models.transformers_backend.token_mixing import own_value

# A difference beyond rounding, in parts of the largest number. Scales by position differ by a few hundredths and more.
_TOLERANCE = 1e-3


def past_tokens(config: Any, before: torch.Tensor | int) -> Any:
    """A transformers cache of no K and V, before which so many tokens came: one number, or int64 [T], one per row."""
    from transformers.cache_utils import DynamicCache

    class PastTokens(DynamicCache):
        def get_seq_length(self, *_: Any, **__: Any) -> Any:
            return before

        def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Any:
            return key_states, value_states

    return PastTokens(config=config)


def rows_before(positions: torch.Tensor) -> torch.Tensor:
    """What each row must be told that came before it, so that counting gives `positions` (int64 [T])."""
    return positions - torch.arange(len(positions), device=positions.device)


@torch.no_grad()
def counts_rows(model: Any, longest: int, device: torch.device) -> bool:
    """Whether the model must be told `rows_before`. longest: positions that it is served up to. model: without masks;
    leaves another handler.

    Raises ModelLoadError where its queries, keys or values are those of other positions all the same.
    """
    config = model.config.get_text_config()
    positions = torch.tensor(sorted({0, min(5, longest - 1), longest // 2, longest - 1}), device=device)
    alone = [
        _projections(model, positions[row : row + 1], past_tokens(config, int(positions[row])))
        for row in range(len(positions))
    ]
    truth = [torch.cat(parts, dim=2) for parts in zip(*alone, strict=True)]
    if _are_close(truth, _projections(model, positions, None)):
        return False
    if _are_close(truth, _projections(model, positions, past_tokens(config, rows_before(positions)))):
        return True
    raise ModelLoadError(
        "its layers take a token's position from its row in the batch, which holds tokens of several texts"
    )


def _projections(model: Any, positions: torch.Tensor, cache: Any) -> list[torch.Tensor]:
    """Query, key and value of each layer, [1, heads, T, dim], of token 1 at `positions`, each by itself."""
    found: list[torch.Tensor] = []

    def collect(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        keywords: Mapping[str, Any],
    ) -> torch.Tensor:
        found.extend((query, key, value))
        return own_value(module, query, key, value, mask, keywords)

    set_handler(model, collect)
    token_ids = torch.ones_like(positions)
    try:
        model(input_ids=token_ids[None], position_ids=positions[None], cache=cache, use_cache=False)
    except Exception as error:
        text = " ".join(str(error).split())
        raise ModelLoadError(
            f"transformers cannot run it at given positions: {type(error).__name__}: {text}"
        ) from error
    return found


def _are_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        bool((first.float() - second.float()).abs().max() <= _TOLERANCE * first.float().abs().max())
        for first, second in zip(one, other, strict=True)
    )
