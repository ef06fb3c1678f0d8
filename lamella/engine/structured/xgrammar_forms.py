"""JSON schemas and regular expressions as xgrammar takes them: it leaves out some of what it does not know, and this
refuses all that it would leave out. ValueError says what is refused, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lamella.argument_checks import shown

_USE = "use backend='guidance'"
_NOTES = frozenset(
    ("title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly")
)
_DEFINITIONS = frozenset(("$defs", "definitions"))
# What a schema may have beside its type. Others of JSON Schema are refused; what no draft has is a note.
_OF_TYPE = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "string": frozenset(("minLength", "maxLength", "pattern")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
_WHOLE = frozenset(("minItems", "maxItems", "minLength", "maxLength", *_OF_TYPE["integer"]))
_ALONE = ("enum", "const", "anyOf", "$ref")
_KEYWORDS = frozenset(
    (
        *(keyword for keywords in _OF_TYPE.values() for keyword in keywords), *_ALONE, "type", "allOf", "oneOf", "not",
        "if", "then", "else", "multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "additionalItems",
        "unevaluatedItems", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "format", "contentEncoding",
        "contentMediaType", "contentSchema", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
        "$recursiveAnchor",
    )
)  # fmt: skip
# A character that stands for itself in a string of JSON.
_CHARACTER = r'[^\x00-\x1f\x7f"\\]'
# A character of a regular expression with its backslash, or a class with all that is in it.
_PARTS = re.compile(r"\[\^?(?:\\.|[^\\\]])(?:\\.|[^\\\]])*\]|\\.|.", re.DOTALL)


def checked_schema(schema: Any, *, closes_objects: bool = False) -> Any:
    """The schema for xgrammar. An object with `properties` has no others, unless the schema says that it may; and that
    is refused, because xgrammar would let another property have the name of one that is described."""
    if isinstance(schema, bool):
        if schema:
            return True
        raise ValueError(f"the schema false allows nothing; {_USE}")
    if not isinstance(schema, Mapping):
        raise ValueError(f"a schema is {shown(schema)}: must be an object or a boolean")
    known = {name: value for name, value in schema.items() if name in _KEYWORDS}
    made: dict[str, Any] = {
        name: {key: checked_schema(one, closes_objects=closes_objects) for key, one in _mapping(name, value).items()}
        for name, value in schema.items()
        if name in _DEFINITIONS
    }
    alone = [name for name in _ALONE if name in known]
    if alone:
        return made | _alone(alone[0], known, closes_objects)
    if "type" not in known:
        if known:
            raise ValueError(f"{_first(known)} stands without a type; give one, or {_USE}")
        return made
    types = known.pop("type")
    if isinstance(types, list):
        if known or not types or not all(isinstance(one, str) and one in _OF_TYPE for one in types):
            raise ValueError(f"type={shown(types)} must be types alone, with no other keyword beside it; {_USE}")
        return made | {"anyOf": [checked_schema({"type": one}, closes_objects=closes_objects) for one in types]}
    if not isinstance(types, str) or types not in _OF_TYPE:
        raise ValueError(f"Invalid type: {shown(types)}; known: {', '.join(_OF_TYPE)}")
    for name, value in known.items():
        if name not in _OF_TYPE[types]:
            raise ValueError(f"{name} of type={types} is not built for xgrammar; {_USE}")
        if name in _WHOLE and (type(value) is not int or (value < 0 and name not in _OF_TYPE["integer"])):
            raise ValueError(f"{name}={shown(value)} must be a whole number; {_USE}")
    made |= {"type": types, **known}
    if types == "object":
        _finish_object(made, closes_objects)
    elif types == "array":
        _finish_array(made, closes_objects)
    elif "pattern" in made:
        if len(known) > 1:
            raise ValueError(f"pattern beside minLength or maxLength is not built for xgrammar; {_USE}")
        made["pattern"] = _checked_pattern(made["pattern"])
    elif known:
        # Where a length is bounded the library lets control characters into a string, which are no JSON.
        least, most = made.pop("minLength", 0), made.pop("maxLength", "")
        made["pattern"] = f"^{_CHARACTER}{{{least},{most}}}$"
    return made


def _alone(name: str, known: dict[str, Any], closes_objects: bool) -> dict[str, Any]:
    """A keyword of which xgrammar looks at no other beside it."""
    others = {other: value for other, value in known.items() if other != name}
    value = known[name]
    if name in ("enum", "const") and set(others) == {"type"} and _has_type(name, value, others["type"]):
        others = {}
    if others:
        raise ValueError(f"{_first(others)} beside {name} is not built for xgrammar; {_USE}")
    if name == "$ref" and not (isinstance(value, str) and re.fullmatch(r"#|#/(\$defs|definitions)/[^/~%]+", value)):
        raise ValueError(f"$ref={shown(value)} must be # or #/$defs/NAME; {_USE}")
    if name in ("enum", "anyOf") and not (isinstance(value, list) and value):
        raise ValueError(f"{name}={shown(value)} must be a list that is not empty")
    if name == "anyOf":
        value = [checked_schema(one, closes_objects=closes_objects) for one in value]
    return {name: value}


def _has_type(name: str, value: Any, wanted: Any) -> bool:
    kinds = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list, "integer": int,
             "number": (int, float)}  # fmt: skip
    kind = kinds.get(wanted) if isinstance(wanted, str) else None
    values = value if name == "enum" and isinstance(value, list) else [value]
    return kind is not None and all(
        isinstance(one, kind) and (wanted == "boolean" or not isinstance(one, bool)) for one in values  # type: ignore[arg-type]
    )  # fmt: skip


def _finish_object(made: dict[str, Any], closes_objects: bool) -> None:
    properties = _mapping("properties", made.get("properties", {}))
    missing = [name for name in made.get("required", ()) if name not in properties]
    if missing:
        raise ValueError(f"required names {shown(missing[0])}, which properties do not describe; {_USE}")
    others = made.get("additionalProperties", not (properties or closes_objects))
    if properties and others is not False:
        raise ValueError(f"additionalProperties={shown(others)} beside properties is not built for xgrammar; {_USE}")
    if properties:
        made["properties"] = {
            name: checked_schema(one, closes_objects=closes_objects) for name, one in properties.items()
        }
    made["additionalProperties"] = others if others is False else checked_schema(others, closes_objects=closes_objects)


def _finish_array(made: dict[str, Any], closes_objects: bool) -> None:
    first = made.get("prefixItems", [])
    if not isinstance(first, list):
        raise ValueError(f"prefixItems={shown(first)} must be a list")
    others = made.get("items", not first)
    if first:
        made["prefixItems"] = [checked_schema(one, closes_objects=closes_objects) for one in first]
        if "minItems" in made or "maxItems" in made:
            raise ValueError(f"minItems or maxItems beside prefixItems is not built for xgrammar; {_USE}")
    made["items"] = others if others is False else checked_schema(others, closes_objects=closes_objects)


def _checked_pattern(pattern: Any) -> str:
    """The regular expression of a whole string in JSON, of which all that it matches stands in JSON as it is: the
    library neither escapes what must be, nor refuses all that it leaves out."""
    checked_regex(pattern)
    parts = _PARTS.findall(pattern)
    for part in parts:
        inside = part[1:-1] if len(part) > 1 and part[0] == "[" else part
        escapes = re.findall(r"\\(.)", inside, re.DOTALL)
        ranges = re.findall(r"([^\\])-([^\\])", inside, re.DOTALL) if inside is not part else []
        if (
            part.startswith("[^")
            or any(letter not in "dw.-/()[]{}+*?|^$" for letter in escapes)
            or any(letter < " " or letter == '"' for letter in inside)
            or any(first <= bad <= last for first, last in ranges for bad in ('"', "\\"))
        ):
            raise ValueError(f"{shown(part)} in pattern={shown(pattern)} is not built for xgrammar; {_USE}")
    if pattern.count("(?") != pattern.count("(?:"):
        raise ValueError(f"(? in pattern={shown(pattern)} is not built for xgrammar; {_USE}")
    return "".join(_CHARACTER if part == "." else part for part in parts)


def checked_regex(pattern: Any) -> str:
    """The regular expression of the whole text for xgrammar, in which `.` is any character but a newline, as elsewhere.
    It ignores anchors inside of one, so these are refused."""
    if not isinstance(pattern, str):
        raise ValueError(f"pattern={shown(pattern)} must be a string")
    parts = _PARTS.findall(pattern)
    for index, part in enumerate(parts):
        if (part == "^" and index) or (part == "$" and index < len(parts) - 1):
            raise ValueError(f"{part} in the middle of {shown(pattern)} is not built for xgrammar; {_USE}")
        if part in (r"\A", r"\Z", r"\z", r"\G"):
            raise ValueError(f"{part} in {shown(pattern)} is not built for xgrammar; {_USE}")
    return "".join(r"[^\n]" if part == "." else part for part in parts)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={shown(value)} must be an object")
    return value


def _first(keywords: Mapping[str, Any]) -> str:
    return next(iter(keywords))
