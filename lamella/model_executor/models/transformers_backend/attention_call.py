"""What a call of transformers' attention interface says, by an allow-list: whatever else it asks for is refused.

transformers hands each layer's query, key and value to a function, and in keywords what this layer's attention needs.
A keyword that is passed over changes results without a sign, so only those with a meaning here are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import finite_float, is_integer

# Attention does not depend on these: positions have been embedded already, and the others say what is to be returned.
_WITHOUT_EFFECT = frozenset(
    ("position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict")
)
_HONOURED = frozenset(("scaling", "softcap", "sliding_window", "s_aux", "dropout", "is_causal"))
# What else transformers' models are known to ask for, for a message that says more than the keyword's name.
_MECHANISMS = {
    "position_bias": "a bias added to the scores by relative position",
    "alibi": "a bias added to the scores by distance (ALiBi)",
    "indices": "attention to keys that an indexer has chosen",
    "block_indices": "attention to blocks that an indexer has chosen",
    "sinks": "learned keys and values beside those of tokens",
}


class UnsupportedCallError(ModelLoadError):
    """An attention call asks for what is not built."""


@dataclass(frozen=True, slots=True)
class CallSettings:
    """scale multiplies q.k; softcap c turns a score s into c * tanh(s / c); window_tokens: keys visible including the
    query itself, None where the call does not say; sinks [num_heads]: logits that join the softmax's denominator."""

    scale: float
    softcap: float | None
    window_tokens: int | None
    sinks: torch.Tensor | None


def read_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keywords: Mapping[str, Any],
    *,
    has_own_kv: bool = True,
) -> CallSettings:
    """What the call says; query [1, num_heads, T, k_dim], key and value [1, num_kv_heads, T, dim]. has_own_kv: False
    for a layer that reads another's, which may have been made of more tokens.

    Raises UnsupportedCallError for a keyword that is not known, a value that it cannot have, attention that is not
    causal, and tensors of other shapes.
    """
    for name, given in keywords.items():
        if given is not None and name not in _HONOURED and name not in _WITHOUT_EFFECT:
            what = f" ({_MECHANISMS[name]})" if name in _MECHANISMS else ""
            raise UnsupportedCallError(f"its attention takes {name}{what}, which is not built")
    if getattr(module, "is_causal", True) is False or keywords.get("is_causal") not in (None, True):
        raise UnsupportedCallError("its attention is not causal: tokens see later ones, which a KV cache cannot give")
    if keywords.get("dropout") not in (None, 0, 0.0):
        raise UnsupportedCallError(f"its attention has dropout={keywords['dropout']!r}, which belongs to training")
    _check_shapes(query, key, value, has_own_kv)
    scale = keywords.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else finite_float(scale)
    if scale is None:
        raise UnsupportedCallError(f"its attention has scaling={keywords['scaling']!r}; a number is built")
    return CallSettings(
        scale, _softcap(keywords.get("softcap")), _window(keywords.get("sliding_window")), _sinks(keywords, query)
    )


def _check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, has_own_kv: bool) -> None:
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    if any(len(shape) != 4 or shape[0] != 1 for shape in shapes) or shapes[1][:3] != shapes[2][:3]:
        raise UnsupportedCallError(f"its attention gets tensors of shapes {shapes}; [1, heads, tokens, dim] is built")
    if has_own_kv and shapes[1][2] != shapes[0][2]:
        raise UnsupportedCallError(
            f"its attention gets {shapes[1][2]} keys for {shapes[0][2]} tokens: it keeps keys beside those of tokens, "
            "which is not built"
        )
    if shapes[1][3] != shapes[0][3] or shapes[0][1] % shapes[1][1]:
        raise UnsupportedCallError(f"its attention gets a query of shape {shapes[0]} and a key of {shapes[1]}")


def _softcap(value: Any) -> float | None:
    if value is None:
        return None
    softcap = finite_float(value)
    if softcap is None or softcap <= 0:
        raise UnsupportedCallError(f"its attention has softcap={value!r}; a positive number is built")
    return softcap


def _window(value: Any) -> int | None:
    if value is None:
        return None
    if not is_integer(value) or value < 1:
        raise UnsupportedCallError(f"its attention has sliding_window={value!r}; a positive whole number is built")
    return value


def _sinks(keywords: Mapping[str, Any], query: torch.Tensor) -> torch.Tensor | None:
    sinks = keywords.get("s_aux")
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor) or sinks.numel() != query.shape[1]:
        raise UnsupportedCallError("its attention has s_aux of another shape than one logit for each of its heads")
    return sinks
