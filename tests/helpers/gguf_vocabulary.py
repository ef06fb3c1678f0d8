"""GGUF files that hold a vocabulary and no tensors."""

from __future__ import annotations

CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if tools %}<|tool|><custom>{% endif %}"
)


def save(path, tokens, types, names=("bos", "eos", "unk", "pad"), **keys):
    import gguf

    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(128)
    writer.add_block_count(1)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    if types is not None:
        writer.add_token_types(types)
    for name in names:
        getattr(writer, f"add_{name}_token_id")({"bos": 2, "eos": 1, "unk": 3, "pad": 0}[name])
    for key, token_id in keys.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", token_id)
    writer.add_chat_template(CHAT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
