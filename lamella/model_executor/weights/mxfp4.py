"""MXFP4 blocks (Open Compute Project, OCP Microscaling Formats 1.0): 32 numbers of 4 bits and one power of two.

A number is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 or a negative one, times 2^(scale - 127). Checkpoints as transformers has
them hold blocks [..., 16] and scales [...], both uint8, and of a byte the low half is the first of two neighbours; GGUF
has a block in 17 bytes, the scale first, and of byte i the low half is number i, the high half number 16 + i.
"""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 32
BLOCK_BYTES = 17  # with its scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks uint8 [..., num_blocks, 16], scales uint8 [..., num_blocks] -> float32 [..., 32 * num_blocks], exact."""
    values = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).long()  # [..., 16, 2]
    numbers = values[pairs].flatten(-2)  # [..., num_blocks, 32]
    exponents = scales.int().unsqueeze(-1) - _SCALE_BIAS
    return torch.ldexp(numbers, exponents).flatten(-2)


def as_gguf(blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """The same as GGUF has them: uint8 [n, 17 * num_blocks] of blocks [n, num_blocks, 16]."""
    low, high = blocks & 15, blocks >> 4
    numbers = torch.stack((low, high), dim=-1).flatten(-2)  # [n, num_blocks, 32]
    halves = numbers[..., :16] | numbers[..., 16:] << 4
    return torch.cat((scales.unsqueeze(-1), halves), dim=-1).flatten(1).numpy()
