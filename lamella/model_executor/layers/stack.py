"""The loop over a model's layers: the only one there is, whatever the family and whoever runs the layers."""

from __future__ import annotations

import logging

import torch

from lamella.attention.contract import AttentionParams
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.layers import per_layer_inputs
from lamella.model_executor.layers.adapters import RowAdapters
from lamella.model_executor.layers.contract import HeadScores, LayerInputs, Operators
from lamella.model_executor.layers.description import Model
from lamella.model_executor.layers.rotary import RotaryEmbeddings, query_scales
from lamella.model_executor.step_attention import StepAttention

logger = logging.getLogger(__name__)


class Stack:
    """A loaded model with the operators that run its layers."""

    def __init__(self, model: Model, operators: Operators) -> None:
        operators.prepare(model)
        for reason, layers in _in_finer_parts(model, operators).items():
            logger.info("layers %s run in finer parts on %s: %s", layers, operators.name, reason)
        self.model = model
        self.operators = operators
        self.dtype = model.dtype
        self.device = model.device
        self._layer_rotaries = [layer.attention.config.rotary for layer in model.layers]
        self._query_scales = [layer.attention.config.query_scale for layer in model.layers]
        self._rotary_embeddings = RotaryEmbeddings(self._layer_rotaries, model.dtype, model.device)
        input_norms = [layer.input_norm for layer in model.layers]
        self._first_norm = input_norms[0]
        self._following = [*input_norms[1:], model.norm]

    def attention_params(self, specs: list[KVCacheSpec]) -> list[AttentionParams]:
        """specs: what each layer sees (not how long its KV is kept)."""
        attentions = [layer.attention for layer in self.model.layers]
        return [
            AttentionParams(
                spec=spec,
                num_heads=attention.config.num_heads,
                scale=attention.config.scale,
                softcap=attention.config.softcap,
                sinks=None if attention.sinks is None else attention.sinks.values,
            )
            for spec, attention in zip(specs, attentions, strict=True)
        ]

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepAttention,
        is_long: torch.Tensor | None = None,
        adapters: RowAdapters | None = None,
    ) -> torch.Tensor:
        """token_ids, positions: int64 [T]. Returns [S, hidden_size], of the tokens that leave the last layer. is_long:
        see RotaryEmbeddings.tables. adapters: of the T tokens."""
        model, operators = self.model, self.operators
        x = operators.embed(model.embed_tokens, token_ids, model.config.embedding_scale)
        inputs = self._layer_inputs(token_ids, positions, x, is_long, adapters)
        normed = x.clone() if self._first_norm is None else operators.norm(x, self._first_norm)
        first, num_layers = 0, len(model.layers)
        while first < num_layers:
            # Hand over at once the layers that all tokens leave, and with them the next one, which only some tokens
            # leave.
            last = first
            while last < num_layers - 1 and step.output_rows(last) is None:
                last += 1
            layers = model.layers[first : last + 1]
            x, normed = operators.run(step, layers, self._following[last], inputs[first : last + 1], x, normed)
            rows = step.output_rows(last)
            if rows is not None:
                inputs = _of_rows(inputs, rows)
            first = last + 1
        return normed

    def _layer_inputs(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        x: torch.Tensor,
        is_long: torch.Tensor | None,
        adapters: RowAdapters | None,
    ) -> list[LayerInputs]:
        tables = self._rotary_embeddings.tables(positions, is_long)
        scales = {
            config: None if config is None else query_scales(positions, config)
            for config in dict.fromkeys(self._query_scales)
        }
        per_layer: list[torch.Tensor | None] = [None] * len(self.model.layers)
        if self.model.per_layer_inputs is not None:
            per_layer[:] = per_layer_inputs.of_tokens(self.operators, self.model.per_layer_inputs, token_ids, x)
        return [
            LayerInputs(tables[rotary], scales[scale], own, adapters)
            for rotary, scale, own in zip(self._layer_rotaries, self._query_scales, per_layer, strict=True)
        ]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | HeadScores:
        """hidden [S, hidden_size] -> float32 [S, vocab_size] (may be a transposed view), or what computes only those
        that are asked for."""
        model = self.model
        bias = None if model.head_bias is None else model.head_bias.values
        return self.operators.head(model.head, hidden, model.config.final_logit_softcap, bias)


def _of_rows(inputs: list[LayerInputs], rows: torch.Tensor) -> list[LayerInputs]:
    """What each layer gets of the tokens `rows`; what layers share is taken once."""
    taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        for whole, part in taken:
            if whole is tensor:
                return part
        taken.append((tensor, tensor[rows]))
        return taken[-1][1]

    found = []
    for each in inputs:
        rotary = each.rotary
        turned = None if rotary is None else (of(rotary[0]), of(rotary[1]))
        adapters = None if each.adapters is None else each.adapters.of_rows(rows)
        found.append(LayerInputs(turned, of(each.query_scale), of(each.per_layer), adapters))  # type: ignore[arg-type]
    return found


def _in_finer_parts(model: Model, operators: Operators) -> dict[str, list[int]]:
    """Why the operators do not fuse a layer -> the layers of which that is so."""
    found: dict[str, list[int]] = {}
    for layer in model.layers:
        if (reason := operators.unsupported(layer)) is not None:
            found.setdefault(reason, []).append(layer.index)
    return found
