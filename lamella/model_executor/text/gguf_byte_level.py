"""A GGUF file's byte-level BPE vocabulary (`tokenizer.ggml.model` is "gpt2"; Llama 3, SmolLM2, Qwen2).

Tokens are spelled in GPT-2's alphabet, which has a printable character for each of the 256 bytes. Merges are stored;
how a text is cut into words before them has a name, `tokenizer.ggml.pre`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.text import gguf_vocabulary as vocabulary
from lamella.model_executor.text.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_PRE_KEY = "tokenizer.ggml.pre"
# Some converters mark such tokens as normal ones, and older files mark nothing.
_MARKER = re.compile(r"<\|[^\s<>]*\|>")


def byte_level_document(fields: TypedFields, spelled: Sequence[str]) -> dict[str, Any]:
    """It tokenizes as the tokenizer.json of the model that the file was made of. spelled: the file's tokens.

    Tokens typed unused only fill the vocabulary up to the model's width: the model's own tokenizer lacks them, and so
    does this one.
    """
    rule = _pre_tokenizer(fields)
    merges = vocabulary.stated_merges(fields)
    if merges is None:
        raise fields.error(vocabulary.MERGES_KEY, "a list of merges, which byte-level BPE cannot do without")
    stated_special = vocabulary.stated_special_ids(fields, len(spelled))
    types = vocabulary.token_types(fields, len(spelled))
    vocab = vocabulary.ids_by_token(fields, spelled)
    merged = {left + right for left, right in merges}
    added = []
    for (token, token_id), kind in zip(tuple(vocab.items()), types, strict=True):
        is_loose_marker = kind in (vocabulary.NORMAL, None) and token not in merged and bool(_MARKER.fullmatch(token))
        if kind in (vocabulary.CONTROL, vocabulary.UNKNOWN) or token_id in stated_special or is_loose_marker:
            added.append(vocabulary.added_token(token_id, token, special=True))
        elif kind == vocabulary.USER_DEFINED:
            added.append(vocabulary.added_token(token_id, token, special=False))
        elif kind == vocabulary.UNUSED and token not in merged:
            del vocab[token]
    return {
        "added_tokens": added,
        **rule.document(),
        "post_processor": vocabulary.affix_post_processor(fields, spelled, adds_bos=rule.adds_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule.ignores_merges,
            "vocab": vocab,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def _pre_tokenizer(fields: TypedFields) -> PreTokenizer:
    # There is no default: a wrong rule would give other tokens and worse answers without any error.
    return PRE_TOKENIZERS[fields.string(_PRE_KEY, choices=tuple(PRE_TOKENIZERS))]
