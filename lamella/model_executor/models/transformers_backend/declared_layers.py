"""What a transformers config says of its layers: which kind each is, and how far it sees.

This is the one place where windows are converted. Lamella's count the query itself. So does `sliding_window` of
transformers' config objects, whose masks have q - k < sliding_window; what a file may say otherwise (MiMo-V2-Flash's
`sliding_window_size`, which leaves the query out) the config class has added up when it read the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config_json import shared_kv_owners
from lamella.model_executor.models.typed_fields import is_integer, shown

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# Other kinds of layers that transformers has, and what they keep beside K and V or see beside a window.
NOT_BUILT = {
    "linear_attention": "a recurrent state",
    "mamba": "a recurrent state",
    "conv": "a convolution's state",
    "hybrid": "a convolution's or recurrent state beside K and V",
    "hybrid_sliding": "a convolution's state and a relative position bias beside K and V",
    "hybrid_mamba": "a recurrent state beside K and V",
    "compressed_sparse_attention": "compressed keys beside a window",
    "heavily_compressed_attention": "compressed keys beside a window",
    "indexed_attention": "an indexer's keys, by which it chooses what it sees",
    "moe": "no attention",
    "mlp": "no attention",
    "attention": "a kind that does not say how far it sees",
}


@dataclass(frozen=True, slots=True)
class DeclaredLayer:
    """window_tokens: keys visible including the query itself, or the chunk's length; None for full attention. config:
    the config as this layer sees it."""

    kind: str
    window_tokens: int | None
    config: Any


def declared_layers(config: Any) -> list[DeclaredLayer]:
    """The layers of a text config (transformers' PreTrainedConfig). Raises ModelLoadError for a kind that is not built,
    or a window that is missing."""
    num_layers = getattr(config, "num_hidden_layers", None)
    if not is_integer(num_layers) or num_layers < 1:
        raise ModelLoadError(f"num_hidden_layers={shown(num_layers)}: a positive number of decoder layers is built")
    kinds = _kinds(config, num_layers)
    configs = config.per_layer_config
    return [_declared(layer, kind, configs[layer]) for layer, kind in enumerate(kinds)]


def declared_owners(config: Any, layers: list[DeclaredLayer]) -> Mapping[int, int]:
    """Layer -> the layer whose K and V it reads, by the config."""
    return shared_kv_owners([layer.kind for layer in layers], getattr(config, "num_kv_shared_layers", None) or 0)


def _kinds(config: Any, num_layers: int) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        # Without kinds a window is every layer's.
        slides = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        return [SLIDING if slides else FULL] * num_layers
    if len(kinds) < num_layers:
        raise ModelLoadError(f"layer_types has {len(kinds)} entries for num_hidden_layers={num_layers} layers")
    for kind in kinds:
        if kind not in (FULL, SLIDING, CHUNKED):
            keeps = NOT_BUILT.get(kind, "what is not known here")
            raise ModelLoadError(f"layers of kind {shown(kind)} are not built: such a layer keeps {keeps}")
    return list(kinds[:num_layers])


def _declared(layer: int, kind: str, config: Any) -> DeclaredLayer:
    if kind == FULL:
        return DeclaredLayer(kind, None, config)
    field = "sliding_window" if kind == SLIDING else "attention_chunk_size"
    window = getattr(config, field, None)
    if not is_integer(window) or window < 1:
        raise ModelLoadError(f"layer {layer} is of kind {kind}, but {field}={shown(window)}; give its tokens")
    return DeclaredLayer(kind, window, config)
