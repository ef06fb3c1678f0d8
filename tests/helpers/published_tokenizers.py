"""Byte-level tokenizers put together by hand, as oracles for those that lamella makes of a GGUF file.

The vocabulary and the merges are the file's, read by the gguf package; normalizer, pre-tokenizer and decoder are those
of the tokenizer.json that the models' authors published (SmolLM2-135M-Instruct; Qwen2.5-Coder-0.5B-Instruct).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers

_CONTROL, _USER_DEFINED = 3, 4
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def read_fields(path: Path) -> dict[str, Any]:
    """A GGUF file's metadata as the gguf package reads it; read once, because that takes seconds."""
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def published_tokenizer(fields: dict[str, Any]) -> transformers.PreTrainedTokenizerFast:
    """The tokenizer of a file whose `tokenizer.ggml.pre` is "smollm" or "qwen2", with its chat template.

    fields: from `read_fields`.
    """
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    if fields["tokenizer.ggml.pre"] == "qwen2":
        backend.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(tokenizers.Regex(_QWEN2_WORDS), behavior="isolated")
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, rest])
    else:
        digits = pre_tokenizers.Digits(individual_digits=True)
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    backend.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            added = tokenizers.AddedToken(token, normalized=False, special=kind == _CONTROL)
            (backend.add_special_tokens if kind == _CONTROL else backend.add_tokens)([added])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )
