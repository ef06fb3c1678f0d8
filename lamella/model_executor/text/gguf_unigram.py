"""A GGUF file's Unigram vocabulary (`tokenizer.ggml.model` is "t5"): pieces with log probabilities, of which the
likeliest sequence is taken. There are no merges.

What an absent key means is what llama.cpp makes of it (src/llama-vocab.cpp): a space before a text, runs of spaces as
one, an end token after it and no bos.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.text import gguf_vocabulary as vocabulary

_CHARACTERS_KEY = "tokenizer.ggml.precompiled_charsmap"
_SPACE = "\u2581"


def unigram_document(fields: TypedFields, spelled: Sequence[str]) -> dict[str, Any]:
    """It tokenizes as transformers' Unigram tokenizers with the file's vocabulary. spelled: the file's tokens."""
    stated_special = vocabulary.stated_special_ids(fields, len(spelled))
    unknown = vocabulary.special_token_ids(fields).get("unk_token")
    if unknown is None:
        raise fields.error(
            "tokenizer.ggml.unknown_token_id", "a token's number, for Unigram has no other way out of its vocabulary"
        )
    scores = vocabulary.stated_scores(fields, len(spelled))
    if scores is None:
        raise fields.error(vocabulary.SCORES_KEY, "a number for each token, which Unigram cannot do without")
    vocab = vocabulary.ids_by_token(fields, spelled)
    types = vocabulary.token_types(fields, len(spelled))
    added = []
    for (token, token_id), kind in zip(vocab.items(), types, strict=True):
        if kind in (vocabulary.CONTROL, vocabulary.UNKNOWN) or token_id in stated_special:
            added.append(vocabulary.added_token(token_id, token, special=True))
        elif kind == vocabulary.USER_DEFINED:
            added.append(vocabulary.added_token(token_id, token, special=False))
    has_bytes = vocabulary.BYTE in types
    has_prefix = fields.boolean("tokenizer.ggml.add_space_prefix", True)
    spaces = {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "always" if has_prefix else "never",
        "split": True,
    }
    is_split = fields.boolean("tokenizer.ggml.remove_extra_whitespaces", True)
    cuts = [{"type": "WhitespaceSplit"}, spaces] if is_split else [spaces]
    return {
        "added_tokens": added,
        "normalizer": _characters(fields),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "post_processor": vocabulary.affix_post_processor(fields, spelled, adds_bos=False, adds_eos=True),
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, spaces]} if has_bytes else spaces,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[token, score] for token, score in zip(spelled, scores, strict=True)],
            "byte_fallback": has_bytes,
        },
    }


def _characters(fields: TypedFields) -> dict[str, Any] | None:
    """SentencePiece's table of characters that others take the place of, if the file has one."""
    if _CHARACTERS_KEY not in fields:
        return None
    table = fields.raw(_CHARACTERS_KEY)
    if not isinstance(table, np.ndarray) or table.dtype.itemsize != 1 or table.dtype == np.bool_:
        raise ModelLoadError(f"{fields.place}: {_CHARACTERS_KEY} must be an array of bytes")
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table.tobytes()).decode("ascii")}
