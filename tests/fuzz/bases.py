"""The models that mutants are made of: small, but with every kind of file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fuzz.families import write_family_bases
from tests.helpers.tiny_gemma import CHAT_TEMPLATE, save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf

NUM_LAYERS = 2


def write_bases(base: Path) -> None:
    """A folder "hf" with weights in shards, a folder "gguf" with the same model as one file, and those of families."""
    write_family_bases(base)
    folder = base / "hf"
    folder.mkdir(parents=True)
    model = save_tiny_gemma(
        folder,
        max_shard_size="150KB",
        num_hidden_layers=NUM_LAYERS,
        sliding_window_pattern=2,
        final_logit_softcapping=30.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    specials = {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "lstrip": False}, "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(specials, indent=1))
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 5]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
    (base / "gguf").mkdir()
    save_tiny_gguf(base / "gguf" / "model.gguf", model, rope__scaling__type="linear", rope__scaling__factor=4.0)
