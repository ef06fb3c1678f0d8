"""GGUF files for transformers models: transformers' own reading of them, after a check that it leaves nothing out.

transformers passes over metadata and tensors that it has no name for, which changes results without a sign: scaled
rotary embeddings among others. A file is refused where that would happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config_gguf import ARCHITECTURE_KEY
from lamella.model_executor.weights.gguf_header import GgufHeader, read_gguf_header

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
    """The file's tensors, expanded, by transformers' names of them.

    Raises ModelLoadError: a file that is damaged, or holds what transformers would pass over.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint as load

    header = read_gguf_header(path)
    with torch.device("meta"):
        model = model_class._from_config(config)
    name = header.fields().string(ARCHITECTURE_KEY)
    processor = TENSOR_PROCESSORS.get(name, TensorProcessor)(config={})
    known = get_gguf_hf_weights_map(model, processor)
    left_over = [each for each in header.tensors if each not in known and "_exps." not in each]
    if left_over:
        raise ModelLoadError(
            f"{path}: transformers has no place for {len(left_over)} of its tensors ({', '.join(left_over[:3])}), and "
            "the model would be another without them"
        )
    tensors: Mapping[str, torch.Tensor] = load(str(path), return_tensors=True, model_to_load=model)["tensors"]
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
