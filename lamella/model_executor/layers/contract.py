"""What operators do with a decoder's layers, and what its head gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lamella.model_executor.layers.description import DecoderLayer, Model, Norm, Projection
from lamella.model_executor.step_attention import StepAttention
from lamella.model_executor.weights.forms import WeightForm

Rotary = tuple[torch.Tensor, torch.Tensor]  # cos and sin of a step's tokens, see rotary.rotary_tables


class HeadScores(Protocol):
    """The next token's logits, of which only what is asked for is computed."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [len(rows), vocab] of the given rows (int64); may be a transposed view."""
        ...

    def largest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [n], logits float32 [n]): each row's largest logit, the lowest id among equals."""
        ...

    def top(self, rows: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [n, num_top], logits float32 [n, num_top]): largest first, the lowest id among equals."""
        ...


class Operators(Protocol):
    """x is [T, width]; everything returns tensors of the model's dtype unless said otherwise."""

    name: str

    @property
    def weight_form(self) -> WeightForm:
        """How they want the weights of projections."""
        ...

    def prepare(self, model: Model) -> None:
        """Make what the steps need from the model's weights. Called once, when the weights have been loaded."""
        ...

    def unsupported(self, layer: DecoderLayer) -> str | None:
        """Why the layer runs in finer operations than these operators have for most; None: it does not. Told in the log
        when a model is loaded."""
        ...

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        """Rows of the table, times `scale`: a new tensor [T, num_in]."""
        ...

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor: ...

    def run(
        self,
        step: StepAttention,
        layers: Sequence[DecoderLayer],
        following: Norm | None,
        rotaries: Sequence[Rotary | None],
        x: torch.Tensor,
        normed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens through `layers`, one after the other; rotaries: of each.

        x [T, width] is the residual stream, normed what the first layer's input norm makes of it. Returns x after the
        last layer, and what `following` makes of that. Both may be overwritten. All T tokens leave each layer but the
        last. Those that leave the last are `step.output_rows`, and the results are of those.
        """
        ...

    def head(self, weight: Projection, hidden: torch.Tensor, softcap: float | None) -> torch.Tensor | HeadScores:
        """Logits of hidden [S, width] against the rows of `weight`: float32 [S, num_out] (may be a transposed view), or
        what computes as much of them as is asked for."""
        ...
