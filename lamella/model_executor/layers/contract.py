"""What operators do with a decoder's layers, and what its head gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from lamella.model_executor.layers.adapters import Adapter, LowRankUpdate, RowAdapters
from lamella.model_executor.layers.description import DecoderLayer, Model, Norm, Projection
from lamella.model_executor.layers.worker_sum import WorkerSum
from lamella.model_executor.step_attention import StepAttention
from lamella.model_executor.weights.forms import WeightForm

Rotary = tuple[torch.Tensor, torch.Tensor]  # cos and sin of a step's tokens, see rotary.rotary_tables


class LayerInputs(NamedTuple):
    """What a layer needs of a step's T tokens beside the residual stream.

    query_scale: float32 [T, 1, 1], what queries are multiplied by; per_layer: [T, width], see PerLayerGate; rotary: see
    above. Each None where the layer has no such part. adapters: None where no token has one.
    """

    rotary: Rotary | None = None
    query_scale: torch.Tensor | None = None
    per_layer: torch.Tensor | None = None
    adapters: RowAdapters | None = None

    def of_rows(self, rows: torch.Tensor | None) -> LayerInputs:
        """The same of the tokens `rows` (int64 [S]); None: of all."""
        if rows is None:
            return self
        return LayerInputs(
            None if self.rotary is None else (self.rotary[0][rows], self.rotary[1][rows]),
            None if self.query_scale is None else self.query_scale[rows],
            None if self.per_layer is None else self.per_layer[rows],
            None if self.adapters is None else self.adapters.of_rows(rows),
        )


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
    def workers(self) -> WorkerSum:
        """Who computes each layer together."""
        ...

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

    def adapter(self, updates: Mapping[str, LowRankUpdate], device: torch.device) -> Adapter:
        """updates: by the name of the projection; copied in the form that suits, to `device`."""
        ...

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        """Rows of the table, times `scale`: a new tensor [T, num_in]."""
        ...

    def multiply(self, projection: Projection, x: torch.Tensor, columns: slice) -> torch.Tensor:
        """x [T, num_in] by the weight: [T, len(columns)], of the outputs `columns`, before any bias or with it, as
        suits who reads them."""
        ...

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """x [T, norm.width], rows adjacent or apart: a new tensor."""
        ...

    def run(
        self,
        step: StepAttention,
        layers: Sequence[DecoderLayer],
        following: Norm | None,
        inputs: Sequence[LayerInputs],
        x: torch.Tensor,
        normed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens through `layers`, one after the other; inputs: of each.

        x [T, width] is the residual stream, normed what the first layer's input norm makes of it. Returns x after the
        last layer, and what `following` makes of that. Both may be overwritten. All T tokens leave each layer but the
        last. Those that leave the last are `step.output_rows`, and the results are of those.
        """
        ...

    def head(
        self, weight: Projection, hidden: torch.Tensor, softcap: float | None, bias: torch.Tensor | None = None
    ) -> torch.Tensor | HeadScores:
        """Logits of hidden [S, width] against the rows of `weight`, plus bias float32 [num_out]: float32 [S, num_out]
        (may be a transposed view), or what computes as much of them as is asked for."""
        ...
