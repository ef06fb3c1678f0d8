"""A Llama or Qwen2 model of transformers with a GGUF file's weights, for oracles: nothing here is lamella's.

Values are what the gguf package dequantises, in float32. Configs are put together from the file's metadata.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.helpers.published_tokenizers import read_fields

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def gguf_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """The file's tensors in float32 by transformers' names, with Llama's query and key rows back in its order."""
    fields = read_fields(path)
    arch = fields["general.architecture"]
    heads = {
        "attn_q": fields[f"{arch}.attention.head_count"],
        "attn_k": fields[f"{arch}.attention.head_count_kv"],
    }
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        stem, suffix = tensor.name.rsplit(".", 1)
        shape = [int(size) for size in tensor.shape[::-1]]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if arch == "llama" and part in heads:
                values = _halves(values, heads[part])
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"
        else:
            name = f"{_TOP_NAMES[stem]}.{suffix}"
        state[name] = torch.from_numpy(np.ascontiguousarray(values))
    return state


def _halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's converter puts the two rows that rotate together side by side; transformers has them half a head
    apart. rows: [num_heads * head_dim, hidden_size]."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def oracle_config(path: Path, **changes: Any) -> Any:
    """transformers' config of the file; with `sliding_window` among `changes`, a Llama file is a Mistral model, whose
    layers all slide."""
    fields = read_fields(path)
    arch = fields["general.architecture"]

    def get(key: str) -> Any:
        return fields[f"{arch}.{key}"]

    kinds = {"qwen2": transformers.Qwen2Config, "llama": transformers.LlamaConfig}
    kind = transformers.MistralConfig if arch == "llama" and "sliding_window" in changes else kinds[arch]
    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    head_dim = get("embedding_length") // get("attention.head_count")
    return kind(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=get("attention.head_count"),
        num_key_value_heads=get("attention.head_count_kv"),
        max_position_embeddings=get("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": get("rope.freq_base")},
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        hidden_act="silu",
        **({} if arch == "qwen2" else {"head_dim": head_dim}),
        **changes,
    )


def load_oracle_model(path: Path, **changes: Any) -> Any:
    """The model in float32. changes: to its config, as in `oracle_config`."""
    config = oracle_config(path, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    state = gguf_state_dict(path)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    # Buffers that no file holds (rotary frequencies) were made without storage.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval().requires_grad_(False)
