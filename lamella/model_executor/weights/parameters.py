"""What a model asks of a checkpoint: its parameters by name and shape, and the stored tensors that each is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Part(NamedTuple):
    """A checkpoint's tensor that fills `num_rows` rows of a parameter.

    head_rows: how many rows make a head, for Q and K, which rotary embedding turns; 0 for all else. Some files hold the
    rows of these heads in another order (`WeightMap.gguf_pairs`).
    """

    name: str
    num_rows: int
    head_rows: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """parts fill the shape from the first row to the last. Weights have shape [num_out, num_in], whatever form they are
    kept in; norms and biases [width]."""

    name: str  # "layers.0.self_attn.qkv_proj.weight"
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def is_vector(name: str) -> bool:
    """Whether the parameter is a norm or a bias, which are kept as they are whatever form weights have."""
    return is_norm(name) or name.endswith(".bias")
