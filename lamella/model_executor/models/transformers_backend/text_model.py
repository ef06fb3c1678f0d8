"""A transformers model as the runner sees it: flattened batches in, attention by lamella, logits where wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lamella.attention.contract import AttentionParams, attend
from lamella.errors import InvariantError
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.layers.adapters import RowAdapters
from lamella.model_executor.models.transformers_backend.attention_call import CallSettings, read_call
from lamella.model_executor.models.transformers_backend.attention_interface import ATTENTION, set_handler
from lamella.model_executor.models.transformers_backend.layer_pruning import LayerPruning, decoder_layers
from lamella.model_executor.models.transformers_backend.recorder import RecordedLayer, takes_logits_to_keep
from lamella.model_executor.models.transformers_backend.row_positions import counts_rows, past_tokens, rows_before
from lamella.model_executor.step_attention import StepAttention


class TransformersModel:
    """Plugs in where a `Stack` does. model: a PreTrainedModel with its weights; layers: as they were recorded on it;
    longest: positions that it is served up to. Raises ModelLoadError where layers make up positions of their own.

    A layer computes the tokens that it takes in, the head those that leave the last layer. prunes: whether the layers
    can be told so (`LayerPruning`); if not, the runner must have them compute all tokens.
    """

    def __init__(self, model: Any, layers: Sequence[RecordedLayer], longest: int) -> None:
        self.model = model
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._layers = layers
        self._index = {layer.module: index for index, layer in enumerate(layers)}
        self._step: StepAttention | None = None
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._keeps_logits = takes_logits_to_keep(model)
        modules = decoder_layers(model, list(layers))
        model.set_attn_implementation(ATTENTION)
        self._counts_rows = counts_rows(model, longest, self.device)
        # A layer that counts rows must have all of them.
        self._pruning = LayerPruning(model, modules) if modules and not self._counts_rows else None
        set_handler(model, self._attend)

    @property
    def prunes(self) -> bool:
        return self._pruning is not None and self._pruning.is_usable

    def attention_params(self, specs: list[KVCacheSpec]) -> list[AttentionParams]:
        """specs: what each layer sees (not how long its KV is kept)."""
        return [
            AttentionParams(
                spec=spec,
                num_heads=layer.num_heads,
                scale=layer.settings.scale,
                softcap=layer.settings.softcap,
                sinks=_flat(layer.settings.sinks),
            )
            for spec, layer in zip(specs, self._layers, strict=True)
        ]

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepAttention,
        is_long: torch.Tensor | None = None,
        adapters: RowAdapters | None = None,
    ) -> torch.Tensor:
        """token_ids, positions: int64 [T]. Returns float32 logits [S, vocab_size] of the tokens that leave the last
        layer, which `logits` hands on."""
        if is_long is not None:  # the config ends texts before
            raise InvariantError("transformers' layers have one rotary embedding for all texts of a step")
        if adapters is not None:  # the engine refuses them
            raise InvariantError("transformers' layers were given adapters, which they do not apply")
        if not len(token_ids):
            return torch.zeros(0, self._vocab_size, device=token_ids.device)
        last = len(self._layers)
        taken, rows = step.rows_between(0, last - 1), step.rows_between(last - 1, last)
        if rows is None:  # a tensor all the same, for some models take a number as leave to leave out tokens themselves
            rows = torch.arange(len(token_ids) if taken is None else len(taken), device=token_ids.device)
        kept: dict[str, Any] = {"logits_to_keep": rows} if self._keeps_logits else {}
        if self._counts_rows:
            kept["cache"] = past_tokens(self.model.config.get_text_config(), rows_before(positions))
        self._step = step
        if self._pruning is not None:
            self._pruning.begin(step, len(token_ids))
        try:
            output = self.model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **kept
            )
        finally:
            self._step = None
            if self._pruning is not None:
                self._pruning.end()
        logits: torch.Tensor = output.logits[0]
        if not self._keeps_logits:
            logits = logits[rows]
        return logits.float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `__call__` returned, or rows of it: the head has been applied."""
        return hidden

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        keywords: Mapping[str, Any],
    ) -> torch.Tensor:
        """One layer's attention: query [1, num_heads, T, k_dim] -> [1, T, num_heads, v_dim]."""
        step, layer = self._step, self._index.get(module)
        if step is None or layer is None:
            raise InvariantError("a transformers model was run outside of a step; run it through its engine")
        recorded = self._layers[layer]
        is_own = recorded.owner is None
        settings = read_call(module, query, key, value, keywords, has_own_kv=is_own)
        if mask is not None or not _same(settings, recorded.settings):
            raise InvariantError(
                f"layer {layer} ({recorded.module_name}) asks for {settings} in a step, and for {recorded.settings} "
                "when it was loaded"
            )
        metadata = step.taken(layer)
        if not metadata.num_tokens:  # the one token is there because no layer runs without any
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        place = step.place(layer, has_kv=is_own)
        out = attend(
            step.backend,
            place.params,
            place.cache,
            _token_major(query),
            _token_major(key) if is_own else None,
            _token_major(value) if is_own else None,
            metadata,
        )
        return out[None]


def _token_major(tensor: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, dim] -> [T, heads, dim], contiguous."""
    return tensor[0].transpose(0, 1).contiguous()


def _flat(sinks: torch.Tensor | None) -> torch.Tensor | None:
    return None if sinks is None else sinks.detach().float().flatten()


def _same(one: CallSettings, other: CallSettings) -> bool:
    numbers = (one.scale, one.softcap, one.window_tokens) == (other.scale, other.softcap, other.window_tokens)
    return numbers and (one.sinks is None) == (other.sinks is None)
