"""xgrammar instead of llguidance: both give outputs that are valid, and what xgrammar would leave out is refused."""

from __future__ import annotations

import importlib.util
import json
import re

import jsonschema
import numpy as np
import pytest

from lamella import LLM, ConfigError, RequestError, SamplingParams
from lamella.engine.scheduling.speculation.step_costs import StepCosts
from lamella.engine.structured.config import StructuredOutputsConfig
from lamella.engine.structured.params import StructuredOutputsParams
from lamella.engine.structured.xgrammar_forms import checked_regex
from tests.helpers.tiny_gemma import save_tiny_gemma

NEXT = {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}
NODE = {"type": "object", "properties": {"v": {"type": "boolean"}, "next": NEXT}, "required": ["v", "next"]}
SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "required": ["b"]},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 11}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "items": False},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 4},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-f]{2}-(?:x|.y)?\\d[0-9]$"},
    {"type": ["boolean", "null"]},
    {"enum": ["a b", 7, None, {"x": [1, "\u00e9"]}]},
    {"type": "string", "const": 'quote " and \\ back'},
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"enum": ["p", "q"]}, "maxItems": 2}]},
    {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
    {"type": "object", "title": "noted", "properties": {"k": {"type": "object", "properties": {}}}, "x-note": 1},
    {"type": "object", "properties": {"s": {"type": "string", "maxLength": 3}}, "additionalProperties": False},
]  # fmt: skip
ARGUMENTS = {"max_model_len": 256, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 16, "check_invariants": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path, num_hidden_layers=2)
    return str(path)


@pytest.fixture(scope="module", params=["guidance", "xgrammar"])
def llm(request, folder):
    with LLM(folder, structured_outputs_config={"backend": request.param}, **ARGUMENTS) as made:
        yield made


@pytest.fixture(scope="module")
def xgrammar_llm(folder):
    with LLM(folder, structured_outputs_config={"backend": "xgrammar"}, **ARGUMENTS) as made:
        yield made


def generated(llm, forms, **settings):
    params = [
        SamplingParams(**{"temperature": 1.0, "seed": index, "max_tokens": 240, **settings}, structured_outputs=form)
        for index, form in enumerate(forms)
    ]
    prompts = [[6 + index % 40, 7] for index in range(len(forms))]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def test_outputs_of_either_library_are_valid(llm):
    forms = [StructuredOutputsParams(json=one, disable_any_whitespace=True) for one in SCHEMAS for _ in range(3)]
    num_complete = 0
    for form, output in zip(forms, generated(llm, forms), strict=True):
        assert output.finish_reason in ("stop", "length"), output.stop_reason
        if output.finish_reason == "stop":
            num_complete += 1
            jsonschema.validate(json.loads(output.text), json.loads(form.json), jsonschema.Draft202012Validator)
    assert num_complete > 0.8 * len(forms)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[0-9]{3}-[a-f]{2,5}"}, r"[0-9]{3}-[a-f]{2,5}"),
        ({"regex": r"a.{2}b"}, r"a.{2}b"),
        ({"choice": ["yes", 'no "x"', "a\\n\n"]}, r'yes|no "x"|a\\n\n'),
        ({"grammar": 'root ::= "ab" [0-9] "c"?'}, r"ab[0-9]c?"),
        ({"grammar": 'start: "a" NUM "b"\nNUM: /[0-9]/'}, r"a[0-9]b"),
        ({"json_object": True}, r"(?s)\s*\{.*\}\s*"),
    ],
)
def test_each_kind_of_form(xgrammar_llm, form, pattern):
    outputs = [one for one in generated(xgrammar_llm, [form] * 4) if one.finish_reason == "stop"]
    assert outputs
    for output in outputs:
        assert re.fullmatch(pattern, output.text)


def test_tags_in_free_text(xgrammar_llm):
    tags = {"structures": [{"begin": "<f>", "schema": {"enum": [1, 2]}, "end": "</f>"}], "triggers": ["<f"]}
    output = generated(xgrammar_llm, [{"structural_tag": tags}])[0]
    for begun in re.findall(r"<f.*", output.text, re.DOTALL):
        assert re.match(r"<(f(>([12](<(/(f>?)?)?)?)?)?)?", begun)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=tags))
    grammar = xgrammar_llm.engine.parse("a", params).new_grammar()
    tokenizer = xgrammar_llm.get_tokenizer()
    right, wrong = (tokenizer.encode(text, add_special_tokens=False) for text in ("x <f>2</f> y", "x <f>3</f>"))
    nothing = np.zeros(0, dtype=np.int32)
    assert grammar.num_allowed(nothing, right) == len(right)
    assert 0 < grammar.num_allowed(nothing, wrong) < len(wrong)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"type": "object", "propertyNames": {"maxLength": 2}},
        {"type": "object", "patternProperties": {"a": {"type": "null"}}},
        {"type": "object", "minProperties": 1},
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]},
        {"type": "string", "format": "date"},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "(?:b)(?!a)c"},
        {"type": "string", "pattern": "[^a]"},
        {"type": "string", "pattern": "[ -z]"},
        {"type": "string", "pattern": r"a\sb"},
        {"type": "string", "pattern": 'a"b'},
        {"type": "string", "pattern": "a|^b"},
        {"type": "string", "pattern": "^a$", "maxLength": 3},
        {"type": "number", "minimum": 1},
        {"type": "integer", "multipleOf": 2},
        {"type": "integer", "minimum": 1.5},
        {"oneOf": [{"type": "number"}, {"type": "string"}]},
        {"allOf": [{"type": "number"}]},
        {"anyOf": [{"type": "number"}], "minimum": 3},
        {"enum": [1, "a"], "type": "string"},
        {"minLength": 2},
        {"$ref": "http://example.com/a"},
        {"type": "foo"},
        {"type": "object", "properties": {"deep": {"type": "array", "items": {"not": {}}}}},
    ],
    ids=json.dumps,
)
def test_what_xgrammar_would_leave_out_is_refused(xgrammar_llm, schema):
    with pytest.raises(RequestError, match=r"structured_outputs: json=.* cannot be used: "):
        generated(xgrammar_llm, [{"json": schema}])


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(a"},
        {"regex": r"(a)\1"},
        {"grammar": "root ::= missing"},
        {"grammar": "no"},
        {"json_object": True, "whitespace_pattern": " "},
    ],
)
def test_grammars_that_are_wrong(xgrammar_llm, form):
    with pytest.raises(RequestError, match="cannot be used: "):
        generated(xgrammar_llm, [form])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_token_of_a_form(folder, xgrammar_llm, temperature):
    rows = {"type": "array", "items": {"enum": ["aa", "ab", "ba"]}, "minItems": 6, "maxItems": 9}
    forms = [{"json": rows, "disable_any_whitespace": True}] * 4
    without = generated(xgrammar_llm, forms, temperature=temperature)
    config = {"method": "suffix", "suffix_decoding_min_token_prob": 0.0}
    arguments = ARGUMENTS | {"structured_outputs_config": {"backend": "xgrammar"}, "speculative_config": config}
    with LLM(folder, **arguments) as llm:
        llm.engine.inspect().scheduler.drafter.costs = StepCosts([1], [1.0])
        found = generated(llm, forms, temperature=temperature)
        drafts = llm.engine.stats().drafts
    assert [one.token_ids for one in found] == [one.token_ids for one in without]
    assert drafts.num_accepted > 0


def test_a_dot_is_no_newline_and_classes_stay():
    assert checked_regex(r"^a.[.^$\]]\.\\.$") == r"^a[^\n][.^$\]]\.\\[^\n]$"


def test_without_the_package_it_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package xgrammar, .*: pip install xgrammar"):
        StructuredOutputsConfig(backend="xgrammar")
    assert StructuredOutputsConfig(backend="llguidance").backend == "llguidance"
