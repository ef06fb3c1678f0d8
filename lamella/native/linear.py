"""Linear layers in float32 on weights that are packed once.

A row's result is the same bits whatever rows come with it and however many threads run: every element is one chain of
fused multiply-adds over the inputs, first to last. Several Python threads may call at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lamella.errors import InvariantError
from lamella.native.arguments import check_contiguous, check_panels, check_rows, check_vector, require_library
from lamella.native.library import PANEL, Float, Int, Pointer

MAX_TOPK = 128
MAX_OUTPUTS = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [num_out, num_in] in panels of 16 outputs: data[n // 16, k, n % 16] = weight[n, k], zeros after the end.

    `data` is used as it is, so it may be a view of a memory-mapped file.
    """

    data: Tensor  # [ceil(num_out / 16), num_in, 16] float32
    num_out: int
    num_in: int

    def __post_init__(self) -> None:
        if self.num_out < 1 or self.num_in < 1 or self.num_out > MAX_OUTPUTS:
            raise InvariantError(
                f"a weight of num_out={self.num_out}, num_in={self.num_in} cannot be packed; both are at least 1, "
                f"and num_out is at most {MAX_OUTPUTS}"
            )
        check_panels("data", self.data, (-(-self.num_out // PANEL), self.num_in, PANEL), torch.float32)


class TopColumns(NamedTuple):
    """The largest outputs of each row, the largest first; of equal ones the lower id."""

    values: Tensor  # [T, k] float32
    ids: Tensor  # [T, k] int64
    logsumexp: Tensor | None  # [T] float32, over all outputs


class _Kernels(NamedTuple):
    pack_weight: Any
    gather_rows: Any
    linear: Any
    linear_topk: Any


@functools.cache
def _kernels() -> _Kernels:
    function = require_library().function
    return _Kernels(
        pack_weight=function("pack_weight", Pointer, Int, Int, Pointer),
        gather_rows=function("gather_rows", Pointer, Int, Int, Pointer, Int, Float, Pointer, restype=Int),
        linear=function("linear", Pointer, Int, Int, Pointer, Int, Int, Pointer, Pointer, Int),
        linear_topk=function(
            "linear_topk", Pointer, Int, Int, Pointer, Int, Int, Pointer, Int, Pointer, Pointer, Pointer
        ),
    )


def pack_weight(weight: Tensor) -> PackedWeight:
    """`weight` [N, K] float32, contiguous."""
    num_out, num_in = _check_weight(weight)
    data = torch.empty(-(-num_out // PANEL), num_in, PANEL)
    _kernels().pack_weight(weight.data_ptr(), num_out, num_in, data.data_ptr())
    return PackedWeight(data, num_out, num_in)


def pack_rows(rows: Tensor) -> Tensor:
    """The same as `pack_weight`, computed without the library: [N, K] -> [ceil(N / 16), K, 16].

    Pieces of a weight can be packed one after the other where all but the last have a multiple of 16 rows.
    """
    num_rows, width = _check_weight(rows)
    padded = functional.pad(rows, (0, 0, 0, -num_rows % PANEL))
    return padded.view(-1, PANEL, width).transpose(1, 2).contiguous()


def unpacked(weight: PackedWeight) -> Tensor:
    """[num_out, num_in] float32, a copy."""
    return weight.data.transpose(1, 2).reshape(-1, weight.num_in)[: weight.num_out].clone()


def gather_rows(weight: PackedWeight, ids: Tensor, scale: float = 1.0) -> Tensor:
    """weight[ids] * scale for int64 `ids` [T] -> [T, num_in]: an embedding look-up in the language model head's weight.

    Raises InvariantError for an id that is not one of the weight's rows.
    """
    check_vector("ids", ids, ids.numel(), torch.int64)
    rows = torch.empty(len(ids), weight.num_in)
    wrong = _kernels().gather_rows(
        weight.data.data_ptr(), weight.num_out, weight.num_in, ids.data_ptr(), len(ids), scale, rows.data_ptr()
    )
    if wrong >= 0:
        raise InvariantError(f"ids[{wrong}] is {int(ids[wrong])}; the weight has rows 0 to {weight.num_out - 1}")
    return rows


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: [T, num_in] -> [T, num_out], float32. Rows of `x` and `out` may have a stride.

    `out` is written and returned where it is given; it must not overlap `x`.
    """
    num_out, num_in = weight.num_out, weight.num_in
    check_rows("x", x, num_in)
    num_rows = x.shape[0]
    if bias is not None:
        check_vector("bias", bias, num_out)
    if out is None:
        out = torch.empty(num_rows, num_out)
    else:
        check_rows("out", out, num_out, is_written=True)
        if out.shape[0] != num_rows:
            raise InvariantError(f"out has {out.shape[0]} rows; x has {num_rows}")
    if num_rows:
        _kernels().linear(
            x.data_ptr(), x.stride(0), num_rows, weight.data.data_ptr(), num_out, num_in,
            None if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0),
        )  # fmt: skip
    return out


def linear_argmax(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The largest output of each row: ids [T] int64 and values [T] float32, without the others being written.

    As torch.argmax of `linear`: the lowest id of equal outputs, and the first NaN where there is one.
    """
    top = linear_topk(x, weight, 1, bias)
    return top.ids[:, 0], top.values[:, 0]


def linear_topk(
    x: Tensor, weight: PackedWeight, k: int, bias: Tensor | None = None, *, with_logsumexp: bool = False
) -> TopColumns:
    """The `k` largest outputs of each row, 1 <= k <= 128 and k <= num_out; NaN counts as larger than any number.

    The log-sum-exp is over all outputs, and like all else does not depend on the other rows or on threads.
    """
    check_rows("x", x, weight.num_in)
    if not 1 <= k <= min(MAX_TOPK, weight.num_out):
        raise InvariantError(f"k={k} cannot be had of {weight.num_out} outputs; 1 to {min(MAX_TOPK, weight.num_out)}")
    if bias is not None:
        check_vector("bias", bias, weight.num_out)
    num_rows = x.shape[0]
    values = torch.empty(num_rows, k)
    ids = torch.empty(num_rows, k, dtype=torch.int64)
    logsumexp = torch.empty(num_rows) if with_logsumexp else None
    if num_rows:
        _kernels().linear_topk(
            x.data_ptr(), x.stride(0), num_rows, weight.data.data_ptr(), weight.num_out, weight.num_in,
            None if bias is None else bias.data_ptr(), k, values.data_ptr(), ids.data_ptr(),
            None if logsumexp is None else logsumexp.data_ptr(),
        )  # fmt: skip
    return TopColumns(values, ids, logsumexp)


def _check_weight(weight: Tensor) -> tuple[int, int]:
    if weight.dim() != 2 or 0 in weight.shape:
        raise InvariantError(f"weight has shape {list(weight.shape)}; it must be [outputs, inputs], both at least 1")
    check_rows("weight", weight, weight.shape[1])
    check_contiguous("weight", weight)
    num_out, num_in = weight.shape
    return num_out, num_in
