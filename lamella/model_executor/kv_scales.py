"""The scales that a checkpoint gives for K and V in 8 bits."""

from __future__ import annotations

import re
from typing import NamedTuple

from lamella.errors import ModelLoadError
from lamella.model_executor.checkpoint import Checkpoint, SafetensorsCheckpoint
from lamella.model_executor.model_source import ModelSource

# As llm-compressor ("self_attn.k_scale"), vLLM ("self_attn.attn.k_scale") and ModelOpt ("self_attn.k_proj.k_scale")
# name them, without the model's prefix.
_SCALE_NAME = re.compile(r"layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale")


class KVScales(NamedTuple):
    """A layer's pages hold K / k_scale and V / v_scale."""

    k_scale: float = 1.0
    v_scale: float = 1.0


def is_kv_scale(name: str) -> bool:
    return _SCALE_NAME.fullmatch(name) is not None


def load_kv_scales(source: ModelSource, *, num_layers: int) -> list[KVScales]:
    """One per layer: the checkpoint's, 1 where it has none (GGUF files and random weights never do).

    Raises ModelLoadError for a scale that is no single number, or not positive and finite.
    """
    if source.kind != "safetensors":
        return [KVScales()] * num_layers
    return read_kv_scales(SafetensorsCheckpoint(source.paths), num_layers=num_layers)


def read_kv_scales(checkpoint: Checkpoint, *, num_layers: int) -> list[KVScales]:
    """As `load_kv_scales`, from an open checkpoint."""
    scales = [KVScales()] * num_layers
    for name, stored in checkpoint.tensors.items():
        match = _SCALE_NAME.fullmatch(name)
        if match is None or int(match[1]) >= num_layers:
            continue
        if stored.problem is not None:
            raise ModelLoadError(stored.problem)
        values = checkpoint.read_rows(name, 0, stored.shape[0] if stored.shape else 1).flatten().tolist()
        if len(values) != 1 or not 0 < values[0] < float("inf"):
            raise ModelLoadError(
                f"{stored.stored_name} is {values[:4]}; a scale of K or V must be one positive, finite number (with "
                'kv_cache_dtype="auto", scales are not read)'
            )
        layer = int(match[1])
        scales[layer] = scales[layer]._replace(**{f"{match[2]}_scale": float(values[0])})
    return scales
