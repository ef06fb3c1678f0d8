"""Where the parity tests of Llama and Qwen2 find their models, and how they make windowed ones of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tests.helpers.gguf_oracle import gguf_state_dict, oracle_config
from tests.helpers.published_tokenizers import published_tokenizer, read_fields

QWEN2_VARIABLE = "LAMELLA_QWEN2_GGUF"
FIXTURES = Path(__file__).parents[1] / "fixtures"


def qwen2_path() -> Path:
    """The file that the fixtures of Qwen2 were made from, as README.md says how to get it."""
    path = Path(os.environ.get(QWEN2_VARIABLE, ""))
    assert path.suffix == ".gguf", f"set {QWEN2_VARIABLE} to the path of the file that tests/parity/README.md names"
    return path


def write_folder(gguf_path: Path, folder: Path, **changes: Any) -> Path:
    """The GGUF's model in Hugging Face layout, float32, with `changes` to its config, as in `oracle_config`.

    config.json has no `layer_types`, as checkpoints of these families have none: the layers' windows follow from the
    fields that `changes` sets.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = oracle_config(gguf_path, **changes)
    name = {"mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
    fields = config.to_dict() | {"architectures": [name[config.model_type]], "dtype": "float32"}
    fields.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    save_file(gguf_state_dict(gguf_path), folder / "model.safetensors", metadata={"format": "pt"})
    published_tokenizer(read_fields(gguf_path)).save_pretrained(folder)
    return folder
