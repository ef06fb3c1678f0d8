"""GGUF files for transformers models: transformers' own reading of them, after a check that it leaves nothing out.

transformers passes over metadata and tensors that it has no name for, which changes results without a sign: scaled
rotary embeddings among others. A file is refused where that would happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config_gguf import ARCHITECTURE_KEY
from lamella.model_executor.models.registry import is_known_gguf, parse_gguf_config
from lamella.model_executor.models.transformers_backend.recorder import RecordedLayer
from lamella.model_executor.models.weight_map import GGUF_OTHER_PARTS
from lamella.model_executor.weights.gguf_header import GgufHeader
from lamella.model_executor.weights.gguf_joined import joined_file
from lamella.model_executor.weights.gguf_split import read_gguf_model

# Metadata that transformers passes over -> the config's attribute that must say the same.
_SAME_IN_CONFIG = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "attention.sliding_window": "sliding_window",
}


def gguf_state_dict(path: Path, model_class: Any, config: Any) -> Mapping[str, torch.Tensor]:
    """The tensors of the file, or of all parts of a split one, expanded, by transformers' names of them.

    Raises ModelLoadError: a file that is damaged, or holds what transformers would pass over.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint as load

    header = read_gguf_model(path)
    with torch.device("meta"):
        model = model_class._from_config(config)
    name = header.fields().string(ARCHITECTURE_KEY)
    processor = TENSOR_PROCESSORS.get(name, TensorProcessor)(config={})
    known = get_gguf_hf_weights_map(model, processor)
    left_over = [
        each
        for each in header.tensors
        if each not in known and "_exps." not in each and not each.startswith(tuple(GGUF_OTHER_PARTS))
    ]
    if left_over:
        raise ModelLoadError(
            f"{path}: transformers has no place for {len(left_over)} of its tensors ({', '.join(left_over[:3])}), and "
            "the model would be another without them"
        )
    with joined_file(header, has_data=True) as file:
        tensors: Mapping[str, torch.Tensor] = load(str(file), return_tensors=True, model_to_load=model)["tensors"]
    return tensors


def refuse_unread_metadata(header: GgufHeader, config: Any) -> None:
    """Raises ModelLoadError where the file says something of its model that transformers does not read, unless
    `config`, as transformers made it, says the same."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    name = header.fields().string(ARCHITECTURE_KEY)
    known = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    spellings = (name, name.replace("-", "_"), name.replace("moe", "_moe"))
    read = next((known[each] for each in spellings if each in known), None)
    if read is None:
        raise ModelLoadError(f"{header.path}: transformers does not read GGUF files of architecture {name!r} into text")
    prefix = f"{name}."
    unread = []
    for key, value in header.metadata.items():
        inner = key.removeprefix(prefix)
        if inner == key or inner in read:
            continue
        attribute = _SAME_IN_CONFIG.get(inner)
        if attribute is None or value != getattr(config, attribute, None):
            unread.append(key)
    if unread:
        raise ModelLoadError(
            f"{header.path}: transformers passes over {', '.join(unread[:5])}, and the model may be another without it"
        )


def refuse_other_reading(header: GgufHeader, config: Any, recorded: Sequence[RecordedLayer]) -> None:
    """Raises ModelLoadError where a native family reads another model from the file than transformers does: its mapping
    leaves to defaults what such files say, or leave to their reader."""
    if not is_known_gguf(header):
        return
    native = parse_gguf_config(header)
    _require("the number of layers", native.num_layers, len(recorded))
    _require("rms_norm_eps", native.norm_eps, getattr(config, "rms_norm_eps", None))
    _require("the cap of logits", native.final_logit_softcap, getattr(config, "final_logit_softcapping", None))
    for index, (layer, call) in enumerate(zip(native.layers, recorded, strict=True)):
        attention, settings = layer.attention, call.settings
        _require(f"layer {index}'s KV heads", attention.num_kv_heads, call.num_kv_heads)
        _require(f"layer {index}'s size of K", attention.k_dim, call.k_dim)
        _require(f"layer {index}'s scale", attention.scale, settings.scale)
        _require(f"layer {index}'s soft-cap", attention.softcap, settings.softcap)
        _require(f"layer {index}'s window", attention.window_tokens, settings.window_tokens)
        rope = getattr(config, "rope_parameters", None) or {}
        rope = rope.get(attention.kind, rope)
        if attention.rotary is not None:
            _require(f"layer {index}'s rope_theta", attention.rotary.theta, rope.get("rope_theta"))


def _require(what: str, by_file: float | None, by_transformers: float | None) -> None:
    is_same = by_file == by_transformers
    if by_file is not None and by_transformers is not None:
        is_same = abs(by_file - by_transformers) <= 1e-6 * abs(by_file)
    if not is_same:
        raise ModelLoadError(
            f"{what} {by_file} by the file, {by_transformers} by transformers' reading of it; the native layers, "
            'model_impl="native", read it'
        )
