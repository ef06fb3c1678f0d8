"""Readers of fields that nobody vouches for: each takes its own kind, in its range, and names what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.models.typed_json import parse_json_object

PLACE = "folder/config.json"


def fields(text: str) -> TypedFields:
    return parse_json_object(text.encode(), PLACE)


VALUES = {
    "zero": 0,
    "big": 2**63,
    "huge": 10**400,
    "half": 0.5,
    "whole": 1.0,
    "infinite": "1e999",
    "nan": float("nan"),
    "list_of_nan": [float("nan")],
    "yes": True,
    "text": "abc",
    "surrogate": "\ud800",
    "null": None,
    "list": [1, 2],
    "mixed": [1, "x", True],
    "object": {"inner": -3},
}
READERS = {
    "integer": (lambda f, key: f.integer(key), {"zero"}),
    "number": (lambda f, key: f.number(key), {"zero", "big", "half", "whole"}),
    "boolean": (lambda f, key: f.boolean(key), {"yes"}),
    "string": (lambda f, key: f.string(key), {"text"}),
    "integers": (lambda f, key: list(f.integers(key)), {"list"}),
    "numbers": (lambda f, key: list(f.numbers(key)), {"list"}),
    "strings": (lambda f, key: list(f.strings(key)), set()),
    "token_ids": (lambda f, key: f.token_ids(key), {"zero", "list", "null"}),
    "object": (lambda f, key: f.object(key), {"object"}),
}


@pytest.mark.parametrize("reader", READERS)
def test_each_reader_takes_its_own_kind_alone(reader):
    text = json.dumps(VALUES).replace('"1e999"', "1e999")
    found, (read, accepted) = fields(text), READERS[reader]
    for key in [*VALUES, "absent"]:
        wanted = reader == "token_ids" and key in ("null", "absent", "zero", "list")
        if key in accepted or wanted:
            value = read(found, key)
            expected = {"token_ids": {"zero": (0,), "list": (1, 2)}}.get(reader, {}).get(key, json.loads(text).get(key))
            assert reader == "object" or value == (() if expected is None else expected)
            continue
        with pytest.raises(ModelLoadError, match=rf"folder/config.json: {key}[ =].*must be"):
            read(found, key)


def test_ranges_are_kept_and_told():
    found = fields('{"a": 5, "b": 0, "c": -0.5, "inner": {"d": 7, "list": [{"e": 1}, {"e": -1}]}}')
    assert found.integer("a", low=5, high=5) == 5
    with pytest.raises(ModelLoadError, match="a=5: must be an integer from 6 to 9"):
        found.integer("a", low=6, high=9)
    with pytest.raises(ModelLoadError, match="b=0: must be a finite number, more than 0"):
        found.number("b", above=0)
    with pytest.raises(ModelLoadError, match=r"c=-0\.5: must be a finite number of at least 0"):
        found.number("c", low=0)
    with pytest.raises(ModelLoadError, match=r"inner\.d=7: must be one of 'x', 'y'"):
        found.object("inner").string("d", choices=("x", "y"))
    first, second = found.object("inner").objects("list")
    assert first.integer("e") == 1
    with pytest.raises(ModelLoadError, match=r"inner\.list\[1\]\.e=-1"):
        second.integer("e")
    with pytest.raises(ModelLoadError, match="nothing is missing; must be true or false"):
        found.boolean("nothing")
    assert found.integer("nothing", 3) == 3
    assert found.optional_integer("nothing") is None


def test_values_in_messages_are_cut_short():
    deep = "[" * 500 + "]" * 500
    found = fields(f'{{"long": "{"x" * 10**6}", "deep": {deep}, "digits": {"9" * 4000}}}')
    for key in ("long", "deep", "digits"):
        with pytest.raises(ModelLoadError) as error:
            found.boolean(key)
        assert len(str(error.value)) < 300


def test_optional_readers_take_null_for_nothing():
    found = TypedFields({"a": None, "b": 3, "c": "x", "d": True, "e": {"f": 1}}, PLACE)
    assert (found.optional_integer("a"), found.optional_integer("b"), found.optional_integer("z")) == (None, 3, None)
    assert (found.optional_number("a"), found.optional_number("b")) == (None, 3.0)
    assert (found.optional_string("a"), found.optional_string("c")) == (None, "x")
    assert (found.optional_boolean("a"), found.optional_boolean("d")) == (None, True)
    assert (list(found.optional_object("a")), list(found.optional_object("e"))) == ([], ["f"])
    assert not found.has_value("a")
    assert "a" in found
    with pytest.raises(ModelLoadError, match=r"a=None: must be an integer"):
        found.integer("a", 5)


def test_a_number_may_lie_at_the_ends_of_its_range():
    found = TypedFields({"x": 2}, PLACE)
    assert found.integer("x", low=2, high=2) == 2
    assert found.number("x", low=2, high=2) == 2.0
    for limits in ({"low": 3}, {"high": 1}, {"above": 2}):
        with pytest.raises(ModelLoadError, match="x=2: must be a finite number"):
            found.number("x", **limits)


def test_one_object_over_another():
    below, above = TypedFields({"a": 1, "b": 1}, "below"), TypedFields({"b": 2, "c": "x"}, "above", "inner.")
    found = below.overlaid(above)
    assert [found.integer(key) for key in ("a", "b")] == [1, 2]
    with pytest.raises(ModelLoadError, match=r"above: inner\.c='x'"):
        found.integer("c")


def test_arrays_of_integers_count_as_lists_and_ids_lose_their_repetitions():
    found = TypedFields({"a": np.array([3, 4], dtype=np.uint32), "ids": [5, 6, 5]}, PLACE)
    assert found.integers("a") == (3, 4)
    assert found.token_ids("ids") == (5, 6)
    with pytest.raises(ModelLoadError, match=r"ids=.*must be a token id from 0 to 5"):
        found.token_ids("ids", high=5)
