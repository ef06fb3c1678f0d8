"""How the weights of linear layers lie in memory and in the cache of converted weights.

Each form stores a weight [num_out, num_in] as one or more tensors. They are made from rows as these are read, so a
weight is never held twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from lamella.model_executor.weights.checkpoint import Checkpoint
from lamella.model_executor.weights.conversion import ParameterPlan, Piece, converted_pieces, parameter_dtype
from lamella.model_executor.weights.parameters import is_vector
from lamella.native.int8 import LINE_STEPS, quantize_int8
from lamella.native.int8_head import quantize_head_rows
from lamella.native.library import PANEL
from lamella.native.linear import pack_rows

HEAD_ENDINGS = ("head_levels", "head_scales", "head_largest_slopes", "head_norm_slopes", "head_level_slopes")


class StoredTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightForm(Protocol):
    @property
    def name(self) -> str:
        """Part of the cache entry's name."""
        ...

    def tensors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, StoredTensor]:
        """What is stored for the weight `name` of `shape` [num_out, num_in]: what its name ends in, instead of "weight"
        -> shape and dtype."""
        ...

    def pieces(self, checkpoint: Checkpoint, plans: Iterable[ParameterPlan]) -> Iterator[tuple[str, torch.Tensor]]:
        """(stored tensor's name, its next part) of every parameter, tensor by tensor in the order of `tensors`; parts
        follow each other along the first dimension."""
        ...


class RowForm(ABC):
    """A form that is made from rows of floats, whatever file these come from."""

    row_multiple: int  # rows are converted in multiples of so many

    @abstractmethod
    def convert(self, name: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The part of each tensor that stands for `rows` [n, num_in] of the weight `name`, n a multiple of
        row_multiple; parts follow each other along the first dimension."""

    def pieces(self, checkpoint: Checkpoint, plans: Iterable[ParameterPlan]) -> Iterator[tuple[str, torch.Tensor]]:
        return formed_pieces(converted_pieces(checkpoint, plans), self)


@dataclass(frozen=True)
class RowMajor(RowForm):
    """As checkpoints have it: [num_out, num_in]."""

    name: str = "rows"
    row_multiple: int = 1

    def tensors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, StoredTensor]:
        return {"weight": StoredTensor(shape, dtype)}

    def convert(self, name: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": rows}


@dataclass(frozen=True)
class Panels(RowForm):
    """Panels of 16 rows, [ceil(num_out / 16), num_in, 16], the last padded with zeros: what the native kernels read
    from the first byte to the last.

    head: name of the language model's head. Its largest scores are found by int8 weights and a bound on their error
    (lamella.native.int8_head): those are stored as well, a quarter more.
    """

    head: str | None = None
    name: str = "panels"
    row_multiple: int = PANEL

    def tensors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, StoredTensor]:
        num_out, num_in = shape
        num_panels = -(-num_out // PANEL)
        stored = {"weight": StoredTensor((num_panels, num_in, PANEL), dtype)}
        if name == self.head:
            levels = Int8Panels().tensors(name, shape, dtype)
            slopes = StoredTensor((num_panels * PANEL,), torch.float32)
            stored |= dict(zip(HEAD_ENDINGS, (levels["weight"], levels["scales"], *[slopes] * 3), strict=True))
        return stored

    def convert(self, name: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = {"weight": pack_rows(rows)}
        if name == self.head:
            parts |= dict(zip(HEAD_ENDINGS, quantize_head_rows(rows), strict=True))
        return parts


@dataclass(frozen=True)
class Int8Panels(RowForm):
    """int8 with a scale for each output, in the panels of lamella.native.int8.

    weight int8 [panels, ceil(num_in / 4), 16, 4], scales float32 [panels * 16].
    """

    name: str = "int8"
    row_multiple: int = PANEL

    def tensors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, StoredTensor]:
        num_out, num_in = shape
        num_panels = -(-num_out // PANEL)
        return {
            "weight": StoredTensor((num_panels, -(-num_in // LINE_STEPS), PANEL, LINE_STEPS), torch.int8),
            "scales": StoredTensor((num_panels * PANEL,), torch.float32),
        }

    def convert(self, name: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        weight = quantize_int8(rows)
        return {"weight": weight.panels, "scales": weight.scales}


def stored_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, form: WeightForm
) -> dict[str, StoredTensor]:
    """Every tensor that the parameters in `shapes` are stored as, in the order of `shapes`."""
    stored: dict[str, StoredTensor] = {}
    for name, shape in shapes.items():
        if is_vector(name):
            stored[name] = StoredTensor(tuple(shape), parameter_dtype(name, dtype))
            continue
        base = name.removesuffix("weight")
        stored.update({base + ending: tensor for ending, tensor in form.tensors(name, tuple(shape), dtype).items()})
    return stored


def formed_pieces(pieces: Iterable[Piece], form: RowForm) -> Iterator[tuple[str, torch.Tensor]]:
    """(stored tensor's name, its next part) of parameters whose pieces come in order, parameter by parameter.

    The tensors of one parameter follow each other whole, in the order of `WeightForm.tensors`.
    """
    left: torch.Tensor | None = None  # rows that do not fill a panel yet
    later: dict[str, list[torch.Tensor]] = {}  # parts of a parameter's second tensor and further ones
    for plan, row_start, values in pieces:
        if is_vector(plan.name):
            yield plan.name, values
            continue
        is_last = row_start + len(values) == plan.shape[0]
        if left is not None:
            values = torch.cat((left, values))
        if is_last:
            values = functional.pad(values, (0, 0, 0, -len(values) % form.row_multiple))
        num_whole = len(values) // form.row_multiple * form.row_multiple
        left = values[num_whole:].clone() if num_whole < len(values) else None
        if num_whole:
            (ending, part), *others = form.convert(plan.name, values[:num_whole]).items()
            base = plan.name.removesuffix("weight")
            yield base + ending, part
            for other, other_part in others:
                later.setdefault(base + other, []).append(other_part)
        if is_last:
            for name, parts in later.items():
                yield from ((name, part) for part in parts)
            later.clear()


def collect(pieces: Iterable[tuple[str, torch.Tensor]], stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    """The tensors in `stored`, with memory of their own."""
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored.items()}
    filled = dict.fromkeys(stored, 0)
    for name, part in pieces:
        start = filled[name]
        tensors[name][start : start + len(part)] = part
        filled[name] = start + len(part)
    return tensors
