"""adapter_config.json: which modules it names, and what is refused of it. What PEFT itself decides is in
tests/parity/test_peft.py."""

import json
import math

import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.adapters.lora_config import read_lora_config
from tests.helpers.lora_files import lora_config

MODULES = [
    f"model.layers.{layer}.{part}"
    for layer in (0, 1, 11)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
]


def read(tmp_path, **fields):
    (tmp_path / "adapter_config.json").write_text(json.dumps(lora_config(**fields)))
    return read_lora_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"target_modules": ["q_proj"]}, "0q 1q 11q"),
        ({"target_modules": ["proj"]}, ""),  # an end of a path is one of whole names
        ({"target_modules": ["mlp.down_proj", "o_proj"]}, "0o 0d 1o 1d 11o 11d"),
        ({"target_modules": ["1.mlp.down_proj"]}, "1d"),
        ({"target_modules": "all-linear"}, "0q 0o 0d 1q 1o 1d 11q 11o 11d"),
        ({"target_modules": "ALL-LINEAR", "exclude_modules": ["o_proj"]}, "0q 0d 1q 1d 11q 11d"),
        ({"target_modules": r".*\.(q|o)_proj"}, "0q 0o 1q 1o 11q 11o"),
        ({"target_modules": r"(q|o)_proj"}, ""),  # an expression is for the whole path
        ({"target_modules": r".*_proj", "exclude_modules": r".*\.1\..*"}, "0q 0o 0d 11q 11o 11d"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 11]}, "1q 11q"),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, "1q"),
        ({"target_modules": ["q_proj"], "layers_to_transform": []}, "0q 1q 11q"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, "1q"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "lay.*"]}, "1q"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h"]}, ""),
        # A path in full is meant whatever the layers are.
        ({"target_modules": ["model.layers.0.self_attn.q_proj", "o_proj"], "layers_to_transform": [1]}, "0q 1o"),
    ],
)
def test_modules_that_it_names(tmp_path, fields, named):
    config = read(tmp_path, **fields)
    found = [f"{name.split('.')[2]}{name.split('.')[4][0]}" for name in MODULES if config.is_target(name)]
    assert found == named.split()
    assert not config.is_target("lm_head") or fields["target_modules"] != "all-linear"


def test_rank_and_scale_of_a_module(tmp_path):
    config = read(
        tmp_path,
        r=8,
        lora_alpha=12,
        rank_pattern={"o_proj": 2, r"layers\.1\..*": 4},
        alpha_pattern={"model.layers.0.self_attn.o_proj": 3, "proj": 100},
    )
    expected = {
        "model.layers.0.self_attn.q_proj": (8, 12 / 8),
        "model.layers.0.self_attn.o_proj": (2, 3 / 2),
        "model.layers.1.self_attn.o_proj": (2, 12 / 2),  # the first that matches counts
        "model.layers.1.mlp.down_proj": (4, 12 / 4),
        "model.layers.11.mlp.down_proj": (8, 12 / 8),
    }
    assert {name: (config.rank_of(name), config.scale_of(name)) for name in expected} == expected
    stabilized = read(tmp_path, r=8, lora_alpha=12, use_rslora=True, rank_pattern={"o_proj": 2})
    assert stabilized.scale_of("a.q_proj") == pytest.approx(12 / math.sqrt(8))
    assert stabilized.scale_of("a.o_proj") == pytest.approx(12 / math.sqrt(2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type='IA3': only LoRA adapters are built; must be 'LORA'"),
        ({"peft_type": 3}, "peft_type=3: must be a string"),
        ({"r": 0}, "r=0: must be an integer from 1"),
        ({"r": 8.0}, r"r=8\.0: must be an integer"),
        ({"r": 2**40}, "r=1099511627776: must be an integer"),
        ({"lora_alpha": "16"}, "lora_alpha='16': must be a finite number"),
        ({"lora_alpha": None}, "lora_alpha=None: must be a finite number"),
        ({"lora_alpha": True}, "lora_alpha=True: must be a finite number"),
        ({"use_rslora": "yes"}, "use_rslora='yes': must be true or false"),
        ({"bias": "all"}, "bias='all': such an adapter changes the model's biases"),
        ({"target_modules": None}, "target_modules=None: must be a list of module names, a regular expression"),
        ({"target_modules": []}, r"target_modules=\[\]: must be"),
        ({"target_modules": [3]}, r"target_modules=\[3\]: must be a list of strings"),
        ({"target_modules": [""]}, r"target_modules=\[''\]: must be names of 1 to"),
        ({"target_modules": {"a": 1}}, "must be a list of strings"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform=.*must be a list of integers"),
        ({"layers_to_transform": -1}, "layers_to_transform=-1: must be an integer of at least 0"),
        ({"rank_pattern": {"q": 0}}, "rank_pattern.q=0: must be an integer"),
        ({"rank_pattern": [1]}, "rank_pattern=.*must be an object"),
        ({"alpha_pattern": {"q": "x"}}, "alpha_pattern.q='x': must be a finite number"),
        ({"use_dora": True}, "use_dora=True: DoRA changes every weight's norm"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: whole modules"),
        ({"lora_bias": True}, "lora_bias=True: biases"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters=.*experts"),
        ({"layer_replication": [[0, 2]]}, "layer_replication=.*grown"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices="),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens="),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16': it may change the model's own"),
        ({"init_lora_weights": ["olora"]}, "init_lora_weights="),
        ({"use_newest_thing": True}, "'use_newest_thing'=True: not a field of LoRA's that is known"),
    ],
)
def test_fields_that_are_refused(tmp_path, fields, message):
    with pytest.raises(ModelLoadError, match=rf"adapter_config\.json: .*{message}"):
        read(tmp_path, **fields)


def test_fields_that_ask_for_nothing_are_taken(tmp_path):
    config = read(
        tmp_path, use_newest_thing=None, other_thing=[], third=False, init_lora_weights="gaussian", fan_in_fan_out=True
    )
    assert config.is_target("a.q_proj")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    assert read_lora_config(tmp_path).scale_of("a.q_proj") == 1.0  # PEFT's own defaults: r=8, lora_alpha=8


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "layers_pattern"])
@pytest.mark.parametrize(("pattern", "message"), [("(", "no regular expression"), ("(.|..)*[#%]", "takes too long")])
def test_expressions_that_are_none_or_take_for_ever(tmp_path, monkeypatch, field, pattern, message):
    monkeypatch.setattr("lamella.model_executor.adapters.module_patterns.SECONDS", 0.05)
    config = read(tmp_path, **{"layers_to_transform": [1], field: pattern})
    with pytest.raises(ModelLoadError, match=rf"{field}='.*: .*{message}"):
        config.is_target("model.layers.1." + "self_attn." * 20 + "q_proj")


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_expressions_of_patterns_that_are_none(tmp_path, field):
    with pytest.raises(ModelLoadError, match=rf"{field}='\(': no regular expression"):
        read(tmp_path, **{field: {"(": 4}}).scale_of("a.q_proj")


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json"):
        read_lora_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="holds a list, not a JSON object"):
        read_lora_config(tmp_path)
