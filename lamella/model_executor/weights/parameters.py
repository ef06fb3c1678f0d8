"""What a model asks of a checkpoint: its parameters by name and shape, and the stored tensors that each is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Part(NamedTuple):
    """A checkpoint's tensor that fills `num_rows` rows of a parameter.

    head_rows: how many rows make a head, for Q and K, which rotary embedding turns; 0 for all else. Some files hold the
    rows of these heads in another order (`WeightMap.gguf_pairs`); of each head the first `paired_rows`, where it is not
    all of them. factor: what its values are multiplied by when they are read.
    """

    name: str
    num_rows: int
    head_rows: int = 0
    factor: float = 1.0
    paired_rows: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """parts fill the shape from the first row to the last. Weights have shape [num_out, num_in], whatever form they are
    kept in; norms, biases and other vectors [width]."""

    name: str  # "layers.0.self_attn.qkv_proj.weight"
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def is_vector(name: str) -> bool:
    """Whether the parameter is a norm, a bias or another row of numbers, which are kept as they are whatever form
    weights have."""
    return is_norm(name) or name.endswith((".bias", ".vector"))


def is_float32(name: str) -> bool:
    """Whether it is float32 whatever the model computes in: norms and rows of numbers that are nobody's bias."""
    return name.endswith(("norm.weight", "norm.bias", ".vector"))
