"""The vocabulary in a GGUF file as a tokenizers JSON document.

Gemma's is a SentencePiece BPE vocabulary: spaces are written as U+2581, unknown characters fall back to byte
tokens, and merges are not stored, because the order of the vocabulary implies them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config_gguf import TOKENS_KEY
from lamella.model_executor.weights.gguf_header import GgufHeader

_MERGES_KEY = "tokenizer.ggml.merges"
TOKENIZER_ARRAYS = (TOKENS_KEY, _MERGES_KEY)
_SPACE = "\u2581"
_CONTROL, _USER_DEFINED = 3, 4
_NAMES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
          "pad_token": "padding_token_id"}  # fmt: skip
_MASK = "<mask>"  # GGUF has no key for it; transformers' GemmaTokenizer registers it by name


def special_token_ids(header: GgufHeader) -> dict[str, int]:
    """Ids by transformers' names ("bos_token", ...), of those that the file states."""
    ids = {name: header.metadata.get(f"tokenizer.ggml.{key}") for name, key in _NAMES.items()}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def tokenizer_json(header: GgufHeader) -> str:
    """A document for `tokenizers.Tokenizer.from_str`; it tokenizes as transformers' Gemma tokenizer does.

    header: read with string_arrays=TOKENIZER_ARRAYS.
    Raises ModelLoadError when the file has no vocabulary or one of another kind.
    """
    kind = header.metadata.get("tokenizer.ggml.model")
    spelled = header.metadata.get(TOKENS_KEY)
    if kind != "llama" or not isinstance(spelled, list):
        raise ModelLoadError(
            f"{header.path}: tokenizer {kind!r} cannot be built from GGUF; known: 'llama' (SentencePiece)"
        )
    for name, token_id in special_token_ids(header).items():
        if token_id >= len(spelled):
            raise ModelLoadError(f"{header.path}: {name} is token {token_id}, but there are {len(spelled)} tokens")
    # Runs of spaces are stored as spaces, but looked up after the normalizer has replaced them.
    tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in spelled]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = header.metadata.get(_MERGES_KEY)
    unknown = special_token_ids(header).get("unk_token")
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(header, spelled, vocab),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "post_processor": _template_post_processor(*_affixes(header, tokens)),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges if isinstance(merges, list) else _implied_merges(vocab),
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _template_post_processor(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> dict[str, Any]:
    """The tokenizers JSON that puts `bos` before and `eos` after a text; each is (token, id) or None."""

    def special(token: tuple[str, int], type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": token[0], "type_id": type_id}}

    def wrapped(sequence: str, type_id: int) -> list[dict[str, Any]]:
        middle = {"Sequence": {"id": sequence, "type_id": type_id}}
        before = [special(bos, type_id)] if bos else []
        return [*before, middle, *([special(eos, type_id)] if eos else [])]

    return {
        "type": "TemplateProcessing",
        "single": wrapped("A", 0),
        "pair": wrapped("A", 0) + wrapped("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [token_id], "tokens": [token]} for token, token_id in filter(None, (bos, eos))
        },
    }


def _affixes(header: GgufHeader, tokens: Sequence[str]) -> list[tuple[str, int] | None]:
    ids = special_token_ids(header)

    def affix(name: str, default: bool) -> tuple[str, int] | None:
        # SentencePiece files that do not say get a bos, as in llama.cpp.
        wanted = header.metadata.get(f"tokenizer.ggml.add_{name}", default)
        return (tokens[ids[name]], ids[name]) if wanted and name in ids else None

    return [affix("bos_token", True), affix("eos_token", False)]


def _implied_merges(vocab: Mapping[str, int]) -> list[str] | list[tuple[str, str]]:
    """Every way to cut a token in two tokens, best merge first: by the whole's id, then the longer left part.

    As strings "left right" where no token holds a space: that form is read in half the time.
    """
    merges = [
        (token[:cut], token[cut:])
        for token in vocab
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    if any(" " in token for token in vocab):
        return merges
    return [f"{left} {right}" for left, right in merges]


def _added_tokens(header: GgufHeader, spelled: Sequence[str], vocab: Mapping[str, int]) -> list[dict[str, Any]]:
    """Tokens that are cut out of a text before BPE sees it."""
    types = header.metadata.get("tokenizer.ggml.token_type", ())
    kinds = dict(zip(spelled, types, strict=False))  # old files may lack the types
    special = {spelled[token_id] for token_id in special_token_ids(header).values()} | {_MASK}
    special |= {token for token, kind in kinds.items() if kind == _CONTROL}
    plain = {token for token, kind in kinds.items() if kind == _USER_DEFINED} - special
    found = sorted((vocab[token], token) for token in special | plain if token in vocab)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": token_id, "content": token, **flags, "special": token in special} for token_id, token in found]
