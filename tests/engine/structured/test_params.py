"""What StructuredOutputsParams and its config take, and what their errors say."""

from __future__ import annotations

import re

import pytest

from lamella import ConfigError, EngineConfig, RequestError, SamplingParams
from lamella.engine.structured.config import StructuredOutputsConfig
from lamella.engine.structured.grammar_text import grammar_text
from lamella.engine.structured.params import MOST_CHARACTERS, StructuredOutputsParams


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "has nothing; give exactly one of json, regex, choice"),
        ({"json_object": False}, "has nothing"),
        ({"regex": "a", "choice": ["b"]}, "has regex, choice; give exactly one"),
        ({"regex": 3}, "regex=3 is a int; give a string"),
        ({"regex": ""}, "regex='' has 0 characters"),
        ({"grammar": "x" * (MOST_CHARACTERS + 1)}, f"give 1 to {MOST_CHARACTERS}"),
        ({"json": "{"}, "json='{' is no JSON"),
        ({"json": "[1]"}, "json='[1]' is a list"),
        ({"json": {"a": float("nan")}}, "cannot be written as JSON"),
        ({"json": {"a": {1, 2}}}, "cannot be written as JSON"),
        ({"json": {"enum": ["x" * MOST_CHARACTERS]}}, f"give at most {MOST_CHARACTERS}"),
        ({"choice": []}, "choice has 0 strings"),
        ({"choice": "yes"}, "choice='yes' is a str; give a list"),
        ({"choice": ["a", 1]}, "holds 1; give strings"),
        ({"choice": ["a", ""]}, "holds ''; give strings"),
        ({"json_object": 1}, "json_object=1"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern=' ' is for json and json_object"),
        ({"schema": {}}, "has 'schema', which is no field of StructuredOutputsParams; known: json, regex, choice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_forms_that_are_refused(fields, told):
    with pytest.raises(RequestError) as refused:
        SamplingParams(structured_outputs=fields)
    assert told in str(refused.value)


def test_what_is_not_a_form():
    with pytest.raises(RequestError, match="structured_outputs='json' is a str; give a StructuredOutputsParams"):
        SamplingParams(structured_outputs="json")
    with pytest.raises(RequestError, match="ignore_eos=True with structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)


def test_equal_forms_are_equal_however_they_are_given():
    schema = {"type": "integer"}
    one = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    assert one == SamplingParams(structured_outputs={"json": '{"type": "integer"}'})
    assert hash(one.structured_outputs) == hash(StructuredOutputsParams(schema))
    assert StructuredOutputsParams(choice=iter(["a", "b", "a"])).choice == ("a", "b")


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("tag", "told"),
    [
        ({}, "is not complete"),
        ({"structures": [], "triggers": ["<f"]}, "is not complete"),
        ({"structures": [{"begin": "<f>", "schema": SCHEMA}], "triggers": ["<f"]}, "is not complete ('end')"),
        ({"structures": [{"begin": "<f>", "schema": 3, "end": ""}], "triggers": ["<f"]}, "the schema an object"),
        ({"structures": [{"begin": "[f", "schema": SCHEMA, "end": ""}], "triggers": ["<f"]}, "starts with none of"),
        (
            {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": ""}], "triggers": ["<f", "<g>"]},
            "one kind of them",
        ),
        ({"format": {"type": "sequence", "elements": []}}, "a format of type 'sequence'"),
        (
            {
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<f"],
                    "tags": [{"begin": "<f>", "content": {"type": "any_text"}, "end": ""}],
                }
            },
            "content of type 'any_text'",
        ),
        ({"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [], "at_least_one": True}}, "at_least_one"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_tags_that_are_refused(tag, told):
    with pytest.raises(RequestError) as refused:
        grammar_text(StructuredOutputsParams(structural_tag=tag), ["<g>"])
    assert told in str(refused.value)


def test_the_two_ways_to_write_tags_are_one():
    old = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    content = {"type": "json_schema", "json_schema": SCHEMA}
    tags = [{"begin": "<f>", "content": content, "end": "</f>"}]
    new = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}}
    texts = {grammar_text(StructuredOutputsParams(structural_tag=tag), []) for tag in (old, new)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"backend": "outlines"}, "backend='outlines' is not known; choose one of auto, guidance"),
        ({"cache_size": 0}, "cache_size=0 is out of range; give at least 1 grammar"),
        ({"compile_timeout_seconds": 0}, "compile_timeout_seconds=0 is out of range"),
        ({"disable_any_whitespace": "no"}, "disable_any_whitespace='no'"),
        ({"timeout": 3}, "has 'timeout'; known: backend, "),
        (3, "structured_outputs_config=3 is a int; give a dict"),
    ],
    ids=str,
)
def test_configs_that_are_refused(config, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        EngineConfig("x", structured_outputs_config=config)


def test_a_config_may_be_left_out_or_given_either_way():
    given = EngineConfig("x", structured_outputs_config={"cache_size": 3}).structured_outputs_config
    assert given == StructuredOutputsConfig(cache_size=3)
    assert EngineConfig("x").structured_outputs_config == StructuredOutputsConfig()
    assert EngineConfig("x", structured_outputs_config=given).structured_outputs_config is given
