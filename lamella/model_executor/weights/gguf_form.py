"""Weights in the blocks of the GGUF file that they come from, repacked in panels: as many bytes as the file has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import lcm
from typing import NamedTuple

import torch

from lamella.errors import InvariantError
from lamella.kv_cache.spec import ceil_div
from lamella.model_executor.weights.checkpoint import BlockCheckpoint, Checkpoint
from lamella.model_executor.weights.conversion import ParameterPlan, converted_pieces, stored_parts
from lamella.model_executor.weights.forms import Panels, StoredTensor
from lamella.model_executor.weights.parameters import Parameter, Part, is_vector
from lamella.model_executor.weights.row_pairs import unpaired
from lamella.native.gguf_linear import FORMATS, pack_gguf
from lamella.native.library import PANEL
from lamella.native.linear import pack_rows

_ROWS_AT_ONCE = 4096
_FLOAT = "F32"  # the form of parts whose type has no kernel, or whose values change as they are read


class BlockPart(NamedTuple):
    """Outputs [start, stop) of a weight, in panels of their own. type_name: a GGUF type with a kernel, or F32."""

    ending: str
    type_name: str
    start: int
    stop: int


class GgufBlocks:
    """Each part of a fused weight keeps its own type."""

    name = "gguf"

    def __init__(self, checkpoint: BlockCheckpoint, parameters: Iterable[Parameter]) -> None:
        """parameters: all that the model has."""
        self._checkpoint = checkpoint
        self._parts = {
            each.name: self._find_parts(stored_parts(checkpoint, each))
            for each in parameters
            if not is_vector(each.name)
        }

    def parts(self, name: str) -> list[BlockPart]:
        """The parts of the weight `name`, which end in `ending` instead of "weight"."""
        return self._parts[name]

    def _find_parts(self, parts: Iterable[Part]) -> list[BlockPart]:
        found: list[BlockPart] = []
        start = 0
        for index, part in enumerate(parts):
            if part.name not in self._checkpoint.tensors:
                break  # an error for the missing tensor is raised when parameters are planned
            stop = start + self._checkpoint.tensors[part.name].shape[0]
            type_name = self._checkpoint.type_name(part.name)
            type_name = type_name if type_name in FORMATS and part.factor == 1.0 else _FLOAT
            found.append(BlockPart(f"part{index}_{type_name}", type_name, start, stop))
            start = stop
        return found

    def tensors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, StoredTensor]:
        num_in = shape[1]
        stored = {}
        for part in self.parts(name):
            if part.type_name == _FLOAT:
                stored[part.ending] = Panels().tensors(name, (part.stop - part.start, num_in), torch.float32)["weight"]
                continue
            form = FORMATS[part.type_name]
            blocks = -(-num_in // form.panel_inputs)
            num_panels = -(-(part.stop - part.start) // PANEL)
            stored[part.ending] = StoredTensor((num_panels, blocks, form.panel_words, PANEL), torch.int32)
        return stored

    def pieces(self, checkpoint: Checkpoint, plans: Iterable[ParameterPlan]) -> Iterator[tuple[str, torch.Tensor]]:
        if not isinstance(checkpoint, BlockCheckpoint):
            raise InvariantError(f"blocks were asked of a {type(checkpoint).__name__}, which has none")
        for plan in plans:
            if is_vector(plan.name):
                yield from ((plan.name, piece.values) for piece in converted_pieces(checkpoint, [plan]))
                continue
            base = plan.name.removesuffix("weight")
            for part, source in zip(self.parts(plan.name), plan.parts, strict=True):
                whole = lcm(PANEL, source.head_rows or 1)  # panels and heads
                at_once = ceil_div(_ROWS_AT_ONCE, whole) * whole
                for start in range(0, source.num_rows, at_once):
                    stop = min(start + at_once, source.num_rows)
                    yield base + part.ending, self._panels(checkpoint, source, part.type_name, start, stop)

    def _panels(self, checkpoint: BlockCheckpoint, part: Part, type_name: str, start: int, stop: int) -> torch.Tensor:
        head_rows = part.head_rows if checkpoint.has_pairs else 0
        if type_name == _FLOAT:
            rows = checkpoint.read_rows(part.name, start, stop).float()
            rows = rows if part.factor == 1.0 else rows * part.factor
            return pack_rows(unpaired(rows, head_rows, part.paired_rows) if head_rows else rows)
        blocks = checkpoint.read_blocks(part.name, start, stop)
        return pack_gguf(unpaired(blocks, head_rows, part.paired_rows) if head_rows else blocks, type_name).panels
