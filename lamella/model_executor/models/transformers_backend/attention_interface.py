"""lamella's place in transformers' attention interface: a function that hands each call to the model's own handler.

transformers knows attention functions by name and calls them with the module that asks. The handler is an attribute of
the modules, so that several models live side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

# handler(module, query, key, value, mask, keywords) -> [1, T, num_heads, v_dim]
Handler = Callable[
    [torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, Any, Mapping[str, Any]],
    torch.Tensor,
]
# Without masks, as the KV cache knows who sees whom.
ATTENTION = "lamella"
# With a description of the mask that the model would have had: for the recorder.
RECORDED_ATTENTION = "lamella_recorded"

_ATTRIBUTE = "lamella_handler"


class DescribedMask(torch.Tensor):
    """A mask that says itself which keys a query sees.

    visible(batch, head, query, key) takes int64 tensors and gives a bool tensor. What a model makes of the mask by
    slicing or adding is a plain tensor, and so tells the recorder that it is another mask.
    """

    visible: Callable[..., torch.Tensor]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def register() -> None:
    """Make the two functions known to transformers; again without effect."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (ATTENTION, RECORDED_ATTENTION):
        AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(RECORDED_ATTENTION, _described_mask)


def set_handler(model: torch.nn.Module, handler: Handler) -> None:
    for module in model.modules():
        setattr(module, _ATTRIBUTE, handler)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    return getattr(module, _ATTRIBUTE)(module, query, key, value, attention_mask, keywords), None


def _described_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], device: Any = None, **_: Any
) -> torch.Tensor:
    mask = torch.zeros((1, 1, int(q_length), int(kv_length)), dtype=torch.bool, device=device)
    described = mask.as_subclass(DescribedMask)
    described.visible = mask_function
    return described
