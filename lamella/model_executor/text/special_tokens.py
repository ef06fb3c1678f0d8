"""Which tokens of a model in Hugging Face layout are special, and by which names templates know them.

A folder may say so in tokenizer.json, tokenizer_config.json, special_tokens_map.json and added_tokens.json. They are
weighed as transformers 5 weighs them: tokenizer_config.json's `added_tokens_decoder`, where there is one, stands for
the two older files; otherwise special_tokens_map.json overrides what tokenizer_config.json says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from lamella.model_executor.models.typed_fields import TypedFields, is_text
from lamella.model_executor.models.typed_json import read_json_object

STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONFIG_FILE = "tokenizer_config.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
MAX_TOKENIZER_BYTES = 512 << 20
_MAX_TOKEN_ID = 2**31 - 1

# Special tokens that a tokenizer class of transformers has where a folder does not state them.
_CLASS_TOKENS = {
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    }
}
_CLASS_OF_MODEL_PREFIX = {"gemma": "GemmaTokenizer"}


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is cut out of a text before the tokenizer's model sees it. normalized: None means the opposite of
    `special`, as in transformers."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False

    def for_backend(self, *, is_named: bool) -> tokenizers.AddedToken:
        """is_named: it is special, whatever its own flags say."""
        return tokenizers.AddedToken(
            self.content,
            single_word=self.single_word,
            lstrip=self.lstrip,
            rstrip=self.rstrip,
            normalized=not self.special if self.normalized is None else self.normalized,
            special=self.special or is_named,
        )


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """named: by the names that templates use, standard ones first. extra: special without a name.
    added: what the files add to tokenizer.json, in the order of the ids that they state."""

    named: Mapping[str, AddedToken]
    extra: tuple[AddedToken, ...]
    added: tuple[AddedToken, ...]

    @property
    def names(self) -> dict[str, str]:
        return {name: token.content for name, token in self.named.items()}

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Register with `backend` what its own file does not have: as transformers does, tokens that are in the
        vocabulary keep their id, and others are put behind it."""
        present = {token.content for token in backend.get_added_tokens_decoder().values()}
        named = {token.content for token in self.named.values()}
        tokens = {token.content: token for token in self.added}
        for token in (*self.named.values(), *self.extra):
            if token.content not in present:
                tokens.setdefault(token.content, token)
        if tokens:
            backend.add_tokens([token.for_backend(is_named=token.content in named) for token in tokens.values()])


def read_special_tokens(folder: Path, config: TypedFields, vocabulary: tokenizers.Tokenizer) -> SpecialTokens:
    """What `folder` says. config: its tokenizer_config.json, without fields if there is none.

    Raises ModelLoadError naming file and field for what cannot be read as tokens.
    """
    named = _named_tokens(config)
    own_names, extra = _extra_tokens(config)
    added: dict[int, AddedToken] = {}
    present: list[AddedToken] = []
    if config.has_value("added_tokens_decoder"):
        added = _added_by_id(config.object("added_tokens_decoder"))
    else:
        special_map = _optional_object(folder / "special_tokens_map.json")
        for name in special_map:
            if _is_name(special_map, name):
                named.pop(name, None)
        named |= {name: _as_special(token) for name, token in _named_tokens(special_map).items()}
        standard = {token.content for name, token in named.items() if name in STANDARD_NAMES}
        map_names, map_extra = _extra_tokens(special_map)
        if special_map.has_value("extra_special_tokens"):
            extra = [*extra, *(_as_special(token) for token in map_extra if token not in extra)]
        older = folder / "added_tokens.json"
        if older.exists():
            added = _added_by_text(older, standard | {token.content for token in extra})
            # tokenizer.json is asked for the ids it states only here, because it takes long to read.
            stated = read_json_object(folder / "tokenizer.json", max_bytes=MAX_TOKENIZER_BYTES).objects("added_tokens")
            for token_id in [token.integer("id", high=_MAX_TOKEN_ID) for token in stated]:
                added.pop(token_id, None)
        if not extra and not own_names:  # the older of the two fields counts only where the newer one has nothing
            extra = [_as_special(token) for token in map_extra]
        own_names |= map_names
        for _, known in sorted(vocabulary.get_added_tokens_decoder().items(), key=lambda item: item[0]):
            present.append(AddedToken(known.content, **{flag: getattr(known, flag) for flag in _FLAGS}))
    named |= own_names
    for name, content in _class_tokens(folder, config).items():
        if name not in named and vocabulary.token_to_id(content) is not None:
            named[name] = AddedToken(content, special=True)
    all_added = (*present, *(token for _, token in sorted(added.items(), key=lambda item: item[0])))
    by_text = {token.content: token for token in all_added}
    ordered = [
        *(name for name in STANDARD_NAMES if name in named),
        *(name for name in named if name not in STANDARD_NAMES),
    ]
    return SpecialTokens(
        named={name: by_text.get(named[name].content, named[name]) for name in ordered},
        extra=tuple(extra),
        added=all_added,
    )


def _named_tokens(fields: TypedFields) -> dict[str, AddedToken]:
    """By name, those given as objects first: transformers registers them in this order."""
    names = sorted((name for name in fields if _is_name(fields, name)), key=lambda name: is_text(fields.raw(name)))
    return {name: token for name in names if (token := _token(fields, name))}


def _as_special(token: AddedToken) -> AddedToken:
    return dataclasses.replace(token, special=True)


def _is_name(fields: TypedFields, name: str) -> bool:
    """Whether a field names a special token: the standard ones, and whatever else a model calls something_token."""
    if name in STANDARD_NAMES:
        return True
    return name.endswith("_token") and isinstance(fields.raw(name), (str, Mapping))


def _token(fields: TypedFields, name: str) -> AddedToken | None:
    """A token given by its text, or as an object with its text and flags; None for null and the empty text."""
    value = fields.raw(name)
    if value is None or value == "":
        return None
    if is_text(value):
        return AddedToken(value, special=True)
    if not isinstance(value, Mapping):
        raise fields.error(name, "the text of a token, or an object with its content and flags")
    return _token_object(fields.object(name))


def _token_object(fields: TypedFields) -> AddedToken:
    content = fields.string("content")
    if not content:
        raise fields.error("content", "the text of a token, of at least one character")
    flags = {flag: fields.boolean(flag) for flag in _FLAGS if flag in fields}
    return AddedToken(content, **flags)


def _extra_tokens(fields: TypedFields) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """(tokens with a name of the model's own, tokens without) of the two fields that have been used for these."""
    key = next((key for key in _EXTRA if fields.raw(key)), None)
    if key is None:
        return {}, []
    value = fields.raw(key)
    if isinstance(value, Mapping):
        given = fields.object(key)
        return {name: token for name in given if (token := _token(given, name))}, []
    if not isinstance(value, list):
        raise fields.error(key, "a list of tokens, or an object of named tokens")
    items = TypedFields({f"[{index}]": item for index, item in enumerate(value)}, fields.place, fields.prefix + key)
    return {}, [token for name in items if (token := _token(items, name))]


def _added_by_id(fields: TypedFields) -> dict[int, AddedToken]:
    added = {}
    for key in fields:
        if not key.isascii() or not key.isdigit() or int(key[:11]) > _MAX_TOKEN_ID:
            raise fields.error(key, f"named by a token id from 0 to {_MAX_TOKEN_ID}")
        added[int(key)] = _token_object(fields.object(key))
    return added


def _added_by_text(path: Path, special: set[str]) -> dict[int, AddedToken]:
    """What an older file has, token -> id. special: the tokens that other files name as such."""
    fields = read_json_object(path)
    added = {}
    for text in fields:
        token_id = fields.integer(text, high=_MAX_TOKEN_ID)
        if not is_text(text) or not text:
            raise fields.error(text, "named by the text of a token, of at least one character")
        added[token_id] = AddedToken(text, normalized=text not in special, special=text in special)
    return added


def _class_tokens(folder: Path, config: TypedFields) -> Mapping[str, Any]:
    name = config.optional_string("tokenizer_class")
    if name is None:
        model_type = _optional_object(folder / "config.json").raw("model_type")
        prefixes = (prefix for prefix in _CLASS_OF_MODEL_PREFIX if str(model_type).startswith(prefix))
        name = next((_CLASS_OF_MODEL_PREFIX[prefix] for prefix in prefixes), "")
    return _CLASS_TOKENS.get(name.removesuffix("Fast"), {})


def _optional_object(path: Path) -> TypedFields:
    """The fields of the JSON file at `path`; none where there is no such file."""
    return read_json_object(path) if path.exists() else TypedFields({}, path)
