"""A recorder: runs two tokens through a model and notes what every layer says when it calls attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.models.transformers_backend.attention_call import (
    CallSettings,
    UnsupportedCallError,
    read_call,
)
from lamella.model_executor.models.transformers_backend.attention_interface import DescribedMask, set_handler

NUM_TOKENS = 2


@dataclass(frozen=True, slots=True)
class RecordedLayer:
    """module_name: of the module that called. owner: the earlier layer whose K and V it handed over; None: its own.
    visible: which keys a query sees by the mask that the model made, as `DescribedMask.visible`; None: it made none."""

    module_name: str
    module: torch.nn.Module
    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    settings: CallSettings
    visible: Callable[..., torch.Tensor] | None
    owner: int | None


class Recorder:
    """An attention handler that records. Each token's output is its own value, so that nothing but attention can have
    mixed tokens in what comes after."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.layers: list[RecordedLayer] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._kv: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        keywords: Mapping[str, Any],
    ) -> torch.Tensor:
        index, name = len(self.layers), self._names[module]
        if any(layer.module is module for layer in self.layers):
            raise UnsupportedCallError(f"{name} attends twice in one pass, and a layer's KV is kept once")
        try:
            settings = read_call(module, query, key, value, keywords)
            if mask is not None and not isinstance(mask, DescribedMask):
                raise UnsupportedCallError(
                    "its attention takes a mask that is not the one of full, sliding or chunked attention"
                )
        except UnsupportedCallError as error:
            raise UnsupportedCallError(f"layer {index} ({name}): {error}") from error
        owner = next(
            (layer for layer, (k, v) in enumerate(self._kv) if k is key and v is value),
            None,
        )
        self._kv.append((key, value))
        self.layers.append(
            RecordedLayer(
                module_name=name,
                module=module,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                k_dim=key.shape[3],
                v_dim=value.shape[3],
                settings=settings,
                visible=None if mask is None else mask.visible,
                owner=owner,
            )
        )
        num_groups = query.shape[1] // key.shape[1]
        return value.repeat_interleave(num_groups, dim=1).transpose(1, 2).contiguous()


def record_layers(model: torch.nn.Module, device: torch.device) -> list[RecordedLayer]:
    """What each layer of `model`, built with RECORDED_ATTENTION, says. Nothing is computed where `device` is "meta".

    Raises UnsupportedCallError for a call that is not built, ModelLoadError where the model cannot run this way.
    """
    recorder = Recorder(model)
    set_handler(model, recorder)
    run_tokens(model, torch.zeros(NUM_TOKENS, dtype=torch.int64, device=device))
    return recorder.layers


def takes_logits_to_keep(model: torch.nn.Module) -> bool:
    """Whether the model can be told for which tokens its head is to be computed."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


@torch.no_grad()
def run_tokens(model: torch.nn.Module, token_ids: torch.Tensor, *, num_left: int | None = None) -> torch.Tensor:
    """Logits [S, vocab_size] of `token_ids` (int64 [T]), one prompt. num_left: S, where layers leave tokens out; None:
    T."""
    positions = torch.arange(len(token_ids), device=token_ids.device)
    # An all-ones mask keeps transformers from looking for several prompts in the positions.
    mask = torch.ones(1, len(token_ids), dtype=torch.int64, device=token_ids.device)
    # Given as a tensor, for some models take a number as leave to leave tokens out in the layers as well.
    kept = {"logits_to_keep": positions[:num_left]} if takes_logits_to_keep(model) else {}
    try:
        output = model(
            input_ids=token_ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False, **kept
        )
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"transformers cannot run it: {type(error).__name__}: {error}") from error
    logits: torch.Tensor = output.logits[0]
    return logits
