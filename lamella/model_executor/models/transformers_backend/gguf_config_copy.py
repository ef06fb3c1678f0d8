"""A copy of a GGUF file in which there is what a config is made of, and neither vocabulary nor weights.

transformers reads a file's metadata item by item, and so takes a quarter of a minute for a vocabulary of 262,144
tokens, of which its config needs the number alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lamella.model_executor.models.config_gguf import ARCHITECTURE_KEY
from lamella.model_executor.weights.gguf_header import GgufHeader, SkippedStrings

_TOKENS_KEY = "tokenizer.ggml.tokens"
# Where the copy's data begins is its writer's to say.
_LEFT_OUT = (ARCHITECTURE_KEY, "general.alignment", _TOKENS_KEY)


def write_config_copy(header: GgufHeader, folder: Path) -> Path:
    """Writes the copy to `folder`: the file's metadata without lists of texts and the tokenizer's other lists, and its
    tensors' names, each with one number. Returns its path.

    Raises ModelLoadError for a file that does not say its architecture.
    """
    from gguf import GGUFValueType, GGUFWriter

    path = folder / header.path.name
    writer = GGUFWriter(path, header.fields().string(ARCHITECTURE_KEY))
    for key, value in header.metadata.items():
        if key not in _LEFT_OUT and not _is_left_out(key, value):
            writer.add_key_value(key, *_typed(value))
    tokens = header.metadata.get(_TOKENS_KEY)
    if isinstance(tokens, SkippedStrings):
        # transformers asks for its length alone, which a text has as well, and a text is read at once.
        writer.add_key_value(_TOKENS_KEY, "." * tokens.length, GGUFValueType.STRING)
    for name in header.tensors:
        writer.add_tensor(name, np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _is_left_out(key: str, value: Any) -> bool:
    is_list = isinstance(value, np.ndarray)
    return isinstance(value, SkippedStrings) or (is_list and (key.startswith("tokenizer.") or not value.size))


def _typed(value: Any) -> tuple[Any, Any, Any]:
    """The value, its type in a GGUF file, and for a list that of its items, wide enough for any."""
    from gguf import GGUFValueType

    def type_of(item: Any) -> Any:
        if isinstance(item, bool):
            return GGUFValueType.BOOL
        if isinstance(item, str):
            return GGUFValueType.STRING
        if isinstance(item, float):
            return GGUFValueType.FLOAT64
        return GGUFValueType.UINT64 if item > 0 else GGUFValueType.INT64

    if isinstance(value, np.ndarray):
        items = value.tolist()
        is_whole = value.dtype.kind in "iu"
        return items, GGUFValueType.ARRAY, GGUFValueType.INT64 if is_whole else type_of(items[0])
    return value, type_of(value), None
