"""Tensors that hold all experts of a layer, and the matrices of one expert in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from lamella.model_executor.weights import mxfp4


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """How a stored tensor holds a layer's experts: [num_experts, rows, columns], or of biases [num_experts, rows].

    parts: which of an expert's layers its rows are ("gate_proj", "up_proj"), in equal numbers: one after the other, or
    with is_interleaved in turns, row by row. is_transposed: the last two dimensions have changed places.
    ending: of the tensors that it stands for. scales: of MXFP4 blocks [num_experts, rows, blocks, 16], what the tensor
    of their scales is called in place of this one (see `mxfp4`).
    """

    parts: tuple[str, ...]
    is_transposed: bool = False
    is_interleaved: bool = False
    ending: str = "weight"
    scales: str | None = None


class StackView(NamedTuple):
    """A matrix [num_rows, columns], or vector [num_rows], in a stack: rows first, first + step and so on of one
    expert."""

    expert: int
    first: int
    step: int
    is_transposed: bool

    def rows(self, start: int, stop: int) -> slice:
        """Where its rows [start, stop) are among the expert's."""
        return slice(self.first + start * self.step, self.first + (stop - 1) * self.step + 1)


class ReadableSlice(Protocol):
    def __getitem__(self, index: tuple[int | slice, ...]) -> torch.Tensor: ...


def expert_views(
    stack: ExpertStack, shape: tuple[int, ...], name: str
) -> Iterator[tuple[str, tuple[int, ...], StackView]]:
    """(name, shape, view) of every matrix in a stored tensor of `shape`. name: what the experts are called, as
    "layers.3.mlp.experts". A tensor that cannot be such a stack has none."""
    if stack.scales is not None:
        if len(shape) != 4 or shape[3] * 2 != mxfp4.BLOCK:
            return
        shape = (*shape[:2], shape[2] * mxfp4.BLOCK)
    if len(shape) not in (2, 3):
        return
    num_experts, *matrix = shape
    if stack.is_transposed:
        matrix.reverse()
    num_rows, rest = divmod(matrix[0], len(stack.parts))
    if rest:
        return
    for expert in range(num_experts):
        for place, part in enumerate(stack.parts):
            first, step = (place, len(stack.parts)) if stack.is_interleaved else (place * num_rows, 1)
            is_transposed = stack.is_transposed and len(shape) == 3
            view = StackView(expert, first, step, is_transposed)
            yield f"{name}.{expert}.{part}.{stack.ending}", (num_rows, *matrix[1:]), view


def read_view(stored: ReadableSlice, view: StackView, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of a matrix or vector, without reading the others."""
    rows = view.rows(start, stop)
    if view.is_transposed:
        return stored[view.expert, :, rows][:, :: view.step].T.contiguous()
    return stored[view.expert, rows][:: view.step].contiguous()
