"""The vocabulary in a GGUF file as a tokenizers JSON document.

Gemma's is a SentencePiece BPE vocabulary: spaces are written as U+2581, unknown characters fall back to byte
tokens, and merges are not stored, because the order of the vocabulary implies them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config_gguf import TOKENS_KEY
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.text.chat import ChatTemplate

_MERGES_KEY = "tokenizer.ggml.merges"
_TYPES_KEY = "tokenizer.ggml.token_type"
TOKENIZER_ARRAYS = (TOKENS_KEY, _MERGES_KEY)
_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_NAMES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
          "sep_token": "seperator_token_id", "pad_token": "padding_token_id", "cls_token": "cls_token_id",
          "mask_token": "mask_token_id"}  # fmt: skip
# Ends of a turn and of a message have keys of their own, and no name that templates use.
_UNNAMED = ("eot_token_id", "eom_token_id")
_MASK = "<mask>"  # transformers' GemmaTokenizer registers it by name
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Where a file has no type for a token, its spelling tells markers from HTML tags, which Gemma also keeps whole.
_MARKER = re.compile(r"<\|.*\|>|<unused\d+>|<(?:start|end)_of_turn>|<(?:pad|eos|bos|unk|mask)>", re.DOTALL)


def special_token_ids(fields: TypedFields) -> dict[str, int]:
    """Ids by transformers' names ("bos_token", ...), of those that the file states."""
    ids = {name: fields.optional_integer(f"tokenizer.ggml.{key}", high=2**32 - 1) for name, key in _NAMES.items()}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def tokenizer_json(fields: TypedFields, template: ChatTemplate | None = None) -> str:
    """A document for `tokenizers.Tokenizer.from_str`; it tokenizes as transformers' Gemma tokenizer does.

    fields: the file's metadata, read with string_arrays=TOKENIZER_ARRAYS. template: its chat template, which names
    markers that the file may not mark as such.
    Raises ModelLoadError when the file has no vocabulary, one of another kind, or a key of the wrong type or range.
    """
    kind = fields.optional_string("tokenizer.ggml.model")
    spelled: Any = fields.raw(TOKENS_KEY)
    if kind != "llama" or not isinstance(spelled, list):
        raise ModelLoadError(
            f"{fields.place}: tokenizer {kind!r} cannot be built from GGUF; known: 'llama' (SentencePiece)"
        )
    for name, token_id in special_token_ids(fields).items():
        if token_id >= len(spelled):
            raise ModelLoadError(f"{fields.place}: {name} is token {token_id}, but there are {len(spelled)} tokens")
    # Runs of spaces are stored as spaces, but looked up after the normalizer has replaced them.
    tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in spelled]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise ModelLoadError(f"{fields.place}: {TOKENS_KEY} has a token twice: {_first_repeated(tokens)!r:.80}")
    stated = _stated_merges(fields)
    implied = _implied_merges(vocab)
    unknown = special_token_ids(fields).get("unk_token")
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(fields, spelled, vocab, {left + right for left, right in implied}, template),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "post_processor": _template_post_processor(*_affixes(fields, tokens)),
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
            "merges": _written_merges(implied if stated is None else stated, vocab),
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


def _affixes(fields: TypedFields, tokens: Sequence[str]) -> list[tuple[str, int] | None]:
    ids = special_token_ids(fields)

    def affix(name: str, default: bool) -> tuple[str, int] | None:
        # SentencePiece files that do not say get a bos, as in llama.cpp.
        wanted = fields.boolean(f"tokenizer.ggml.add_{name}", default)
        return (tokens[ids[name]], ids[name]) if wanted and name in ids else None

    return [affix("bos_token", True), affix("eos_token", False)]


def _stated_merges(fields: TypedFields) -> list[tuple[str, str]] | None:
    """The merges in the file, "left right" each; None where it has none."""
    if _MERGES_KEY not in fields:
        return None
    merges = []
    for index, merge in enumerate(fields.strings(_MERGES_KEY)):
        left, space, right = merge.partition(" ")
        if not space or not left or not right or " " in right:
            raise ModelLoadError(
                f"{fields.place}: {_MERGES_KEY}[{index}]={merge!r:.80}: must be two tokens and a space"
            )
        merges.append((left, right))
    return merges


def _implied_merges(vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to cut a token in two tokens, best merge first: by the whole's id, then the longer left part."""
    return [
        (token[:cut], token[cut:])
        for token in vocab
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]


def _written_merges(
    merges: Sequence[tuple[str, str]], vocab: Iterable[str]
) -> Sequence[str] | Sequence[tuple[str, str]]:
    """As strings "left right" where no token holds a space: that form is read in half the time."""
    if any(" " in token for token in vocab):
        return merges
    return [f"{left} {right}" for left, right in merges]


def _added_tokens(
    fields: TypedFields,
    spelled: Sequence[str],
    vocab: Mapping[str, int],
    merged: Collection[str],
    template: ChatTemplate | None,
) -> list[dict[str, Any]]:
    """Tokens that are cut out of a text before BPE sees it.

    Files mark them as control, unknown or user-defined tokens. Some converters mark turn markers as normal ones, and
    older files mark nothing; but a token of several characters that no two tokens make up would never come out of BPE,
    so it is one of these as well. merged: the tokens that two others make up.
    """
    types = _token_types(fields, len(spelled))
    stated = {spelled[token_id] for token_id in special_token_ids(fields).values()} | {_MASK}
    for key in _UNNAMED:
        token_id = fields.optional_integer(f"tokenizer.ggml.{key}", high=len(spelled) - 1)
        stated |= set() if token_id is None else {spelled[token_id]}
    templates = [template] if isinstance(template, str) else list((template or {}).values())
    found = []
    for token, kind in zip(spelled, types, strict=True):
        if token not in vocab:
            continue  # a run of spaces, which BPE makes up
        is_loose = len(token) > 1 and token not in merged and not _BYTE_TOKEN.fullmatch(token)
        is_run = kind is None and len(set(token)) == 1 and token.isspace()
        if kind in (_CONTROL, _UNKNOWN) or token in stated:
            special = True
        elif kind in (_NORMAL, None) and (is_loose or is_run):
            special = bool(_MARKER.fullmatch(token)) or (is_loose and any(token in text for text in templates))
        elif kind == _USER_DEFINED:
            special = False
        else:
            continue
        found.append((vocab[token], token, special))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": token_id, "content": token, **flags, "special": special} for token_id, token, special in found]


def _token_types(fields: TypedFields, num_tokens: int) -> list[int] | list[None]:
    if _TYPES_KEY not in fields:
        return [None] * num_tokens
    types = list(fields.integers(_TYPES_KEY, low=-(2**31), high=2**32))
    if len(types) != num_tokens:
        raise ModelLoadError(f"{fields.place}: {_TYPES_KEY} has {len(types)} entries for {num_tokens} tokens")
    return types


def _first_repeated(tokens: Sequence[str]) -> str:
    seen: set[str] = set()
    return next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
