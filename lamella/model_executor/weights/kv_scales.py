"""The scales that a checkpoint gives for K and V in 8 bits."""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

from lamella.errors import ModelLoadError
from lamella.model_executor.weights.checkpoint import Checkpoint, SafetensorsCheckpoint, WeightNames
from lamella.model_executor.weights.model_source import ModelSource

# As llm-compressor ("self_attn.k_scale"), vLLM ("self_attn.attn.k_scale") and ModelOpt ("self_attn.k_proj.k_scale")
# name them, without the model's prefix.
_SCALE_NAME = re.compile(r"layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale")


class KVScales(NamedTuple):
    """A layer's pages hold K / k_scale and V / v_scale."""

    k_scale: float = 1.0
    v_scale: float = 1.0


def kv_scale_layer(name: str) -> int | None:
    """The layer whose K or V the tensor `name` scales; None: it is no such scale."""
    match = _SCALE_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def load_kv_scales(source: ModelSource, names: WeightNames, *, num_layers: int) -> list[KVScales]:
    """One per layer: the checkpoint's, 1 where it has none (GGUF files and random weights never do).

    Raises ModelLoadError for a scale that is no single number, not positive and finite, of a layer that is not there,
    or given twice.
    """
    if source.kind != "safetensors":
        return [KVScales()] * num_layers
    return read_kv_scales(SafetensorsCheckpoint(source.paths, names), num_layers=num_layers)


def read_kv_scales(checkpoint: Checkpoint, *, num_layers: int) -> list[KVScales]:
    """As `load_kv_scales`, from an open checkpoint."""
    scales = [KVScales()] * num_layers
    taken: dict[tuple[int, str], str] = {}
    for name, stored in checkpoint.tensors.items():
        match = _SCALE_NAME.fullmatch(name)
        if match is None:
            continue
        layer, which = int(match[1]), match[2]
        if layer >= num_layers:
            raise ModelLoadError(f"{stored.stored_name} has no place in the model, which has {num_layers} layers")
        if stored.problem is not None:
            raise ModelLoadError(stored.problem)
        if (before := taken.setdefault((layer, which), stored.stored_name)) != stored.stored_name:
            raise ModelLoadError(f"{stored.stored_name} and {before} scale the same values; remove one of them")
        is_single = prod(stored.shape) == 1
        values = checkpoint.read_rows(name, 0, 1).flatten().tolist() if is_single else stored.shape
        if not is_single or not 0 < values[0] < float("inf"):
            raise ModelLoadError(
                f"{stored.stored_name} is {f'of shape {list(values)}' if not is_single else values}; a scale of K or V "
                'must be one positive, finite number (with kv_cache_dtype="auto", scales are not read)'
            )
        scales[layer] = scales[layer]._replace(**{f"{which}_scale": float(values[0])})
    return scales
