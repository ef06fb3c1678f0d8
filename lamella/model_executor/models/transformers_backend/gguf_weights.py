"""GGUF files for transformers models: named and put in order by transformers' own code, after a check that it leaves
nothing out.

transformers passes over metadata and tensors that it has no name for, which changes results without a sign: scaled
rotary embeddings among others. A file is refused where that would happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config_gguf import ARCHITECTURE_KEY
from lamella.model_executor.models.registry import is_known_gguf, parse_gguf_config
from lamella.model_executor.models.transformers_backend.recorder import RecordedLayer
from lamella.model_executor.models.weight_map import GGUF_OTHER_PARTS
from lamella.model_executor.weights.gguf_header import GgufHeader
from lamella.model_executor.weights.gguf_tensors import GgufTensorData, storage_problem

# Metadata that transformers passes over -> the config's attribute that must say the same.
_SAME_IN_CONFIG = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "attention.sliding_window": "sliding_window",
}


def gguf_state_dict(header: GgufHeader, model_class: Any, config: Any) -> Mapping[str, torch.Tensor]:
    """The file's tensors, expanded, by transformers' names of them and in its order of rows.

    Raises ModelLoadError: a file that is damaged, or holds what transformers would pass over.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    with torch.device("meta"):
        model = model_class._from_config(config)
    name = header.fields().string(ARCHITECTURE_KEY)
    processor = TENSOR_PROCESSORS.get(name, TensorProcessor)(config=config.to_dict())
    known = get_gguf_hf_weights_map(_Names(model), processor)
    in_text = {each: tensor for each, tensor in header.tensors.items() if not each.startswith(tuple(GGUF_OTHER_PARTS))}
    left_over = [each for each in in_text if each not in known and "_exps." not in each]
    if left_over:
        raise ModelLoadError(
            f"{header.path}: transformers has no place for {len(left_over)} of its tensors "
            f"({', '.join(left_over[:3])}), and the model would be another without them"
        )
    stored = GgufTensorData(header)
    tensors: dict[str, torch.Tensor] = {}
    for each, tensor in in_text.items():
        problem = storage_problem(header, tensor)
        if problem is not None:
            raise ModelLoadError(f"{header.path}: {problem}")
        num_rows = prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]
        # What a processor divides or puts together, such as experts, it writes to `tensors` itself, and names nothing.
        result = processor.process(
            weights=stored.read_rows(each, 0, num_rows).view(tensor.shape).numpy(),
            name=each,
            tensor_key_mapping=known,
            parsed_parameters={"tensors": tensors},
        )
        if result.name in known:
            tensors[known[result.name]] = torch.from_numpy(result.weights).contiguous()
    return tensors


class _Names:
    """A model as transformers' table of GGUF names looks at it, without the inside of its layers: a name from there has
    lost its layer's number, and the table is made anew for each module that is shown, which takes seconds."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.config = getattr(module, "config", None)

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        names: Mapping[str, torch.Tensor] = self._module.state_dict()
        return names

    def named_children(self) -> list[tuple[str, _Names]]:
        children = self._module.named_children()
        return [(name, _Names(child)) for name, child in children if not isinstance(child, torch.nn.ModuleList)]


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
