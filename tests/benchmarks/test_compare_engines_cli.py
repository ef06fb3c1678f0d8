"""What the command takes and refuses, how it starts each engine, and one run of it on a real engine."""

import json
import runpy
import stat
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from compare_engines.engines import EngineOptions, engine_setups
from compare_engines.hf_folder import hf_config, write_hf_folder
from compare_engines.preload import find_preload, given_preload
from compare_engines.workloads import WORKLOADS
from lamella import LLM, SamplingParams
from lamella.errors import ConfigError, ModelLoadError
from lamella.model_executor.models.registry import parse_config
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.weights.loading import load_config, resolve_model
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf

ROOT = Path(__file__).parents[2]
MAIN = runpy.run_path(str(ROOT / "benchmarks" / "compare_engines.py"))["main"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_tiny_gemma(folder)


@pytest.fixture(scope="module")
def gguf(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    save_tiny_gguf(path, model[1], general__file_type=0, gemma3__attention__sliding_window_pattern=3)
    return path


def command(*arguments):
    return CliRunner().invoke(MAIN, list(map(str, arguments)))


def options(model, **changes):
    return EngineOptions(**{"model": str(model), "num_threads": 2, "max_model_len": 300, **changes})


def program(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--engines", "lamella,vlm"),
             "engine 'vlm' is not known; choose of lamella, lamella-gguf, vllm, transformers, openvino, llama.cpp"),
            (("--workloads", "short,lnog"), "workload 'lnog' is not known; choose of single, short, long, prefix"),
            (("--engines", "vllm"), "pass the one that has it as --vllm-python"),
            (("--engines", "vllm", "--vllm-python", "/no/such/python"),
             "vllm_python='/no/such/python' is no program that can be run; pass an interpreter that has vllm"),
            (("--engines", "llama.cpp", "--llama-cpp-python", sys.executable),
             "engine 'llama.cpp' needs a .gguf file; pass it as --gguf"),
            (("--engines", "lamella-gguf", "--gguf", "no.gguf"), "gguf='no.gguf' does not exist"),
            (("--engines", "llama.cpp", "--llama-cpp-python", sys.executable, "--gguf", __file__,
              "--llama-cpp-cache", "split,one"), "llama_cpp_cache 'one' is not known; choose of split, unified"),
            (("--quantization", "int3"), "quantization 'int3' is not known; choose of none, int8, w8a8"),
            (("--output-json", "/no/such/folder/out.json"), "its folder does not exist"),
            (("--plot", "out.svg"), "give a name that ends in .png"),
        ],
    )  # fmt: skip
    def test_one_line_before_anything_runs(self, model, arguments, message):
        result = command("--model", model[0], *arguments)
        assert result.exit_code == 1
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
        assert result.stdout == ""

    def test_a_gguf_model_for_an_engine_that_reads_folders(self, gguf):
        with pytest.raises(ConfigError, match=r"no folder with a config\.json.*make_hf_folder\.py"):
            engine_setups("transformers", options(gguf))

    def test_an_openvino_folder_without_a_graph(self, model):
        given = options(model[0], interpreters={"openvino": sys.executable}, openvino_model=str(model[0]))
        with pytest.raises(ConfigError, match="optimum-cli export openvino"):
            engine_setups("openvino", given)


class TestSetups:
    def test_lamella_is_there_once_per_quantization(self, model):
        plain = engine_setups("lamella", options(model[0]))
        assert [(one.name, one.precision) for one in plain] == [("lamella", "fp32")]
        assert "quantization" not in plain[0].settings
        several = engine_setups("lamella", options(model[0], quantizations=("none", "int8", "w8a8", "gguf")))
        assert [(one.name, one.precision, one.settings["quantization"]) for one in several] == [
            ("lamella", "fp32", "none"), ("lamella-int8", "int8", "int8"), ("lamella-w8a8", "w8a8", "w8a8"),
            ("lamella-gguf", "gguf", "gguf"),
        ]  # fmt: skip

    def test_vllm_as_its_cpu_guide_advises(self, model, tmp_path):
        python = program(tmp_path / "bin" / "python")
        openmp = tmp_path / "lib" / "libiomp5.so"
        openmp.parent.mkdir()
        openmp.touch()
        given = options(model[0], interpreters={"vllm": python}, kv_cache_gib=3, vllm_preload=str(openmp))
        (setup,) = engine_setups("vllm", given)
        assert setup.command[0] == python
        expected = {
            "OMP_NUM_THREADS": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_CPU_KVCACHE_SPACE": "3",
            "LD_PRELOAD": str(openmp),
            "PYTHONPATH": None,
        }
        assert {name: setup.environment[name] for name in expected} == expected
        assert setup.settings["preloaded"] == str(openmp)

    def test_precision_is_read_off_the_model(self, model, gguf, tmp_path):
        interpreters = {"llama.cpp": sys.executable, "openvino": sys.executable}
        quantised = tmp_path / "q.gguf"
        save_tiny_gguf(quantised, model[1], general__file_type=15)
        for path, precision in ((gguf, "fp32"), (quantised, "Q4_K_M")):
            (setup,) = engine_setups("llama.cpp", options(model[0], interpreters=interpreters, gguf=str(path)))
            assert setup.precision == precision
        for stored, precision in (("f32", "fp32"), ("f16", "fp16"), ("i8", "int8"), ("u8", "int8"), ("u4", "int4")):
            (tmp_path / "openvino_model.xml").write_text(
                f'<data element_type="f32"/>\n<data element_type="{stored}" shape="2"/>'
            )
            given = options(model[0], interpreters=interpreters, openvino_model=str(tmp_path))
            assert engine_setups("openvino", given)[0].precision == precision

    def test_llama_cpp_is_there_once_per_cache(self, model, gguf):
        interpreters = {"llama.cpp": sys.executable}
        given = options(model[0], interpreters=interpreters, gguf=str(gguf))
        assert [(one.name, one.settings["kv_unified"]) for one in engine_setups("llama.cpp", given)] == [
            ("llama.cpp", False)
        ]
        both = replace(given, llama_cpp_caches=("unified", "split"))
        assert [(one.name, one.settings["kv_unified"]) for one in engine_setups("llama.cpp", both)] == [
            ("llama.cpp-unified", True), ("llama.cpp", False),
        ]  # fmt: skip

    def test_a_link_out_of_a_virtual_environment_is_not_followed(self, model, tmp_path):
        link = tmp_path / "python"
        link.symlink_to(sys.executable)
        (setup,) = engine_setups("transformers", options(model[0], interpreters={"transformers": str(link)}))
        assert setup.command[0] == str(link)


class TestPreload:
    def test_found_in_the_environment_and_in_the_system(self, tmp_path):
        python = tmp_path / "venv" / "bin" / "python"
        openmp = tmp_path / "venv" / "lib" / "libiomp5.so"
        tcmalloc = tmp_path / "usr" / "x86-linux-gnu" / "libtcmalloc_minimal.so.4"
        for path in (openmp, tcmalloc):
            path.parent.mkdir(parents=True)
            path.touch()
        found = find_preload(python, (str(tmp_path / "usr" / "*-linux-gnu"),))
        assert (found.paths, found.missing) == ((tcmalloc, openmp), ())
        assert found.describe() == f"{tcmalloc}, {openmp}"

    def test_what_is_missing_is_said(self, tmp_path):
        found = find_preload(tmp_path / "bin" / "python", ())
        assert found.paths == ()
        assert found.describe() == (
            "nothing; libtcmalloc_minimal.so.4 not found (Debian package libtcmalloc-minimal4 has it); "
            "libiomp5.so not found (Python package intel-openmp has it)"
        )

    def test_given(self, tmp_path):
        library = tmp_path / "lib.so"
        library.touch()
        assert given_preload(f"{library}:{library}").paths == (library, library)
        assert given_preload("").describe() == "nothing"
        with pytest.raises(ConfigError, match=r"absent\.so does not exist"):
            given_preload(str(tmp_path / "absent.so"))


def test_a_run_of_lamella(model, tmp_path):
    """A folder and the same weights as GGUF, each in its own process: the tokens are those that an LLM here gives."""
    folder, transformers_model = model
    gguf = tmp_path / "same.gguf"
    save_tiny_gguf(gguf, transformers_model, gemma3__attention__sliding_window_pattern=3)
    out, markdown = tmp_path / "out.json", tmp_path / "out.md"
    result = command(
        "--model", folder, "--engines", "lamella,lamella-gguf", "--gguf", gguf, "--workloads", "short,prefix",
        "--num-requests", "2", "--input-tokens", "8", "--shared-tokens", "20", "--output-tokens", "4",
        "--repeats", "1", "--threads", "1", "--kv-cache-gib", "1", "--output-json", out, "--output-markdown", markdown,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == markdown.read_text()
    found = json.loads(out.read_text())
    assert [(one["engine"], one["workload"], one["output_tokens"]) for one in found["results"]] == [
        ("lamella", "short", 8), ("lamella", "prefix", 8), ("lamella-gguf", "short", 8), ("lamella-gguf", "prefix", 8),
    ]  # fmt: skip
    assert all(one["seconds"][0] > 0 and one["start_seconds"][0] > 0 for one in found["results"])
    assert [one["token_agreement"] for one in found["results"]] == [1.0] * 4
    assert found["engines"]["lamella"]["versions"]["torch"] == torch.__version__
    assert found["workloads"][1] == {
        "name": "prefix", "num_requests": 2, "shared_tokens": 20, "own_tokens": 8, "output_tokens": 4,
    }  # fmt: skip


@pytest.mark.slow
def test_transformers_in_its_own_process_agrees(model, tmp_path):
    folder, _ = model
    out = tmp_path / "out.json"
    result = command(
        "--model", folder, "--engines", "lamella,transformers", "--workloads", "prefix", "--num-requests", "3",
        "--input-tokens", "8", "--shared-tokens", "20", "--output-tokens", "6", "--repeats", "1", "--threads", "1",
        "--kv-cache-gib", "1", "--output-json", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [one["token_agreement"] for one in json.loads(out.read_text())["results"]] == [1.0, 1.0]


class TestHfFolder:
    def test_the_weights_are_the_ones_the_gguf_was_made_of(self, model, gguf, tmp_path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        write_hf_folder(gguf, tmp_path / "out")
        original = model[1]
        copy = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        ids = torch.arange(3, 43)[None]
        with torch.inference_mode():
            expected, actual = original(ids).logits, copy(ids).logits
        assert copy.config.layer_types == original.config.layer_types
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        # "\u2581ab" and "c" as the vocabulary of the file has them, after <bos>.
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert tokenizer.convert_ids_to_tokens(tokenizer(" abc").input_ids) == ["<bos>", "\u2581abc"]

    def test_lamella_generates_the_same_of_both(self, gguf, tmp_path):
        write_hf_folder(gguf, tmp_path / "out")
        prompts = WORKLOADS["single"].resized(num_requests=3, own_tokens=30).prompts(320, 0)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        texts = []
        for path in (gguf, tmp_path / "out"):
            with LLM(str(path), max_model_len=64, kv_cache_memory_bytes=2**22) as llm:
                texts.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
        assert texts[0] == texts[1]

    def test_the_configuration_reads_back(self, gguf):
        config = load_config(resolve_model(str(gguf)))
        assert parse_config(TypedFields(hf_config(config), "config.json")) == config

    def test_linear_rope_scaling_reads_back(self, model, tmp_path):
        path = tmp_path / "scaled.gguf"
        save_tiny_gguf(
            path, model[1], gemma3__rope__scaling__type="linear", gemma3__rope__scaling__factor=8.0
        )  # fmt: skip
        config = load_config(resolve_model(str(path)))
        assert {layer.attention.rotary.position_divisor for layer in config.layers} == {1.0, 8.0}
        assert parse_config(TypedFields(hf_config(config), "config.json")) == config

    def test_a_folder_with_a_model_is_left_alone(self, model, gguf):
        before = np.frombuffer((model[0] / "model.safetensors").read_bytes(), np.uint8)
        with pytest.raises(ConfigError, match="already holds a model; name another folder"):
            write_hf_folder(gguf, model[0])
        assert np.array_equal(before, np.frombuffer((model[0] / "model.safetensors").read_bytes(), np.uint8))

    def test_what_is_no_gguf(self, tmp_path):
        (tmp_path / "x.gguf").write_bytes(b"nothing of the kind, but long enough")
        with pytest.raises(ModelLoadError, match="not a GGUF file"):
            write_hf_folder(tmp_path / "x.gguf", tmp_path / "out")
        assert not (tmp_path / "out").exists()
