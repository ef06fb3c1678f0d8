"""What a GGUF file says about its vocabulary, whatever kind of tokenizer it is for: tokens, types, merges and marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config_gguf import TOKENS_KEY
from lamella.model_executor.models.typed_fields import TypedFields

MERGES_KEY = "tokenizer.ggml.merges"
TYPES_KEY = "tokenizer.ggml.token_type"
SCORES_KEY = "tokenizer.ggml.scores"
TOKENIZER_ARRAYS = (TOKENS_KEY, MERGES_KEY)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_NAMES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
          "sep_token": "seperator_token_id", "pad_token": "padding_token_id", "cls_token": "cls_token_id",
          "mask_token": "mask_token_id"}  # fmt: skip
# Ends of a turn and of a message have keys of their own, and no name that templates use.
_UNNAMED = ("eot_token_id", "eom_token_id")
_MAX_TOKEN_ID = 2**32 - 1


def special_token_ids(fields: TypedFields) -> dict[str, int]:
    """Ids by transformers' names ("bos_token", ...), of those that the file states."""
    ids = {name: fields.optional_integer(f"tokenizer.ggml.{key}", high=_MAX_TOKEN_ID) for name, key in _NAMES.items()}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def stated_special_ids(fields: TypedFields, num_tokens: int) -> set[int]:
    """Every id that a key of its own makes special, the unnamed ends of turns and messages included.

    Raises ModelLoadError for an id that is none of `num_tokens`.
    """
    named = special_token_ids(fields)
    for name, token_id in named.items():
        if token_id >= num_tokens:
            raise ModelLoadError(f"{fields.place}: {name} is token {token_id}, but there are {num_tokens} tokens")
    unnamed = (fields.optional_integer(f"tokenizer.ggml.{key}", high=num_tokens - 1) for key in _UNNAMED)
    return {*named.values(), *(token_id for token_id in unnamed if token_id is not None)}


def token_types(fields: TypedFields, num_tokens: int) -> list[int] | list[None]:
    """The type of each token; None for all where the file has no types."""
    if TYPES_KEY not in fields:
        return [None] * num_tokens
    types = list(fields.integers(TYPES_KEY, low=-(2**31), high=2**32))
    if len(types) != num_tokens:
        raise ModelLoadError(f"{fields.place}: {TYPES_KEY} has {len(types)} entries for {num_tokens} tokens")
    return types


def stated_scores(fields: TypedFields, num_tokens: int) -> tuple[float, ...] | None:
    """The score of each token; None where the file has no scores."""
    if SCORES_KEY not in fields:
        return None
    scores = fields.numbers(SCORES_KEY)
    if len(scores) != num_tokens:
        raise ModelLoadError(f"{fields.place}: {SCORES_KEY} has {len(scores)} entries for {num_tokens} tokens")
    return scores


def ids_by_token(fields: TypedFields, tokens: Sequence[str]) -> dict[str, int]:
    """Token -> id. Raises ModelLoadError where a token is there twice."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise ModelLoadError(f"{fields.place}: {TOKENS_KEY} has a token twice: {_first_repeated(tokens)!r:.80}")
    return vocab


def stated_merges(fields: TypedFields) -> list[tuple[str, str]] | None:
    """The merges in the file, "left right" each; None where it has none."""
    if MERGES_KEY not in fields:
        return None
    merges = []
    for index, merge in enumerate(fields.strings(MERGES_KEY)):
        left, space, right = merge.partition(" ")
        if not space or not left or not right or " " in right:
            raise ModelLoadError(f"{fields.place}: {MERGES_KEY}[{index}]={merge!r:.80}: must be two tokens and a space")
        merges.append((left, right))
    return merges


def added_token(token_id: int, token: str, *, special: bool) -> dict[str, Any]:
    """The tokenizers JSON of a token that is cut out of a text before BPE sees it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": token, **flags, "special": special}


def affix_post_processor(
    fields: TypedFields, tokens: Sequence[str], *, adds_bos: bool, adds_eos: bool = False
) -> dict[str, Any]:
    """The tokenizers JSON that puts bos before and eos after a text where the file wants them.

    adds_bos, adds_eos: whether a file that does not say wants one.
    """
    ids = special_token_ids(fields)

    def affix(name: str, default: bool) -> tuple[str, int] | None:
        wanted = fields.boolean(f"tokenizer.ggml.add_{name}", default)
        return (tokens[ids[name]], ids[name]) if wanted and name in ids else None

    return _template_post_processor(affix("bos_token", adds_bos), affix("eos_token", adds_eos))


def _template_post_processor(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> dict[str, Any]:
    """bos and eos: (token, id), or None."""

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


def _first_repeated(tokens: Sequence[str]) -> str:
    seen: set[str] = set()
    return next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
