"""Lists with something of each layer."""

from __future__ import annotations

from typing import Any

import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.layer_lists import layer_numbers, number_of_each, of_first_layers
from lamella.model_executor.models.typed_fields import TypedFields


def config(**fields: Any) -> ConfigJson:
    return ConfigJson(TypedFields(fields, "config.json", "text_config."))


def test_lists_of_the_extra_layers_too_are_shortened():
    short = of_first_layers(config(a=[1, 2, 3], b=[1, 2], c=[4, 5, 6], d=7), ("a", "b", "d"), 2, 1)
    assert [short.fields.raw(key) for key in "abcd"] == [[1, 2], [1, 2], [4, 5, 6], 7]
    with pytest.raises(ModelLoadError, match=r"config.json: text_config.a=\[1, 2\]"):
        raise short.refuse("a", "no")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, (7.0, 7.0)), ({"x": None}, (7.0, 7.0)), ({"x": 3}, (3.0, 3.0)), ({"x": [1, 2.5]}, (1.0, 2.5))],
)
def test_a_number_of_each_layer(fields, expected):
    assert number_of_each(config(**fields), "x", 7.0, 2) == expected


@pytest.mark.parametrize("value", [[1], [1, 2, 3], ["a", 1], "a", [None, 1]])
def test_no_numbers_of_each_layer(value):
    with pytest.raises(ModelLoadError, match=r"text_config.x="):
        number_of_each(config(x=value), "x", 7.0, 2)


def test_numbers_of_layers():
    assert layer_numbers(config(x=[0, 2]), "x", 3) == (0, 2)
    assert layer_numbers(config(x=None), "x", 3) is None
    with pytest.raises(ModelLoadError, match="x="):
        layer_numbers(config(x=[3]), "x", 3)
