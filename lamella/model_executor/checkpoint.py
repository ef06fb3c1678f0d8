"""A checkpoint's tensors under one set of names, whatever file they lie in.

The names are those of transformers' Gemma3TextModel ("layers.0.self_attn.q_proj.weight",
"lm_head.weight"), without a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.gguf_files import GgufTensorData, read_gguf_header, storage_problem
from lamella.model_executor.safetensors_files import DTYPES, read_safetensors_header

_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")  # of a multimodal checkpoint: not loaded
_BUFFERS = re.compile(r"rotary_emb.*\.inv_freq$")

_GGUF_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_GGUF_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """stored_name: as the file spells it; problem: why its values cannot be read, or None."""

    stored_name: str
    shape: tuple[int, ...]
    problem: str | None = None


class Checkpoint(Protocol):
    """Headers are read when one is made, values only by `read_rows`, which may be called from threads."""

    tensors: dict[str, StoredTensor]
    norm_offset: float  # what turns a stored norm weight into the multiplier that the model applies

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) along the first dimension; a single number itself. May be a view of the file: do not
        write to it."""
        ...


class SafetensorsCheckpoint:
    """A Hugging Face checkpoint: its Gemma norms hold w where the model multiplies by 1 + w.

    Raises ModelLoadError when a file is unreadable or truncated, or a tensor is there twice.
    """

    norm_offset = 1.0

    def __init__(self, paths: Sequence[Path]) -> None:
        from safetensors import safe_open

        self.tensors: dict[str, StoredTensor] = {}
        self._places: dict[str, Path] = {}
        for path in paths:
            for stored_name, entry in read_safetensors_header(path).items():
                if _BUFFERS.search(stored_name) or stored_name.removeprefix("model.").startswith(_OTHER_PARTS):
                    continue
                name = _without_prefix(stored_name)
                if name in self.tensors:
                    raise ModelLoadError(
                        f"{path} holds {stored_name}, which {self._places[name]} holds as "
                        f"{self.tensors[name].stored_name}; remove one of the files"
                    )
                problem = None
                if entry.dtype_name not in DTYPES:
                    problem = f"{stored_name}: dtype {entry.dtype_name} is not read; known: {', '.join(DTYPES)}"
                self.tensors[name] = StoredTensor(stored_name, entry.shape, problem)
                self._places[name] = path
        self._files = {path: safe_open(path, framework="pt") for path in paths}

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        tensor = self.tensors[name]
        file = self._files[self._places[name]]
        if not tensor.shape or (start, stop) == (0, tensor.shape[0]):
            return file.get_tensor(tensor.stored_name)
        return file.get_slice(tensor.stored_name)[start:stop]


class GgufCheckpoint:
    """A GGUF file, whose converter has added the 1 to Gemma's norms already.

    Raises ModelLoadError when it is unreadable or ends inside its header.
    """

    norm_offset = 0.0

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        stored = ((_from_gguf_name(tensor.name), tensor) for tensor in header.tensors.values())
        self.tensors = {
            name: StoredTensor(tensor.name, tensor.shape, storage_problem(header, tensor)) for name, tensor in stored
        }
        self._data = GgufTensorData(header)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._data.read_rows(self.tensors[name].stored_name, start, stop)

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a matrix as the file has them: uint8 [n, bytes of a row], a view."""
        return self._data.read_blocks(self.tensors[name].stored_name, start, stop)

    def type_name(self, name: str) -> str:
        """ggml's name of the storage format."""
        return self._data.type_name(self.tensors[name].stored_name)


def _without_prefix(name: str) -> str:
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _from_gguf_name(name: str) -> str:
    """The transformers name; a name without one is returned as it is."""
    stem, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _GGUF_LAYER_NAMES:
        return f"layers.{layer[1]}.{_GGUF_LAYER_NAMES[layer[2]]}.{suffix}"
    return f"{_GGUF_NAMES[stem]}.{suffix}" if stem in _GGUF_NAMES else name
