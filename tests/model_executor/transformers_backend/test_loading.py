"""A model from its files: what runs it, what is refused and how early, and that no code of its folder runs."""

import json
import logging
import re

import pytest
import torch

from lamella import LLM, SamplingParams
from lamella.engine.config import EngineConfig
from lamella.errors import ConfigError, ModelLoadError
from lamella.model_executor.models.transformers_backend.loading import check_model, load_checked
from lamella.model_executor.weights.model_source import resolve_model
from tests.helpers.tiny_decoders import save_tiny_decoder
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf
from tests.helpers.transformers_models import logits_of, random_config, save_random_model

PROMPT = list(range(6, 40))
ENGINE = {"kv_cache_memory_bytes": 1 << 24, "max_model_len": 128, "model_impl": "transformers"}


def tokens_of(folder, **arguments):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), **{**ENGINE, **arguments}) as llm:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        return type(llm.engine.inspect().runner.model).__name__, list(output.outputs[0].token_ids)


def greedy(model, num_tokens=8):
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize(
    ("name", "model_impl", "runs"),
    [
        ("mistral", "auto", "Stack"),
        ("mistral", "native", "Stack"),
        ("mistral", "vllm", "Stack"),
        ("mistral", "transformers", "TransformersModel"),
        ("helium", "auto", "TransformersModel"),
    ],
)
def test_native_layers_run_where_there_are_some_unless_told_otherwise(name, model_impl, runs, tmp_path):
    model = save_tiny_decoder(tmp_path, name) if name == "mistral" else save_random_model(tmp_path, name)
    assert tokens_of(tmp_path, model_impl=model_impl) == (runs, greedy(model))


def test_native_without_a_family_says_so(tmp_path):
    save_random_model(tmp_path, "helium")
    with pytest.raises(ModelLoadError, match="HeliumForCausalLM is not known"):
        LLM(str(tmp_path), **{**ENGINE, "model_impl": "native"})


@pytest.mark.parametrize("value", ["terratorch", "", 3, None])
def test_model_impl_is_one_of_three(value):
    if value is None:  # vLLM's way to leave it out
        assert EngineConfig("x", model_impl=value).model_impl == "auto"
        return
    with pytest.raises(ConfigError, match=r"model_impl=.* choose one of auto, native, transformers"):
        EngineConfig("x", model_impl=value)


def test_quantization_is_for_native_layers(tmp_path):
    save_tiny_decoder(tmp_path, "mistral")
    with pytest.raises(ConfigError, match="quantization='int8' is for native families"):
        LLM(str(tmp_path), quantization="int8", **ENGINE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_16_bits_are_computed_in_float32_on_a_cpu(dtype, tmp_path, caplog):
    model = save_random_model(tmp_path, "olmo2", dtype=dtype)
    with caplog.at_level(logging.INFO, logger="lamella"):
        assert tokens_of(tmp_path) == ("TransformersModel", greedy(model))
    said = [record.getMessage() for record in caplog.records if "computed in float32" in record.getMessage()]
    assert said == [f"{tmp_path}: stored in {dtype}, computed in float32"]


def test_a_multimodal_checkpoints_other_parts_are_left_out(tmp_path, caplog):
    save_random_model(tmp_path, "gemma3")
    checked = check_model(resolve_model(str(tmp_path)), None)
    with caplog.at_level(logging.INFO, logger="lamella"):
        runnable, _, _ = load_checked(checked, torch.float32, torch.device("cpu"), itemsize_bytes=4)
    assert type(runnable.model).__name__ == "Gemma3ForCausalLM"
    assert re.search("left out, for a text model does without: .*vision", caplog.text)


def test_longrope_is_served_as_far_as_one_text_does_not_change_anothers_embedding(tmp_path):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    limits = {"original_max_position_embeddings": 64, "max_position_embeddings": 256}
    model = save_random_model(tmp_path, "phi3", rope_parameters=rope, **limits)
    arguments = {**ENGINE, "max_model_len": None}
    with LLM(str(tmp_path), **arguments) as llm:
        assert llm.engine.max_model_len == 64
        (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert list(output.outputs[0].token_ids) == greedy(model)
    with pytest.raises(ConfigError, match="max_model_len=65: the model was made for at most 64 positions"):
        LLM(str(tmp_path), **{**ENGINE, "max_model_len": 65})


@pytest.mark.parametrize("length", [10**38, 2**30 + 1, 0, "64"])
def test_lengths_that_no_model_has(tmp_path, length):
    save_random_model(tmp_path, "olmo2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": length}))
    with pytest.raises(ModelLoadError, match=r"config.json.*max_position_embeddings"):
        LLM(str(tmp_path), **ENGINE)


def test_random_weights_need_no_files(tmp_path):
    random_config("olmo2").save_pretrained(tmp_path)
    save_random_model(tmp_path / "other", "olmo2")
    runs, tokens = tokens_of(tmp_path, load_format="dummy", tokenizer=str(tmp_path / "other"))
    assert (runs, len(tokens)) == ("TransformersModel", 8)


@pytest.mark.parametrize(("quantise", "parts"), [("F32", {}), ("Q8_0", {"tensors_in_part": 60})])
def test_gguf_files_give_the_native_tokens(tmp_path, quantise, parts):
    # 256 is the size that transformers takes for the scale, which such files leave to their reader, as the pattern.
    model = save_tiny_gemma(
        tmp_path / "folder", num_hidden_layers=12, sliding_window_pattern=6, head_dim=256, query_pre_attn_scalar=256
    )
    path = tmp_path / "model.gguf"
    save_tiny_gguf(path, model, quantise=quantise, **parts)
    if parts:
        path = tmp_path / "model-00001-of-00003.gguf"
    native = tokens_of(path, model_impl="native")
    assert tokens_of(path, model_impl="transformers") == ("TransformersModel", native[1])


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"gemma3__rope__scaling__factor": 8.0, "gemma3__rope__scaling__type": "linear"}, "gemma3.rope.scaling.factor"),
        ({"gemma3__final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping"),
    ],
)
def test_a_gguf_file_that_says_more_than_transformers_reads_is_refused(tmp_path, metadata, named):
    path = tmp_path / "model.gguf"
    save_tiny_gguf(path, save_tiny_gemma(tmp_path / "folder"), **metadata)
    with pytest.raises(ModelLoadError, match=f"transformers passes over .*{named}"):
        LLM(str(path), **ENGINE)


def test_a_gguf_file_that_transformers_reads_otherwise_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    save_tiny_gguf(path, save_tiny_gemma(tmp_path / "folder", head_dim=64, query_pre_attn_scalar=64))
    with pytest.raises(ModelLoadError, match=r"scale 0\.125 by the file, 0\.0625 by transformers"):
        LLM(str(path), **ENGINE)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


PLANTED = """
import pathlib
(pathlib.Path(__file__).parent / "was_run").touch()
"""


@pytest.mark.parametrize("model_type", ["olmo2", "not_installed"])
def test_no_code_of_a_folder_is_run(tmp_path, model_type):
    model = save_random_model(tmp_path, "olmo2")
    for name in ("configuration_planted", "modeling_planted"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    edit_config(
        tmp_path,
        model_type=model_type,
        architectures=["PlantedForCausalLM"],
        auto_map={
            "AutoConfig": "configuration_planted.PlantedConfig",
            "AutoModelForCausalLM": "modeling_planted.PlantedForCausalLM",
        },
    )
    if model_type == "olmo2":  # what is installed under the model's type runs
        assert tokens_of(tmp_path) == ("TransformersModel", greedy(model))
    else:
        with pytest.raises(ModelLoadError, match="transformers cannot read it"):
            LLM(str(tmp_path), **ENGINE)
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v4", "compressed keys beside a window"),
        ("inkling_text", "a convolution's state"),
        ("qwen3_next", "a recurrent state"),
        ("hy_v4", "an indexer's keys"),
        ("doge", "a mask that is not the one of full, sliding or chunked attention"),
        ("bloom", "call attention"),
        ("gemma2", "not causal"),
    ],
)
def test_a_model_that_is_not_run_is_refused_with_its_reason_before_weights_are_read(tmp_path, model_type, reason):
    """The config alone is there, so that reading weights would end in another error. Sizes are the published ones."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    changes = {"use_bidirectional_attention": True} if model_type == "gemma2" else {}
    CONFIG_MAPPING[model_type](**changes).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelLoadError, match=reason):
        LLM(str(tmp_path), **ENGINE)


def test_weights_that_do_not_fit_are_named(tmp_path):
    save_random_model(tmp_path, "olmo2")
    edit_config(tmp_path, num_hidden_layers=5)
    with pytest.raises(ModelLoadError, match=r"of its weights are not in its files: model\.layers\.4\."):
        LLM(str(tmp_path), **ENGINE)
    edit_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(ModelLoadError, match=r"of its weights have no place in the model: model\.layers\.3\."):
        LLM(str(tmp_path), **ENGINE)
    edit_config(tmp_path, num_hidden_layers=4, intermediate_size=112)
    with pytest.raises(ModelLoadError, match="have another shape"):
        LLM(str(tmp_path), **ENGINE)
