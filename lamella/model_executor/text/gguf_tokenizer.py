"""The vocabulary in a GGUF file as a tokenizers JSON document."""

from __future__ import annotations

import json

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config_gguf import TOKENS_KEY
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.text.chat import ChatTemplate
from lamella.model_executor.text.gguf_byte_level import byte_level_document
from lamella.model_executor.text.gguf_sentencepiece import sentencepiece_document
from lamella.model_executor.text.gguf_unigram import unigram_document

_SENTENCEPIECE, _BYTE_LEVEL, _UNIGRAM, _GEMMA4 = "llama", "gpt2", "t5", "gemma4"


def tokenizer_json(fields: TypedFields, template: ChatTemplate | None = None) -> str:
    """A document for `tokenizers.Tokenizer.from_str`.

    fields: the file's metadata, read with string_arrays=TOKENIZER_ARRAYS. template: its chat template, which names
    markers that the file may not mark as such.
    Raises ModelLoadError when the file has no vocabulary, one of another kind, or a key of the wrong type or range.
    """
    kind = fields.optional_string("tokenizer.ggml.model")
    if kind not in (_SENTENCEPIECE, _BYTE_LEVEL, _UNIGRAM, _GEMMA4) or not isinstance(fields.raw(TOKENS_KEY), list):
        raise ModelLoadError(
            f"{fields.place}: tokenizer {kind!r} cannot be built from GGUF; known: {_SENTENCEPIECE!r} and {_GEMMA4!r} "
            f"(SentencePiece), {_BYTE_LEVEL!r} (byte-level BPE), {_UNIGRAM!r} (Unigram), each with {TOKENS_KEY}"
        )
    tokens = list(fields.strings(TOKENS_KEY))
    if kind == _BYTE_LEVEL:
        document = byte_level_document(fields, tokens)
    elif kind == _UNIGRAM:
        document = unigram_document(fields, tokens)
    else:
        document = sentencepiece_document(fields, tokens, template, is_gemma4=kind == _GEMMA4)
    whole = {"version": "1.0", "truncation": None, "padding": None, **document}
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
