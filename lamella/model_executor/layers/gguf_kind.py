"""Linear layers on the blocks of a GGUF file: bit for bit what float32 layers on the dequantised weights give."""

from __future__ import annotations

from functools import partial

import torch

from lamella.model_executor.layers.contract import HeadScores
from lamella.model_executor.layers.description import Projection
from lamella.model_executor.layers.linear_kinds import bias_of
from lamella.model_executor.layers.native_heads import scores_by_parts
from lamella.model_executor.weights.gguf_form import BlockPart, GgufBlocks
from lamella.native.gguf_linear import FORMATS, GgufWeight, gather_rows_gguf
from lamella.native.layer_linear import LinearLayer
from lamella.native.library import PANEL
from lamella.native.linear import PackedWeight, gather_rows


class GgufLinear:
    def __init__(self, weight_form: GgufBlocks) -> None:
        self.weight_form = weight_form

    def layer(self, weight: Projection, start: int, stop: int) -> LinearLayer:
        return LinearLayer(
            [
                _part(weight, part, max(start, part.start), min(stop, part.stop))
                for part in self.weight_form.parts(f"{weight.name}.weight")
                if part.start < stop and start < part.stop
            ],
            bias=bias_of(weight, start, stop),
        )

    def gather(self, weight: Projection, ids: torch.Tensor, scale: float) -> torch.Tensor:
        (part,) = self.weight_form.parts(f"{weight.name}.weight")
        table = _part(weight, part, part.start, part.stop)
        if isinstance(table, PackedWeight):
            return gather_rows(table, ids, scale)
        return gather_rows_gguf(table, ids, scale)

    def head(
        self, weight: Projection, hidden: torch.Tensor, softcap: float | None, bias: torch.Tensor | None
    ) -> HeadScores:
        return scores_by_parts(partial(self.layer, weight), weight.num_out, hidden, softcap, bias)


def _part(weight: Projection, part: BlockPart, start: int, stop: int) -> GgufWeight | PackedWeight:
    """Outputs [start, stop) of the layer. They lie in `part`, and start is a whole number of panels after its
    beginning."""
    panels = weight.tensors[part.ending][(start - part.start) // PANEL : -(-(stop - part.start) // PANEL)]
    if part.type_name in FORMATS:
        return GgufWeight(panels, part.type_name, stop - start, weight.num_in)
    return PackedWeight(panels, stop - start, weight.num_in)
