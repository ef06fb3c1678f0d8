"""Fields out of their ranges are refused when a model is loaded, by file, field and value; fields at the ends of their
ranges run as in transformers."""

from __future__ import annotations

import json

import pytest
import torch

from lamella import LLM, SamplingParams
from lamella.errors import ModelLoadError
from lamella.model_executor.weights.loading import load_config, load_sampling_defaults, resolve_model
from tests.helpers.tiny_gemma import save_tiny_gemma

NAN, INFINITY = float("nan"), float("inf")
HUGE = 10**400


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path, num_hidden_layers=2, sliding_window_pattern=2)
    return path


def changed(folder, path, file="config.json", **changes):
    """A copy of `folder` whose `file` has `changes`; a key "a.b" is b in a."""
    path.mkdir(parents=True, exist_ok=True)
    for each in folder.iterdir():
        (path / each.name).write_bytes(each.read_bytes())
    values = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    for key, value in changes.items():
        place = values
        *outer, last = key.split(".")
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = value
    (path / file).write_text(json.dumps(values))
    return path


REFUSED = [
    *(("final_logit_softcapping", value) for value in (0, 0.0, -30.0, NAN, INFINITY, HUGE, True, "30", [30.0])),
    *(("sliding_window", value) for value in (2**63, 2**64, HUGE, 0, -1, 16.0, True, "16", [16], None)),
    *(("eos_token_id", value) for value in ("1", 1.0, True, -1, 2**63, HUGE, [1, "2"], [1, None], [[1]], {"a": 1})),
    *(("bos_token_id", value) for value in ("2", 2.0, True, -2, [2], 2**64, 320)),
    *(("query_pre_attn_scalar", value) for value in (0, -16, NAN, INFINITY, HUGE, None, "16", 1e-320)),
    *(("rms_norm_eps", value) for value in (-1e-6, 0, NAN, INFINITY, None, "1e-6", True, 2.0, 1e-300)),
    *(("rope_parameters.full_attention.rope_theta", value) for value in (0, -1.0, NAN, INFINITY, "1e6", 1e-300, True)),
    *(("rope_parameters.sliding_attention.rope_theta", value) for value in (0, -1.0, NAN, HUGE)),
    *(("rope_theta", value) for value in (0, -1.0, NAN, HUGE, "x", None)),
    ("rope_parameters.full_attention.rope_theta", None),
    *(("rope_local_base_freq", value) for value in (0, -1.0, NAN, HUGE, "x")),
    *(("rope_scaling", value) for value in ("linear", 8.0, [8.0], {"rope_type": "linear"}, {"factor": -2.0})),
    *(("rope_scaling", {"rope_type": "linear", "factor": value}) for value in (0, -2.0, NAN, HUGE, "2", None)),
    *(("rope_scaling", {"rope_type": kind, "factor": 2.0}) for kind in ("llama3", "axial", 1, ["linear"])),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}),
    ("rope_parameters", [1]),
    ("rope_parameters.full_attention", "default"),
    ("rope_parameters.full_attention.partial_rotary_factor", 0.5),
    *(("head_dim", value) for value in (15, 0, -16, 16.0, True, None, 2**31, HUGE)),
    *(("num_attention_heads", value) for value in (0, -4, 3, 4.0, 2**31, None)),
    *(("num_key_value_heads", value) for value in (0, 3, True, 2**31)),
    *(("hidden_size", value) for value in (0, -64, 66, 2**40, "64")),
    *(("intermediate_size", value) for value in (0, 96.0, 2**40)),
    *(("vocab_size", value) for value in (0, -1, 2**40, 320.0, HUGE)),
    *(("num_hidden_layers", value) for value in (0, -1, 2**31, 2**63, HUGE, 2.0, True, None)),
    *(("max_position_embeddings", value) for value in (0, -1, 2**63, 512.0)),
    *(
        ("layer_types", value)
        for value in (["full_attention"], "full_attention", ["full_attention", 1], {}, [None] * 2)
    ),
    ("layer_types", ["full_attention", "linear_attention"]),
    ("sliding_window_pattern", 0),
    ("tie_word_embeddings", "yes"),
    ("tie_word_embeddings", 1),
    ("attention_bias", 1),
    ("use_bidirectional_attention", "no"),
    ("num_kv_shared_layers", -1),
    ("per_layer_config", {"0": {"head_dim": 8}}),
    ("hidden_activation", ["gelu_pytorch_tanh"]),
    ("dtype", 16),
    ("architectures", "Gemma3ForCausalLM"),
    ("architectures", [1]),
    ("model_type", 3),
]


@pytest.mark.parametrize(("key", "value"), REFUSED, ids=lambda each: str(each)[:40])
def test_a_config_field_out_of_its_range_is_refused(folder, tmp_path, key, value):
    path = changed(folder, tmp_path / "m", **{key: value})
    if key == "sliding_window_pattern":
        path = changed(path, tmp_path / "n", layer_types=None)
    names = [key.rpartition(".")[2], "key-value heads", *(value if isinstance(value, dict) else ())]
    with pytest.raises(ModelLoadError, match=rf"config\.json.*({'|'.join(names)})"):
        load_config(resolve_model(str(path)))


@pytest.mark.parametrize("place", ["tie_word_embeddings", "text_config.vocab_size", "text_config"])
def test_a_multimodal_config_is_checked_too(folder, tmp_path, place):
    text = json.loads((folder / "config.json").read_text())
    path = changed(folder, tmp_path / "m", architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3")
    path = changed(path, tmp_path / "n", text_config=text)
    assert load_config(resolve_model(str(path))).num_layers == 2
    path = changed(path, tmp_path / "o", **{place: "odd"})
    with pytest.raises(ModelLoadError, match=rf"config\.json: {place}='odd'"):
        load_config(resolve_model(str(path)))


GENERATION_REFUSED = [
    *(("top_k", value) for value in (2**64, 2**63, -1, 5.0, True, "5", HUGE)),
    *(("temperature", value) for value in (-0.1, 2.5, NAN, INFINITY, "1", True, HUGE)),
    *(("top_p", value) for value in (0, 1.5, -1, NAN, "1")),
    *(("min_p", value) for value in (-0.1, 1.1, NAN)),
    *(("repetition_penalty", value) for value in (0, -1.0, NAN, INFINITY, HUGE)),
    *(("do_sample", value) for value in ("false", 0, [])),
    *(("eos_token_id", value) for value in ("1", 1.5, True, -1, [1, "x"], 2**63, 320)),
    *(("max_new_tokens", value) for value in (0, -1, 2**63, 5.5)),
    *(("min_new_tokens", value) for value in (-1, 2**63, "3")),
    *(("stop_strings", value) for value in ("", [""], [1], 5, {"a": "b"})),
]


@pytest.mark.parametrize(("key", "value"), GENERATION_REFUSED, ids=lambda each: str(each)[:40])
def test_a_generation_config_field_out_of_its_range_is_refused(folder, tmp_path, key, value):
    path = changed(folder, tmp_path / "m", "generation_config.json", **{key: value})
    source = resolve_model(str(path))
    read = load_config if value == 320 else load_sampling_defaults  # the vocabulary's size stands in config.json
    with pytest.raises(ModelLoadError, match=rf"config\.json.*{key}"):
        read(source)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 2**30},
        {"sliding_window": 1},
        {"max_position_embeddings": 2**30},
        {"rms_norm_eps": 1.0},
        {"rms_norm_eps": 1e-29},
        {"query_pre_attn_scalar": 1},
        {"query_pre_attn_scalar": 10**6},
        {"rope_theta": 1e15},
        {"rope_theta": 1e-5},
        {"final_logit_softcapping": 1e9},
        {"final_logit_softcapping": 0.5},
        {"num_key_value_heads": 1, "head_dim": 2},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 6},
    ],
    ids=str,
)
def test_fields_at_the_ends_of_their_ranges_run_as_in_transformers(tmp_path, changes):
    model = save_tiny_gemma(tmp_path, num_hidden_layers=2, sliding_window_pattern=2, **changes)
    tokens = [7, 30, 200, 31, 8, 90, 100, 110, 120, 130]
    num_prompt = len(tokens)
    with torch.inference_mode():
        for _ in range(6):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(tmp_path), max_model_len=64, kv_cache_memory_bytes=2**22) as llm:
        (output,) = llm.generate([tokens[:num_prompt]], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == tokens[num_prompt:]
