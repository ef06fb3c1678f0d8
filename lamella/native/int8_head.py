"""The best outputs of a float linear layer, read from int8 weights: exact greedy decoding at a quarter of the bytes.

Columns that the int8 scores cannot rule out are scored again with the float weights: csrc/int8_head.cpp says how.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lamella.errors import ConfigError
from lamella.native.arguments import check_panels, check_vector, require_library
from lamella.native.int8 import LEVELS, ROWS_AT_ONCE, Int8Weight, check_activations, quantize_int8
from lamella.native.library import PANEL, Float, Int, Pointer

MAX_BEST = 64  # csrc/head_scan.h
MANY_ROWS = 5  # from here on products are of integers: csrc/int8_head_many.cpp
UNIT_ROUNDOFF = 2.0**-24
ENLARGED = 1 + 2.0**-20  # factor on bounds, for products that the kernel rounds
SMALLEST = torch.finfo(torch.float32).tiny


class BestOutputs(NamedTuple):
    ids: Tensor  # int64 [num_rows, k], the best first; of equal values the lowest id
    values: Tensor  # float32 [num_rows, k]
    num_rescored: Tensor  # int64 [num_rows]: columns scored with float weights


class HeadTensors(NamedTuple):
    panels: Tensor  # see Int8Weight
    scales: Tensor
    largest_slopes: Tensor  # see Int8Head
    norm_slopes: Tensor
    level_slopes: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Int8Head:
    """Float panels [ceil(N / 16), K, 16], shared with their owner, their int8 copy and what bounds its error."""

    float_panels: Tensor
    weight: Int8Weight
    largest_slopes: Tensor  # float32 [ceil(N / 16) * 16]: error of the score per |x|_1
    norm_slopes: Tensor  # the same per |x|_2
    level_slopes: Tensor  # what is added to it per |d|_2, where d is the change of x by rounding it to 16 bits
    floor: float  # error where numbers underflow
    largest: float  # at least the largest |weight|

    def __post_init__(self) -> None:
        num_panels = -(-self.weight.num_out // PANEL)
        check_panels("float_panels", self.float_panels, (num_panels, self.weight.num_in, PANEL), torch.float32)
        for name in ("largest_slopes", "norm_slopes", "level_slopes"):
            check_vector(name, getattr(self, name), num_panels * PANEL)

    def best(self, x: Tensor, num_best: int = 1) -> BestOutputs:
        """The `num_best` largest outputs of each row of `x`, contiguous float32 [num_rows, K].

        Ids and values equal those of the float layer's chain of fused multiply-adds bit for bit; NaN counts as the
        largest, as in torch. Raises ConfigError for other types, shapes, or a `num_best` outside of 1 to
        min(64, outputs).
        """
        weight = self.weight
        check_activations(x, weight.num_in)
        if x.dim() != 2:
            raise ConfigError(f"x is {list(x.shape)}; best outputs are found for [rows, {weight.num_in}]")
        if not 1 <= num_best <= min(MAX_BEST, weight.num_out):
            raise ConfigError(f"num_best is {num_best}; it can be 1 to {min(MAX_BEST, weight.num_out)}")
        if len(x) < MANY_ROWS:
            return self._scan(_functions().few, x, num_best, ())
        found = self._scan(_functions().many, x, num_best, (self.level_slopes.data_ptr(),))
        undecided = (found.num_rescored < 0).nonzero()[:, 0]
        if len(undecided):
            again = self._scan(_functions().few, x[undecided], num_best, ())
            for column, values in zip(found, again, strict=True):
                column[undecided] = values
        return found

    def _scan(
        self, function: Callable[..., None], x: Tensor, num_best: int, more_slopes: tuple[int, ...]
    ) -> BestOutputs:
        weight, num_rows = self.weight, x.shape[0]
        ids = torch.empty(num_rows, num_best, dtype=torch.int64)
        values = torch.empty(num_rows, num_best)
        num_rescored = torch.empty(num_rows, dtype=torch.int64)
        function(
            x.data_ptr(), weight.panels.data_ptr(), weight.scales.data_ptr(), self.largest_slopes.data_ptr(),
            self.norm_slopes.data_ptr(), *more_slopes, self.float_panels.data_ptr(), ids.data_ptr(),
            values.data_ptr(), num_rescored.data_ptr(), num_rows, weight.num_out, weight.num_in, num_best, self.floor,
            self.largest,
        )  # fmt: skip
        return BestOutputs(ids, values, num_rescored)


class _Functions(NamedTuple):
    few: Callable[..., None]
    many: Callable[..., None]


@functools.cache
def _functions() -> _Functions:
    library = require_library()
    return _Functions(
        library.function("int8_head", *[Pointer] * 9, *[Int] * 4, *[Float] * 2),
        library.function("int8_head_many", *[Pointer] * 10, *[Int] * 4, *[Float] * 2),
    )


def build_int8_head(float_panels: Tensor, num_out: int) -> Int8Head:
    """Quantise the packed float weights [ceil(num_out / 16), K, 16]; they are kept, not copied.

    Raises ConfigError for other types or shapes.
    """
    panels = float_panels
    if panels.dtype != torch.float32 or panels.dim() != 3 or panels.shape[2] != PANEL or not panels.is_contiguous():
        raise ConfigError(
            f"float_panels are {panels.dtype} {list(panels.shape)}; "
            "a head takes contiguous float32 [panels, inputs, 16]"
        )
    if not (panels.shape[0] - 1) * PANEL < num_out <= panels.shape[0] * PANEL:
        raise ConfigError(f"num_out is {num_out}; {panels.shape[0]} panels hold {panels.shape[0] * PANEL}")
    # every output of the last panel is quantised: those that only pad are cut off by the kernel
    parts = []
    for begin in range(0, panels.shape[0], ROWS_AT_ONCE // PANEL):
        part = panels[begin : begin + ROWS_AT_ONCE // PANEL]
        parts.append(quantize_head_rows(part.transpose(1, 2).reshape(-1, panels.shape[1])))
    return assemble_head(panels, HeadTensors(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))), num_out)


def quantize_head_rows(rows: Tensor) -> HeadTensors:
    """What an Int8Head has beside the float weights, for `rows` float32 [n, K], n a multiple of 16. Parts for rows that
    follow each other are concatenated along the first dimension.

    A row with NaN or infinity gets zeros and an infinite error, so it is always scored with float weights.
    """
    is_finite = rows.isfinite().all(dim=1)
    rows = rows.masked_fill(~is_finite[:, None], 0.0)
    part = quantize_int8(rows)
    largest_slopes, norm_slopes, level_slopes = _slopes(rows, part)
    largest_slopes, norm_slopes = (one.masked_fill(~is_finite, torch.inf) for one in (largest_slopes, norm_slopes))
    return HeadTensors(part.panels, part.scales, largest_slopes, norm_slopes, level_slopes)


def assemble_head(float_panels: Tensor, tensors: HeadTensors, num_out: int) -> Int8Head:
    depth = float_panels.shape[1]
    largest = float(tensors.scales.max()) * LEVELS * ENLARGED
    if not bool(tensors.largest_slopes.isfinite().all()):
        largest = float("inf")
    # A result below the normal range, or a factor that is flushed to zero, causes an error of at most 2^-126 times the
    # other factor for each of the K inputs. A row whose weights are all flushed has that in its slope.
    floor = 4 * (depth + 2) * SMALLEST * max(1.0, largest)
    weight = Int8Weight(tensors.panels, tensors.scales, num_out, depth)
    slopes = (tensors.largest_slopes, tensors.norm_slopes, tensors.level_slopes)
    return Int8Head(float_panels, weight, *slopes, floor, largest)


def _slopes(rows: Tensor, part: Int8Weight) -> tuple[Tensor, Tensor, Tensor]:
    """The bound's factors of |x|_1, |x|_2 and |d|_2 for each row, from errors measured in float64."""
    depth = rows.shape[1]
    gamma = (depth + 8) * UNIT_ROUNDOFF / (1 - (depth + 8) * UNIT_ROUNDOFF)
    exact = rows.double()
    levels = part.levels().double()
    levels *= part.scales.double()[:, None]
    error = exact - levels
    largest = (1 + 2 * gamma) * error.abs().amax(1) + 2 * gamma * exact.abs().amax(1) + 2 * SMALLEST
    norm = (1 + 2 * gamma) * error.norm(dim=1) + 2 * gamma * exact.norm(dim=1) + 2 * SMALLEST * depth**0.5
    level = (1 + 2 * gamma) * levels.norm(dim=1) + 2 * SMALLEST
    return (largest * ENLARGED).float(), (norm * ENLARGED).float(), (level * ENLARGED).float()
