"""What form the output of a request is to have, with vLLM's names."""

from __future__ import annotations

import json as json_library
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from lamella.argument_checks import shown, truth_value
from lamella.errors import RequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# What is compiled is of this size at most; the compiler's own limits, of time and of depth, bound what that can take.
MOST_CHARACTERS = 2**18
MOST_REGEX_CHARACTERS = 2**15


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Exactly one of the first six. RequestError says what would work.

    json: a JSON schema, as text or as a dict. The output is one JSON value that is valid by it.
    regex: a regular expression that the whole output matches, in the syntax of Rust's regex crate: no look-around, no
        back-references. `.` is any character but a newline.
    choice: the output is one of these strings.
    grammar: a context-free grammar in Lark's syntax as llguidance has it, or GBNF as llama.cpp has it.
    json_object: True: any JSON object.
    structural_tag: free text in which every tag that is opened has a given content. As text or a dict:
        {"structures": [{"begin": ..., "schema": {...}, "end": ...}, ...], "triggers": [...]}, or {"format": {"type":
        "triggered_tags", "triggers": [...], "tags": [{"begin": ..., "content": {"type": "json_schema", "json_schema":
        {...}}, "end": ...}]}}. A tag begins where one of the triggers, with which each `begin` starts, is written.
    disable_any_whitespace: JSON without white space between its parts. Otherwise there may be any.
    disable_additional_properties: JSON objects have no properties but those that the schema names, where it leaves
        that open.
    whitespace_pattern: a regular expression of the white space that there may be in JSON.
    """

    json: str | Mapping[str, Any] | None = None
    _: KW_ONLY
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for name in ("json", "structural_tag"):
            self._set(name, _json_text(name, getattr(self, name)))
        for name in ("regex", "grammar", "whitespace_pattern"):
            _text(name, getattr(self, name))
        self._set("choice", _choices(self.choice))
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            self._set(name, truth_value(name, getattr(self, name), RequestError))
        if self.json_object is not None and not truth_value("json_object", self.json_object, RequestError):
            self._set("json_object", None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {', '.join(given) or 'nothing'}; give exactly one of {', '.join(KINDS)}"
            )
        if self.whitespace_pattern is not None and self.kind not in ("json", "json_object"):
            raise RequestError(
                f"whitespace_pattern={shown(self.whitespace_pattern)} is for json and json_object, and this is "
                f"{self.kind}; leave it out"
            )

    @property
    def kind(self) -> str:
        """Which of the six is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @staticmethod
    def of(value: Any) -> StructuredOutputsParams | None:
        """A value as it is, or a dict of its fields."""
        if value is None or isinstance(value, StructuredOutputsParams):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(
                f"structured_outputs={shown(value)} is a {type(value).__name__}; give a StructuredOutputsParams, or a "
                "dict of its fields"
            )
        known = StructuredOutputsParams.__dataclass_fields__
        for name in value:
            if name not in known or name == "_":
                raise RequestError(
                    f"structured_outputs has {shown(name)}, which is no field of StructuredOutputsParams; known: "
                    f"{', '.join(field for field in known if field != '_')}"
                )
        return StructuredOutputsParams(**value)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _text(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise RequestError(f"{name}={shown(value)} is a {type(value).__name__}; give a string")
    most = MOST_CHARACTERS if name == "grammar" else MOST_REGEX_CHARACTERS
    if not value or len(value) > most:
        raise RequestError(f"{name}={shown(value)} has {len(value)} characters; give 1 to {most}")


def _json_text(name: str, value: Any) -> str | None:
    """JSON as text, whether it was given so or as a dict."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            parsed = json_library.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name}={shown(value)} is no JSON ({error}); give a JSON object or a dict") from error
    else:
        parsed = value
    if not isinstance(parsed, Mapping):
        raise RequestError(f"{name}={shown(value)} is a {type(parsed).__name__}; give a JSON object or a dict")
    try:
        text = json_library.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name}={shown(value)} cannot be written as JSON: {error}") from error
    if len(text) > MOST_CHARACTERS:
        raise RequestError(f"{name} has {len(text)} characters as JSON; give at most {MOST_CHARACTERS}")
    return text


def _choices(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise RequestError(f"choice={shown(given)} is a {type(given).__name__}; give a list of strings")
    choices = tuple(given)
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise RequestError(f"choice={shown(list(choices))} holds {shown(choice)}; give strings that are not empty")
    if not choices or sum(map(len, choices)) > MOST_CHARACTERS:
        raise RequestError(
            f"choice has {len(choices)} strings of {sum(map(len, choices))} characters; give at least one, and at most "
            f"{MOST_CHARACTERS} characters"
        )
    return tuple(dict.fromkeys(choices))
