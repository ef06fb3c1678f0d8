"""What a described model asks of a checkpoint, against tables written by hand, and what it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lamella.errors import InvariantError
from lamella.model_executor.layers.description import Model
from lamella.model_executor.models.config import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    NormPlaces,
    RotaryConfig,
)

PLAIN = AttentionConfig(
    kind="full_attention", num_heads=4, num_kv_heads=2, k_dim=6, v_dim=6, scale=1.0, rotary=RotaryConfig(6, 1e4)
)
# Keys of 6 elements, values of 5; 4 query heads, 2 KV heads.
FULL_OF_OPTIONS = replace(PLAIN, v_dim=5, rotary=None, qk_norm="heads", has_qkv_bias=True, has_output_bias=True)
ALL_NORMS = NormPlaces(input=True, post_attention=True, mlp=True, post_mlp=True)


def make_config(*layers: LayerConfig, is_tied: bool = True) -> ModelConfig:
    return ModelConfig(
        architecture="none", vocab_size=9, hidden_size=8, layers=layers, norm_eps=1e-6, max_position_embeddings=16,
        tie_word_embeddings=is_tied,
    )  # fmt: skip


def zeros(model: Model) -> dict[str, torch.Tensor]:
    return {each.name: torch.zeros(each.shape) for each in model.parameters()}


LLAMA = {
    "layers.0.self_attn.qkv_proj.weight": ((48, 8), [("q_proj", 24, 6), ("k_proj", 12, 6), ("v_proj", 12, 0)]),
    "layers.0.self_attn.o_proj.weight": ((8, 24), [("o_proj", 8, 0)]),
    "layers.0.mlp.gate_up_proj.weight": ((14, 8), [("gate_proj", 7, 0), ("up_proj", 7, 0)]),
    "layers.0.mlp.down_proj.weight": ((8, 7), [("down_proj", 8, 0)]),
    "layers.0.input_norm.weight": ((8,), [("input_norm", 8, 0)]),
    "layers.0.mlp_norm.weight": ((8,), [("mlp_norm", 8, 0)]),
}
OPTIONS = {
    "layers.0.self_attn.qkv_proj.weight": ((46, 8), [("q_proj", 24, 6), ("k_proj", 12, 6), ("v_proj", 10, 0)]),
    "layers.0.self_attn.qkv_proj.bias": ((46,), [("q_proj", 24, 6), ("k_proj", 12, 6), ("v_proj", 10, 0)]),
    "layers.0.self_attn.o_proj.weight": ((8, 20), [("o_proj", 8, 0)]),
    "layers.0.self_attn.o_proj.bias": ((8,), [("o_proj", 8, 0)]),
    "layers.0.self_attn.q_norm.weight": ((6,), [("q_norm", 6, 0)]),
    "layers.0.self_attn.k_norm.weight": ((6,), [("k_norm", 6, 0)]),
    "layers.0.mlp.gate_up_proj.weight": ((14, 8), [("gate_proj", 7, 0), ("up_proj", 7, 0)]),
    "layers.0.mlp.gate_up_proj.bias": ((14,), [("gate_proj", 7, 0), ("up_proj", 7, 0)]),
    "layers.0.mlp.down_proj.weight": ((8, 7), [("down_proj", 8, 0)]),
    "layers.0.mlp.down_proj.bias": ((8,), [("down_proj", 8, 0)]),
    "layers.0.input_norm.weight": ((8,), [("input_norm", 8, 0)]),
    "layers.0.post_attention_norm.weight": ((8,), [("post_attention_norm", 8, 0)]),
    "layers.0.mlp_norm.weight": ((8,), [("mlp_norm", 8, 0)]),
    "layers.0.post_mlp_norm.weight": ((8,), [("post_mlp_norm", 8, 0)]),
}
# The same layer where it reads the one before.
SHARING = {
    **OPTIONS,
    "layers.0.self_attn.qkv_proj.weight": ((24, 8), [("q_proj", 24, 6)]),
    "layers.0.self_attn.qkv_proj.bias": ((24,), [("q_proj", 24, 6)]),
}
del SHARING["layers.0.self_attn.k_norm.weight"]
AROUND = {"embed_tokens.weight": ((9, 8), [("embed_tokens", 9, 0)]), "norm.weight": ((8,), [("norm", 8, 0)])}
HEAD = {"lm_head.weight": ((9, 8), [("lm_head", 9, 0)])}


def table(*layers: dict[str, Any], **around: Any) -> dict[str, Any]:
    return {
        name.replace("layers.0", f"layers.{index}"): value
        for index, layer in enumerate(layers)
        for name, value in layer.items()
    } | around


def listed(model: Model) -> dict[str, Any]:
    """Each parameter's shape and parts, of which the last word tells them apart; the rest is checked here."""
    found = {}
    for each in model.parameters():
        place, ending = each.name.rsplit(".", 1)
        folder = place.rpartition(".")[0]
        parts = []
        for part in each.parts:
            assert part.name.endswith(f".{ending}")
            stem = part.name.removesuffix(f".{ending}")
            assert stem.rpartition(".")[0] == folder
            parts.append((stem.rpartition(".")[2], part.num_rows, part.head_rows))
        assert each.name not in found
        found[each.name] = (each.shape, parts)
    return found


PLAIN_LAYER = LayerConfig(PLAIN, MLPConfig(7, "silu"))
OPTION_LAYER = LayerConfig(FULL_OF_OPTIONS, MLPConfig(7, "gelu_tanh", has_bias=True), ALL_NORMS)
SHARING_LAYER = replace(OPTION_LAYER, attention=replace(FULL_OF_OPTIONS, kv_owner=0))
NORMLESS_LAYER = replace(PLAIN_LAYER, norms=NormPlaces(False, False, False, False))
MODELS = {
    "two plain layers": (make_config(PLAIN_LAYER, PLAIN_LAYER), table(LLAMA, LLAMA, **AROUND)),
    "a head of its own": (make_config(PLAIN_LAYER, is_tied=False), table(LLAMA, **AROUND, **HEAD)),
    "all options": (make_config(OPTION_LAYER), table(OPTIONS, **AROUND)),
    "a layer that reads another's": (make_config(OPTION_LAYER, SHARING_LAYER), table(OPTIONS, SHARING, **AROUND)),
    "no norms in the layer": (
        make_config(NORMLESS_LAYER),
        table({name: value for name, value in LLAMA.items() if "norm" not in name}, **AROUND),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_asks_for_what_its_layers_have(name: str) -> None:
    config, expected = MODELS[name]
    assert listed(Model(config, torch.float32)) == expected


@pytest.mark.parametrize("place", ["input", "post_attention", "mlp", "post_mlp"])
def test_each_norm_stands_where_the_config_has_it(place: str) -> None:
    layer = replace(PLAIN_LAYER, norms=replace(NormPlaces(False, False, False, False), **{place: True}))
    model = Model(make_config(layer), torch.float32)
    norms = {each.name for each in model.parameters() if "norm" in each.name}
    assert norms == {f"layers.0.{place}_norm.weight", "norm.weight"}
    described = model.layers[0]
    there = {
        "input": described.input_norm,
        "post_attention": described.post_attention_norm,
        "mlp": described.mlp_norm,
        "post_mlp": described.post_mlp_norm,
    }
    assert [name for name, norm in there.items() if norm is not None] == [place]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_takes_tensors_as_they_are(name: str) -> None:
    model = Model(MODELS[name][0], torch.float32)
    tensors = zeros(model)
    model.load(tensors)
    assert model.tensors.keys() == tensors.keys()
    assert all(model.tensors[name] is tensor for name, tensor in tensors.items())
    assert model.device == torch.device("cpu")
    assert (model.head is model.embed_tokens) == ("lm_head.weight" not in tensors)


@pytest.mark.parametrize(
    "name", ["layers.1.mlp_norm.weight", "layers.0.post_mlp_norm.weight", "lm_head.weight", "layers.0.self_attn.weight"]
)
def test_a_tensor_that_is_nobodys_is_refused(name: str) -> None:
    model = Model(make_config(PLAIN_LAYER), torch.float32)
    with pytest.raises(InvariantError, match=f"no place for {name}"):
        model.load({**zeros(model), name: torch.zeros(8)})


@pytest.mark.parametrize("name", list(table(LLAMA, **AROUND, **HEAD)))
def test_a_part_that_gets_nothing_is_named(name: str) -> None:
    model = Model(make_config(PLAIN_LAYER, is_tied=False), torch.float32)
    tensors = zeros(model)
    del tensors[name]
    with pytest.raises(InvariantError, match=f"no weights for {name.removesuffix('.weight')}"):
        model.load(tensors)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name.endswith(".bias")])
def test_a_bias_is_asked_for_and_taken_by_who_has_it_alone(name: str) -> None:
    model = Model(make_config(OPTION_LAYER), torch.float32)
    tensors = zeros(model)
    bias = tensors.pop(name)
    with pytest.raises(InvariantError, match=f"no weights for {name.removesuffix('.bias')}"):
        model.load(tensors)
    plain = Model(make_config(PLAIN_LAYER), torch.float32)
    with pytest.raises(InvariantError, match=f"no place for {name}"):
        plain.load({**zeros(plain), name: bias})


def test_a_bias_alone_is_no_projection() -> None:
    model = Model(make_config(OPTION_LAYER), torch.float32)
    tensors = zeros(model)
    del tensors["layers.0.mlp.down_proj.weight"]
    with pytest.raises(InvariantError, match=r"no weights for layers\.0\.mlp\.down_proj"):
        model.load(tensors)


def test_a_norm_takes_a_weight_and_nothing_else() -> None:
    model = Model(make_config(PLAIN_LAYER), torch.float32)
    with pytest.raises(InvariantError, match=r"no place for norm\.bias"):
        model.load({**zeros(model), "norm.bias": torch.zeros(8)})
