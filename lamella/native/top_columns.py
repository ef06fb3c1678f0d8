"""The largest scores of rows that are written out."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lamella.errors import ConfigError
from lamella.native.arguments import check_contiguous, check_rows, require_library
from lamella.native.library import Int, Pointer
from lamella.native.linear import MAX_OUTPUTS


@functools.cache
def _function() -> Callable[..., None]:
    return require_library().function("top_columns", Pointer, Int, Int, Int, Pointer, Pointer)


def top_columns(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values float32, columns int64), each [T, k]: the `k` largest of each row of `scores`, contiguous float32 [T, N].

    The largest first, of equal ones the lower column; NaN counts as larger than any number. Raises ConfigError unless
    1 <= k <= N.
    """
    num_rows, num_columns = (*scores.shape, 0, 0)[:2]  # other shapes pass here, for check_rows to refuse them
    check_rows("scores", scores, num_columns)
    check_contiguous("scores", scores)
    if not 1 <= k <= num_columns <= MAX_OUTPUTS:
        raise ConfigError(f"k={k} cannot be had of {num_columns} columns; 1 to {num_columns} can")
    values = torch.empty(num_rows, k)
    columns = torch.empty(num_rows, k, dtype=torch.int64)
    if num_rows:
        _function()(scores.data_ptr(), num_rows, num_columns, k, values.data_ptr(), columns.data_ptr())
    return values, columns
