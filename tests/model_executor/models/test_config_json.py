"""Fields of config.json that every family reads alike."""

from __future__ import annotations

import pytest

from lamella.errors import InvariantError, ModelLoadError, UnbuiltVariantError
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.typed_fields import TypedFields

KINDS = ("full_attention", "sliding_attention")


def config(**fields) -> ConfigJson:
    return ConfigJson(TypedFields(fields, "m/config.json"))


def test_a_default_stands_for_what_is_left_out_and_not_for_null():
    assert config().integer("vocab_size", 7) == 7
    assert config(vocab_size=9).integer("vocab_size", 7) == 9
    assert config(vocab_size=None).optional_integer("vocab_size") is None
    with pytest.raises(ModelLoadError, match=r"m/config\.json: vocab_size=None"):
        config(vocab_size=None).integer("vocab_size", 7)
    with pytest.raises(ModelLoadError, match="vocab_size is missing"):
        config().integer("vocab_size")


def test_a_field_without_a_range_is_a_mistake_of_the_family_that_reads_it():
    with pytest.raises(InvariantError, match="num_widgets is not in the table"):
        config(num_widgets=1).integer("num_widgets")


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, None),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
    ],
    ids=str,
)
def test_the_dtype_by_either_name(fields, dtype):
    assert config(**fields).dtype() == dtype


def test_another_dtype_is_refused():
    with pytest.raises(ModelLoadError, match="torch_dtype='int8': must be one of float32, float16, bfloat16"):
        config(torch_dtype="int8").dtype()


def test_what_a_file_calls_its_model():
    assert config(architectures=["A", "B"], model_type="c").names() == ("A", "B", "c")
    assert config(model_type="c").names() == ("c",)
    assert config(architectures=None).names() == ()


def test_layer_types_are_one_known_name_for_each_layer():
    assert config().layer_types(2, KINDS) is None
    assert config(layer_types=list(KINDS)).layer_types(2, KINDS) == KINDS
    with pytest.raises(ModelLoadError, match="layer_types names 2 layers, but num_hidden_layers is 3"):
        config(layer_types=list(KINDS)).layer_types(3, KINDS)
    with pytest.raises(ModelLoadError, match="layer_types has 'linear_attention'; known: 'full_attention', 'sliding"):
        config(layer_types=["full_attention", "linear_attention"]).layer_types(2, KINDS)


def test_what_is_inside_of_an_object_is_named_by_both():
    inner = config(text_config={"vocab_size": -1}).object("text_config")
    with pytest.raises(ModelLoadError, match=r"text_config\.vocab_size=-1"):
        inner.integer("vocab_size")
    assert str(inner.refuse("vocab_size", "why")) == "m/config.json: text_config.vocab_size=-1: why"


def test_a_variant_that_is_not_built_is_told_from_a_file_that_is_wrong():
    inner = config(text_config={"gating": "x"}).object("text_config")
    variant, wrong = inner.not_built("gating", "why"), inner.refuse("gating", "why")
    assert str(variant) == str(wrong) == "m/config.json: text_config.gating='x': why"
    assert isinstance(variant, UnbuiltVariantError)
    assert not isinstance(wrong, UnbuiltVariantError)


@pytest.mark.parametrize("key", ["3", "03", "003"])
def test_fields_of_one_layer(key):
    """transformers writes as many digits as the last layer's number has."""
    whole = config(per_layer_config={key: {"head_dim": 5}, "11": {"head_dim": 7, "width": 2}})
    assert whole.fields_of_layer(3, ("head_dim", "width")).integer("head_dim", 1) == 5
    assert whole.fields_of_layer(4, ("head_dim",)).integer("head_dim", 1) == 1
    with pytest.raises(UnbuiltVariantError, match=r"per_layer_config.11.width=2: it is not built layer by layer"):
        whole.fields_of_layer(11, ("head_dim",))
