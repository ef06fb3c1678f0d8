"""Low-rank updates of linear layers by the native kernels: what adapters add to some of a step's rows.

Every sum is one chain over the inputs, and is added once, so a row's bits do not depend on the others. Structures
mirror those of csrc/low_rank.h.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from lamella.errors import InvariantError
from lamella.native.arguments import check_indices, check_rows, require_library
from lamella.native.library import Int, Pointer
from lamella.native.linear import PackedWeight


class _UpPart(ctypes.Structure):
    _fields_ = (
        ("panels", Pointer),
        ("first_column", Int),
        ("num_columns", Int),
        ("first_rank", Int),
        ("rank", Int),
    )


class _LowRank(ctypes.Structure):
    _fields_ = (("down", Pointer), ("rank", Int), ("depth", Int), ("parts", Pointer), ("num_parts", Int))


class _AdaptedLayer(ctypes.Structure):
    _fields_ = (("qkv_proj", Pointer), ("out_proj", Pointer), ("gate_up_proj", Pointer), ("down_proj", Pointer))


class _AdapterRows(ctypes.Structure):
    _fields_ = (("layers", Pointer), ("rows", Pointer), ("num_rows", Int))


class _StepAdapters(ctypes.Structure):
    _fields_ = (("adapters", Pointer), ("num_adapters", Int))


@functools.cache
def _function() -> Callable[..., None]:
    return require_library().function(
        "add_low_rank", Pointer, Pointer, Int, Pointer, Int, Int, Int, Pointer, Int
    )  # fmt: skip


class Up(NamedTuple):
    """What is added to the outputs from first_column on: of `weight` [columns, rank], by the numbers that begin at
    first_rank."""

    first_column: int
    first_rank: int
    weight: PackedWeight


class LowRank:
    """up(down(x)), the ups side by side. down: [rank of all ups, num_in]."""

    def __init__(self, down: PackedWeight, ups: Sequence[Up]) -> None:
        """Raises InvariantError for ups that reach beyond what `down` gives, or overlap."""
        last = 0
        for up in sorted(ups):
            if up.first_column < last or up.first_rank < 0 or up.first_rank + up.weight.num_in > down.num_out:
                raise InvariantError(
                    f"an update of the columns from {up.first_column} on takes ranks {up.first_rank} to "
                    f"{up.first_rank + up.weight.num_in - 1} of {down.num_out}, behind columns up to {last - 1}; ups "
                    "must not overlap, and take what there is"
                )
            last = up.first_column + up.weight.num_out
        self.num_in, self.num_columns = down.num_in, last
        self._kept = (down, tuple(ups))  # their memory is what the addresses are of
        self._parts = (_UpPart * len(ups))(
            *(
                _UpPart(up.weight.data.data_ptr(), up.first_column, up.weight.num_out, up.first_rank, up.weight.num_in)
                for up in ups
            )
        )
        self._structure = _LowRank(
            down.data.data_ptr(), down.num_out, down.num_in, ctypes.addressof(self._parts), len(ups)
        )
        self.address = ctypes.addressof(self._structure)

    def add_to(self, y: Tensor, x: Tensor, rows: Tensor, columns: slice) -> None:
        """Add to y [T, len(columns)], in place, what the rows `rows` (int64 [n], ascending) of x [T, num_in] give. y:
        the layer's outputs `columns`; parts that are not among them are left out."""
        check_rows("x", x, self.num_in)
        check_rows("y", y, columns.stop - columns.start, is_written=True)
        check_indices("rows", rows, len(rows), first=0, stop=min(len(x), len(y)))
        _function()(
            self.address, rows.data_ptr(), len(rows), x.data_ptr(), x.stride(0), columns.start, columns.stop,
            y.data_ptr(), y.stride(0),
        )  # fmt: skip


class AdaptedProjections(NamedTuple):
    """Of a layer that runs as one call; None: nothing is added."""

    qkv_proj: LowRank | None = None
    out_proj: LowRank | None = None
    gate_up_proj: LowRank | None = None
    down_proj: LowRank | None = None


class AdaptedLayers:
    """What an adapter adds to each layer of a model, first to last."""

    def __init__(self, layers: Sequence[AdaptedProjections]) -> None:
        self._kept = tuple(layers)
        self.num_layers = len(layers)
        self._structure = (_AdaptedLayer * len(layers))(
            *(_AdaptedLayer(*(None if each is None else each.address for each in layer)) for layer in layers)
        )
        self.address = ctypes.addressof(self._structure)


class StepAdapters:
    """The adapters of a step's rows. of_rows: each adapter's layers, and its rows, int64 [n], ascending."""

    def __init__(self, of_rows: Sequence[tuple[AdaptedLayers, Tensor]], num_rows: int) -> None:
        """Raises InvariantError for a row that is not below num_rows."""
        for _, rows in of_rows:
            check_indices("rows", rows, len(rows), first=0, stop=num_rows)
        self.num_rows = num_rows
        self.num_layers = min((layers.num_layers for layers, _ in of_rows), default=0)
        self._kept = tuple(of_rows)
        self._adapters = (_AdapterRows * len(of_rows))(
            *(_AdapterRows(layers.address, rows.data_ptr(), len(rows)) for layers, rows in of_rows)
        )
        self._structure = _StepAdapters(ctypes.addressof(self._adapters), len(of_rows))
        self.address = ctypes.addressof(self._structure)
