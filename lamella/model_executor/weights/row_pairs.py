"""Rows of Q and K as some GGUF files hold them: the two halves of each head in turn."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

Rows = TypeVar("Rows", torch.Tensor, np.ndarray)


def unpaired(rows: Rows, head_rows: int, paired_rows: int = 0) -> Rows:
    """Rows [n, ...] of whole heads in which row 2i + s of a head is row i of its half s -> the halves one after the
    other. llama.cpp's converter leaves rows so for architectures whose rotary embedding turns pairs of neighbours.

    paired_rows: of each head, the first rows that are so; 0: all. The others stay where they are."""
    if paired_rows and paired_rows != head_rows:
        heads = rows.reshape(-1, head_rows, *rows.shape[1:])
        order = [*range(0, paired_rows, 2), *range(1, paired_rows, 2), *range(paired_rows, head_rows)]
        return heads[:, order].reshape(rows.shape)
    heads = rows.reshape(-1, head_rows // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)
