"""Which family a file is of: by any name that transformers writes for it, and by no other."""

from __future__ import annotations

from collections import Counter

import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.models.registry import FAMILIES, known_architectures, parse_config, weight_map
from lamella.model_executor.models.typed_fields import TypedFields


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_are_those_that_transformers_writes(family):
    """Each model_type of a family is one that transformers knows, and its causal model's name is the family's too."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types = [name for name in family.architectures if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    assert types or family.multimodal_architectures  # some text models have no causal class of their own
    for name in types:
        class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
        assert class_name in family.architectures
        for spelled in ({"architectures": [class_name]}, {"model_type": name}):
            config = parse_config(TypedFields(spelled, "config.json"))
            assert config.architecture == family.name
            assert weight_map(config) is family.weights


def test_no_two_families_claim_a_name():
    names = Counter(name for each in FAMILIES for name in each.architectures)
    names += Counter({name for each in FAMILIES for name in each.multimodal_architectures})
    names += Counter(f"gguf {each.gguf_architecture}" for each in FAMILIES if each.gguf_architecture)
    names += Counter(f"family {each.name}" for each in FAMILIES)
    assert set(names.values()) == {1}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_with_a_gguf_name_reads_such_files(family):
    assert (family.gguf_architecture is None) == (family.config_from_gguf is None)


def test_text_models_of_one_wrapper_are_told_apart():
    """Mistral 3's files hold a text model of Mistral's or of Ministral 3's."""
    for name in ("mistral", "ministral3"):
        fields = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": name}}
        assert parse_config(TypedFields(fields, "config.json")).architecture == name
    for text in ({}, {"model_type": "mixtral"}):
        with pytest.raises(ModelLoadError, match="text models of such files are m"):
            parse_config(TypedFields({"model_type": "mistral3", "text_config": text}, "config.json"))


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    for fields, told in (
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "architecture MambaForCausalLM"),
        ({}, r"architecture \(none named\)"),
    ):
        with pytest.raises(ModelLoadError, match=f"config.json: {told} is not known; known: ") as refused:
            parse_config(TypedFields(fields, "config.json"))
        for family in FAMILIES:
            assert family.architectures[0] in str(refused.value)
        assert known_architectures() in str(refused.value)


def test_the_first_name_that_is_known_decides():
    fields = {"architectures": ["SomethingNew", "Qwen2ForCausalLM"], "model_type": "qwen2"}
    assert parse_config(TypedFields(fields, "config.json")).architecture == "qwen2"


@pytest.mark.parametrize("model_type", ["llama", "5.24.0"])
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Mistral3ForConditionalGeneration"])
def test_two_names_that_contradict_each_other(model_type, architecture):
    """transformers goes by model_type alone; vLLM by architectures: nobody knows what such a file describes."""
    fields = {"architectures": [architecture], "model_type": model_type, "text_config": {"model_type": "mistral"}}
    with pytest.raises(
        ModelLoadError, match=f"model_type='{model_type}' is no model of architectures=.'{architecture}"
    ):
        parse_config(TypedFields(fields, "config.json"))


def test_a_multimodal_config_needs_its_text_part():
    for family in FAMILIES:
        for name in family.multimodal_architectures:
            with pytest.raises(ModelLoadError, match=f"{name} but has no text_config"):
                parse_config(TypedFields({"architectures": [name]}, "config.json"))
