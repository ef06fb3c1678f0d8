"""A GGUF file's SentencePiece BPE vocabulary (`tokenizer.ggml.model` is "llama" or "gemma4"; Gemma, Llama 2, Mistral).

Spaces are written as U+2581 and unknown characters fall back to byte tokens. Merges are not stored: the vocabulary
implies them, in the order of its scores; Gemma's scores say nothing, and the order of its tokens counts. Gemma 4's
merges are stored. All but Gemma have a text begin as if a space stood before it; Phi 3 has that space also where a text
begins with one, and after every special token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from lamella.model_executor.models.config_gguf import ARCHITECTURE_KEY
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.text import gguf_vocabulary as vocabulary
from lamella.model_executor.text.chat import ChatTemplate

_SPACE = "\u2581"
_BOS_KEY = "tokenizer.ggml.add_bos_token"
_ALWAYS_PREFIXED = "phi3"
_MASK = "<mask>"  # transformers' GemmaTokenizer registers it by name
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Where a file has no type for a token, its spelling tells markers from HTML tags, which Gemma also keeps whole.
_MARKER = re.compile(r"<\|.*\|>|<unused\d+>|<(?:start|end)_of_turn>|<(?:pad|eos|bos|unk|mask)>", re.DOTALL)


def sentencepiece_document(
    fields: TypedFields, spelled: Sequence[str], template: ChatTemplate | None, *, is_gemma4: bool = False
) -> dict[str, Any]:
    """It tokenizes as the tokenizer that transformers makes of the file. spelled: the file's tokens. is_gemma4: that is
    the file's kind of tokenizer."""
    stated_special = vocabulary.stated_special_ids(fields, len(spelled))
    # Runs of spaces are stored as spaces, but looked up after spaces have been replaced.
    tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in spelled]
    vocab = vocabulary.ids_by_token(fields, tokens)
    architecture = fields.optional_string(ARCHITECTURE_KEY) or "gemma"
    is_gemma = is_gemma4 or architecture.startswith("gemma")
    stated = vocabulary.stated_merges(fields)
    implied = _implied_merges(vocab, None if is_gemma else vocabulary.stated_scores(fields, len(tokens)))
    if is_gemma4 and stated is None:
        raise fields.error(vocabulary.MERGES_KEY, "a list of merges, which Gemma 4's vocabulary does not imply")
    unknown = vocabulary.special_token_ids(fields).get("unk_token")
    merged = {left + right for left, right in implied}
    return {
        "added_tokens": _added_tokens(fields, spelled, vocab, merged, stated_special, template),
        **_space_rules(
            has_prefix=fields.boolean("tokenizer.ggml.add_space_prefix", not is_gemma),
            is_always=architecture == _ALWAYS_PREFIXED,
        ),
        "post_processor": _affixes(fields, tokens, is_gemma4),
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


def _affixes(fields: TypedFields, tokens: Sequence[str], is_gemma4: bool) -> dict[str, Any]:
    """Where a file does not say, texts get a bos, as in llama.cpp. Files of Gemma 4 say so, but the model's own
    tokenizer leaves that to the chat template."""
    if is_gemma4:
        fields = TypedFields({key: fields.raw(key) for key in fields if key != _BOS_KEY}, fields.place)
    return vocabulary.affix_post_processor(fields, tokens, adds_bos=not is_gemma4)


def _space_rules(*, has_prefix: bool, is_always: bool) -> dict[str, Any]:
    """How spaces become U+2581 and come back. has_prefix: a text, but no part after a special token, gets a space
    before it, which decoding takes off again. is_always: such parts, too, and what begins with a space."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False}
    if has_prefix and is_always:
        normalizer: Any = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replace]}
    else:
        normalizer = None if has_prefix else replace
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "normalizer": normalizer,
        "pre_tokenizer": prefix if has_prefix and not is_always else None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([strip] if has_prefix else []),
            ],
        },
    }


def _implied_merges(vocab: Mapping[str, int], scores: Sequence[float] | None) -> list[tuple[str, str]]:
    """Every way to cut a token in two tokens, best merge first: by the whole's score, or else its id, then the longer
    left part."""
    merges = [
        (token[:cut], token[cut:])
        for token in vocab
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    if scores is not None:
        merges.sort(key=lambda merge: (-scores[vocab[merge[0] + merge[1]]], -len(merge[0]), -len(merge[1])))
    return merges


def _written_merges(
    merges: Sequence[tuple[str, str]], vocab: Iterable[str]
) -> Sequence[str] | Sequence[tuple[str, str]]:
    """The merges as strings "left right" where no token holds a space, because that form is read in half the time."""
    if any(" " in token for token in vocab):
        return merges
    return [f"{left} {right}" for left, right in merges]


def _added_tokens(
    fields: TypedFields,
    spelled: Sequence[str],
    vocab: Mapping[str, int],
    merged: Collection[str],
    stated_special: Collection[int],
    template: ChatTemplate | None,
) -> list[dict[str, Any]]:
    """Tokens that are cut out of a text before BPE sees it.

    Files mark them as control, unknown or user-defined tokens. Some converters mark turn markers as normal ones, and
    older files mark nothing; but a token of several characters that no two tokens make up would never come out of BPE,
    so it is one of these as well. merged: the tokens that two others make up.
    """
    types = vocabulary.token_types(fields, len(spelled))
    stated = {spelled[token_id] for token_id in stated_special} | {_MASK}
    templates = [template] if isinstance(template, str) else list((template or {}).values())
    found = []
    for token, kind in zip(spelled, types, strict=True):
        if token not in vocab:
            continue  # a run of spaces, which BPE makes up
        is_loose = len(token) > 1 and token not in merged and not _BYTE_TOKEN.fullmatch(token)
        is_run = kind is None and len(set(token)) == 1 and token.isspace()
        if kind in (vocabulary.CONTROL, vocabulary.UNKNOWN) or token in stated:
            special = True
        elif kind in (vocabulary.NORMAL, None) and (is_loose or is_run):
            special = bool(_MARKER.fullmatch(token)) or (is_loose and any(token in text for text in templates))
        elif kind == vocabulary.USER_DEFINED:
            special = False
        else:
            continue
        found.append(vocabulary.added_token(vocab[token], token, special=special))
    return found
