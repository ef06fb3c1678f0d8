"""Native linear layers of every kind, with the function that computes the same by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lamella.native.gguf_linear import linear_gguf, pack_gguf
from lamella.native.int8 import linear_int8, quantize_int8
from lamella.native.layer_linear import LinearLayer
from lamella.native.linear import linear, pack_weight
from lamella.native.w8a8 import linear_w8a8

KINDS = ["float32", "int8", "w8a8", "gguf", "mxfp4"]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def q8_blocks(num_out: int, num_in: int, seed: int = 0) -> np.ndarray:
    """Random levels, scale 2^-7."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (num_out, num_in // 32, 34), dtype=np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(2.0**-7).tobytes(), dtype=np.uint8)
    return blocks.reshape(num_out, -1)


def mxfp4_blocks(num_out: int, num_in: int, seed: int = 0) -> np.ndarray:
    """Random numbers, scales of 2^-6 to 2^-3."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (num_out, num_in // 32, 17), dtype=np.uint8)
    blocks[..., 0] = generator.integers(121, 125, blocks.shape[:2])
    return blocks.reshape(num_out, -1)


def make_layer(
    kind: str, num_out: int, num_in: int, seed: int
) -> tuple[LinearLayer, Callable[[torch.Tensor], torch.Tensor]]:
    """(layer, function that computes the same by itself)."""
    weight = random(num_out, num_in, seed=seed)
    if kind == "float32":
        packed = pack_weight(weight)
        return LinearLayer([packed]), lambda x: linear(x, packed)
    if kind in ("gguf", "mxfp4"):
        is_mxfp4 = kind == "mxfp4"
        data = (mxfp4_blocks if is_mxfp4 else q8_blocks)(num_out, num_in, seed)
        blocks = pack_gguf(data, "MXFP4" if is_mxfp4 else "Q8_0")
        return LinearLayer([blocks]), lambda x: linear_gguf(x, blocks)
    int8 = quantize_int8(weight)
    if kind == "int8":
        return LinearLayer([int8]), lambda x: linear_int8(x, int8)
    return LinearLayer([int8], int8_activations=True), lambda x: linear_w8a8(x, int8)
