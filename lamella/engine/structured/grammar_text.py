"""Structured outputs as one grammar in llguidance's form."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from lamella.argument_checks import shown
from lamella.engine.structured.params import StructuredOutputsParams
from lamella.errors import RequestError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_TAG_FORMS = (
    'give {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}, or {"format": {"type": '
    '"triggered_tags", "triggers": [...], "tags": [{"begin", "content": {"type": "json_schema", "json_schema"}, '
    '"end"}, ...]}}'
)


def grammar_text(params: StructuredOutputsParams, special_tokens: Collection[str]) -> str:
    """special_tokens: texts that are one token of the vocabulary each, and never spelled.

    Raises RequestError where the form of the parameters is wrong. Whether the grammar itself can be used is for the
    compiler to say.
    """
    from llguidance import LLMatcher, grammar_from

    kind = params.kind
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else json.loads(_text(params.json))
        if params.disable_additional_properties:
            schema = _closed(schema)
        options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}
        options["whitespace_flexible"] = not params.disable_any_whitespace
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(_text(params.regex)))
    if kind == "choice":
        assert params.choice is not None
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice)
        return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
    if kind == "grammar":
        try:
            return str(grammar_from("grammar", _text(params.grammar)))
        except ValueError as error:
            raise RequestError(f"grammar={shown(params.grammar)} cannot be read: {error}") from error
    return _tags(params, special_tokens)


def _text(value: Any) -> str:
    assert isinstance(value, str), "StructuredOutputsParams keeps its parts as text"
    return value


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in every object schema that does not say."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    # What these hold is not a schema, though it may look like one.
    closed = {
        name: one if name in ("enum", "const", "default", "examples") else _closed(one) for name, one in schema.items()
    }
    is_object = schema.get("type") == "object" or isinstance(schema.get("properties"), Mapping)
    if is_object and "additionalProperties" not in schema and "patternProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


def triggered_tags(
    params: StructuredOutputsParams, special_tokens: Collection[str]
) -> tuple[list[str], list[tuple[str, dict[str, Any], str]]]:
    """The triggers, and (begin, JSON schema, end) of each tag. Raises RequestError for what is not complete."""
    given = json.loads(_text(params.structural_tag))
    place = given.get("format", given)
    try:
        if "structures" in given:
            triggers, tags = (
                given["triggers"],
                [(each["begin"], each["schema"], each["end"]) for each in given["structures"]],
            )
        elif place["type"] == "triggered_tags":
            triggers, tags = place["triggers"], [_triggered(each) for each in place["tags"]]
            _refuse_options(place)
        else:
            raise RequestError(f"structural_tag has a format of type {shown(place['type'])}; {_TAG_FORMS}")
        if not (tags and triggers and all(isinstance(text, str) and text for text in triggers)):
            raise TypeError("tags and triggers must be there, and triggers be text")
        made = [_tag(tag, triggers) for tag in tags]
    except (KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"structural_tag={shown(params.structural_tag)} is not complete ({error}); {_TAG_FORMS}"
        ) from error
    if len({trigger in special_tokens for trigger in triggers if trigger.startswith("<")}) > 1:
        raise RequestError(
            f"structural_tag: of triggers={shown(triggers)} some are special tokens of the model and some are text; "
            "give one kind of them"
        )
    return list(triggers), made


def _tags(params: StructuredOutputsParams, special_tokens: Collection[str]) -> str:
    from llguidance import LLMatcher, StructTag

    triggers, tags = triggered_tags(params, special_tokens)
    made = [
        StructTag(trigger=_trigger_of(begin, triggers), begin=begin, grammar=schema, end=end)
        for begin, schema, end in tags
    ]
    assume_special = any(trigger in special_tokens for trigger in triggers if trigger.startswith("<"))
    return str(LLMatcher.grammar_from_lark(StructTag.to_grammar(made, assume_special=assume_special)))


def _triggered(tag: Any) -> tuple[Any, Any, Any]:
    content = tag["content"]
    if content["type"] != "json_schema":
        raise RequestError(f"structural_tag has content of type {shown(content['type'])}; {_TAG_FORMS}")
    return tag["begin"], content["json_schema"], tag["end"]


def _refuse_options(place: Mapping[str, Any]) -> None:
    for name in ("at_least_one", "stop_after_first"):
        if place.get(name):
            raise RequestError(f"structural_tag: {name}=true is not built; leave it out")


def _tag(tag: tuple[Any, Any, Any], triggers: list[str]) -> tuple[str, dict[str, Any], str]:
    begin, schema, end = tag
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, Mapping):
        raise TypeError("begin and end must be text, and the schema an object")
    _trigger_of(begin, triggers)
    return begin, dict(schema), end


def _trigger_of(begin: str, triggers: list[str]) -> str:
    trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
    if trigger is None:
        raise RequestError(f"structural_tag: begin={shown(begin)} starts with none of triggers={shown(triggers)}")
    return trigger
