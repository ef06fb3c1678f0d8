"""JSON schemas of the kinds that public suites have, drawn at random: nested, enumerations, patterns, formats, bounds,
unions, references, recursion. Each is small enough that a random model's output soon is complete."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = (
    r"^[a-z]{1,4}$",
    r"^\d{3}-\d{2}$",
    r"^(yes|no)$",
    r"^#[0-9a-f]{6}$",
    r"^[A-Z][a-z]{0,5}( [A-Z][a-z]{0,5})?$",
)
FORMATS = ("date", "ipv4", "uuid")
_NAMES = ("id", "name", "größe", "is open", "tags", "x", "y", 'qu"ote', "kind", "next")


def random_schema(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    if seed % 10 == 9:
        return _recursive(draw)
    schema = _object(draw, 3)
    if seed % 5 == 4:
        schema["$defs"] = {"part": _object(draw, 1)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"] = [*schema["required"], "part"]
    return schema


def _recursive(draw: random.Random) -> dict[str, Any]:
    """A list of nodes, or a tree that may end at every node."""
    node = {
        "type": "object",
        "properties": {
            "value": _scalar(draw),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
        },
        "required": ["value", draw.choice(["next", "children"])],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_NAMES, draw.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(draw, depth - 1) for name in names},
        "required": draw.sample(names, draw.randint(1, len(names))),
        "additionalProperties": False,
    }
    if draw.random() < 0.15:
        schema["patternProperties"] = {"^z[0-9]$": {"type": "boolean"}}
    return schema


def _any(draw: random.Random, depth: int) -> Any:
    if depth <= 0 or draw.random() < 0.5:
        return _scalar(draw)
    kind = draw.randrange(6)
    if kind == 0:
        return _object(draw, depth)
    if kind == 1:
        least = draw.randint(0, 2)
        return {
            "type": "array",
            "items": _any(draw, depth - 1),
            "minItems": least,
            "maxItems": least + draw.randint(0, 2),
        }
    if kind == 2:
        items = [_scalar(draw) for _ in range(draw.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == 3:
        return {"anyOf": [_any(draw, depth - 1), _object(draw, depth - 1), {"type": "null"}]}
    if kind == 4:
        return {"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}, {"const": "none"}]}
    return {"allOf": [{"type": "integer", "minimum": draw.randint(-50, 0)}, {"maximum": draw.randint(1, 500)}]}


def _scalar(draw: random.Random) -> dict[str, Any]:
    kind = draw.randrange(11)
    if kind == 0:
        least = draw.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 6)}
    if kind == 1:
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    if kind == 2:
        return {"type": "string", "format": draw.choice(FORMATS)}
    if kind == 3:
        return {"enum": draw.sample(["a", "b c", 'd"e', 7, -1.5, None, True, ["x", 1], {"k": "v"}], draw.randint(1, 4))}
    if kind == 4:
        return {"const": draw.choice(["fixed", 42, None, False, {"a": [1]}])}
    if kind == 5:
        low = draw.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 2000)}
    if kind == 6:
        low = draw.randint(-5, 5)
        return {"type": "number", "exclusiveMinimum": low, "maximum": low + draw.randint(1, 3)}
    if kind == 7:
        return {"type": "integer", "multipleOf": draw.choice([2, 5, 7]), "minimum": 0, "maximum": 1000}
    if kind == 8:
        return {"type": ["boolean", "null"]}
    if kind == 9:
        return {"type": "boolean", "description": "whether", "default": False, "title": "flag"}
    return {"type": "string", "minLength": 1, "maxLength": 4, "pattern": "^[a-z]*$"}
