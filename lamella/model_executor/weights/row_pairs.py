"""Rows of Q and K as some GGUF files hold them: the two halves of each head in turn."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

Rows = TypeVar("Rows", torch.Tensor, np.ndarray)


def unpaired(rows: Rows, head_rows: int) -> Rows:
    """Rows [n, ...] of whole heads in which row 2i + s of a head is row i of its half s -> the halves one after the
    other. llama.cpp's converter leaves rows so for architectures whose rotary embedding turns pairs of neighbours."""
    heads = rows.reshape(-1, head_rows // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)
