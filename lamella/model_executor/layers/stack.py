"""The loop over a model's layers: the only one there is, whatever the family and whoever runs the layers."""

from __future__ import annotations

import logging

import torch

from lamella.attention.contract import AttentionParams
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.layers.contract import HeadScores, Operators
from lamella.model_executor.layers.description import Model
from lamella.model_executor.layers.rotary import RotaryEmbeddings
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
        self._rotary_embeddings = RotaryEmbeddings(self._layer_rotaries, model.dtype, model.device)
        input_norms = [layer.input_norm for layer in model.layers]
        self._first_norm = input_norms[0]
        self._following = [*input_norms[1:], model.norm]

    def attention_params(self, specs: list[KVCacheSpec]) -> list[AttentionParams]:
        """specs: what each layer sees (not how long its KV is kept)."""
        configs = [layer.attention.config for layer in self.model.layers]
        return [
            AttentionParams(spec=spec, num_heads=config.num_heads, scale=config.scale, softcap=config.softcap)
            for spec, config in zip(specs, configs, strict=True)
        ]

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        """token_ids, positions: int64 [T]. Returns [S, hidden_size], of the tokens that leave the last layer."""
        model, operators = self.model, self.operators
        tables = self._rotary_embeddings.tables(positions)
        x = operators.embed(model.embed_tokens, token_ids, model.config.embedding_scale)
        normed = x.clone() if self._first_norm is None else operators.norm(x, self._first_norm)
        first, num_layers = 0, len(model.layers)
        while first < num_layers:
            # Hand over at once the layers that all tokens leave, and with them the next one, which only some tokens
            # leave.
            last = first
            while last < num_layers - 1 and step.output_rows(last) is None:
                last += 1
            layers = model.layers[first : last + 1]
            rotaries = [tables[rotary] for rotary in self._layer_rotaries[first : last + 1]]
            x, normed = operators.run(step, layers, self._following[last], rotaries, x, normed)
            rows = step.output_rows(last)
            if rows is not None:
                tables = {
                    rotary: None if table is None else (table[0][rows], table[1][rows])
                    for rotary, table in tables.items()
                }
            first = last + 1
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | HeadScores:
        """hidden [S, hidden_size] -> float32 [S, vocab_size] (may be a transposed view), or what computes only those
        that are asked for."""
        return self.operators.head(self.model.head, hidden, self.model.config.final_logit_softcap)


def _in_finer_parts(model: Model, operators: Operators) -> dict[str, list[int]]:
    """Why the operators do not fuse a layer -> the layers of which that is so."""
    found: dict[str, list[int]] = {}
    for layer in model.layers:
        if (reason := operators.unsupported(layer)) is not None:
            found.setdefault(reason, []).append(layer.index)
    return found
