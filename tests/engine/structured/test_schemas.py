"""Outputs of a random model by 200 schemas: each that is complete is valid, says a validator that is not ours."""

from __future__ import annotations

import json

import jsonschema
import pytest

from lamella import LLM, RequestError, SamplingParams
from lamella.sampling_params import StructuredOutputsParams
from tests.helpers.json_schemas import random_schema
from tests.helpers.tiny_gemma import save_tiny_gemma

NUM_SCHEMAS = 200


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path, num_hidden_layers=3)
    # Less memory than all rows want at once: some of them are preempted.
    with LLM(str(path), max_model_len=512, kv_cache_memory_bytes=5 << 18, max_num_seqs=64) as made:
        yield made


def validator_of(schema):
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("num_schemas", [60, pytest.param(NUM_SCHEMAS, marks=pytest.mark.slow)])
def test_outputs_are_valid_by_their_schemas(llm, num_schemas):
    schemas = [random_schema(seed) for seed in range(num_schemas)]
    params = [
        SamplingParams(
            temperature=1.0 if index % 4 else 0.0,
            seed=index,
            max_tokens=490,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=index % 2 == 0),
        )
        for index, schema in enumerate(schemas)
    ]
    prompts = [[6 + index % 50, 7, 8] for index in range(num_schemas)]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    complete = 0
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.finish_reason in ("stop", "length"), output.stop_reason
        if output.finish_reason == "stop":
            complete += 1
            validator_of(schema).validate(json.loads(output.text))
    assert complete > 0.9 * num_schemas
    assert llm.engine.stats().num_preemptions > 0


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"type": "object", "propertyNames": {"maxLength": 2}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "dependentSchemas": {"a": {"type": "object"}}},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "array", "unevaluatedItems": False},
        {"$dynamicRef": "#node"},
        {"$recursiveRef": "#"},
        {"type": "string", "format": "no-such-format"},
        {"type": "string", "pattern": "(?=a)b"},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"properties": {"deep": {"items": {"not": {}}}}},
    ],
    ids=json.dumps,
)
def test_keywords_that_are_not_built_are_refused(llm, schema):
    """Not left out: an output by the rest of the schema would be invalid by the whole."""
    params = SamplingParams(structured_outputs={"json": schema})
    with pytest.raises(RequestError, match=r"structured_outputs: json=.* cannot be used: "):
        llm.generate([[6]], params, use_tqdm=False)
