"""A tiny Gemma 3 model written as llama.cpp's converter writes one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

TOKEN_TYPES = {"normal": 1, "unknown": 2, "control": 3, "user_defined": 4, "byte": 6}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """The GGUF name of a transformers parameter ("model.layers.0.self_attn.q_proj.weight")."""
    stem = name.removeprefix("model.").removesuffix(".weight")
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"
    return f"{_TOP_NAMES[stem]}.weight"


def save_tiny_gguf(
    path: Path,
    model: Any,
    *,
    quantise: str = "F32",
    with_head: bool = False,
    tensors_in_part: int = 0,
    more_tensors: Mapping[str, np.ndarray] | None = None,
    **metadata: Any,
) -> dict[str, np.ndarray]:
    """Write a transformers Gemma 3 model as GGUF: matrices in `quantise` (a GGMLQuantizationType's name; rows must be
    whole blocks), norms as float32 1 + w. `metadata` adds or replaces keys (with "__" for "."), numbers as float32 when
    float and uint32 when int. with_head: store the output matrix, too. tensors_in_part: split the file, so that parts
    hold that many tensors each; `path` is then what their names are made of. more_tensors: written after the model's.
    Returns what was written, by GGUF name, before quantising."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "gemma3", split_max_tensors=tensors_in_part)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(config.sliding_window)
    tokens, types = tiny_vocabulary(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    for key, value in metadata.items():
        key = key.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    written = {}
    storage = gguf.GGMLQuantizationType[quantise]
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and not with_head:
            continue
        values = parameter.float().numpy()
        values = values + np.float32(1.0) if name.endswith("norm.weight") else values
        written[gguf_name(name)] = values
        if values.ndim == 1 or quantise == "F32":
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, storage), raw_dtype=storage)
    for name, values in (more_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def tiny_vocabulary(vocab_size: int) -> tuple[list[str], list[int]]:
    """A SentencePiece-like vocabulary: specials, 256 byte tokens, then pieces with the merges they imply."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"]
    types = [TOKEN_TYPES[kind] for kind in ("control", "control", "control", "unknown", "control")]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [TOKEN_TYPES["byte"]] * 256
    pieces = ["  ", "\u2581", "a", "b", "c", "ab", "bc", "abc", "\u2581a", "\u2581ab", "\u2581abc"]
    tokens += pieces
    types += [TOKEN_TYPES["normal"]] * len(pieces)
    while len(tokens) < vocab_size:
        tokens.append(f"<unused{len(tokens)}>")
        types.append(TOKEN_TYPES["control"])
    return tokens, types
