"""Every number that a caller gives has a range, checked before it reaches an array; every other argument a type."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from lamella import LLM, CapacityError, ConfigError, EngineConfig, RequestError, SamplingParams
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.tiny_gemma import save_tiny_gemma

HUGE = pytest.param(10**400, id="huge")  # no float holds it
HUGE_BELOW = pytest.param(-(10**400), id="huge-below")
UNWRITABLE = pytest.param(10**5000, id="unwritable")  # nor does Python write it
UNWRITABLE_BELOW = pytest.param(-(10**5000), id="unwritable-below")
ARGUMENTS = {"max_model_len": 128, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 4, "check_invariants": True}

WHOLE_SAMPLING = (
    "n",
    "top_k",
    "seed",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "prompt_logprob_start",
    "no_repeat_ngram_size",
)
ID_LISTS = ("stop_token_ids", "allowed_token_ids", "suppress_tokens", "begin_suppress_tokens")
REAL_SAMPLING = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
WHOLE_ENGINE = (
    "seed",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "page_size",
    "swa_eviction_interval",
    "kv_cache_memory_bytes",
    "retention_grid_tokens",
    "max_loras",
    "max_cpu_loras",
    "max_lora_rank",
    "max_pinned_bytes",
    "tensor_parallel_size",
    "data_parallel_size",
    "distributed_timeout_seconds",
)
FRACTIONS = ("kv_cache_memory_fraction", "gpu_memory_utilization")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **ARGUMENTS) as llm:
        yield llm


def test_these_are_all_the_numbers_there_are():
    """A new number must be added to a list above, and so gets a range."""
    of_sampling = {f.name for f in dataclasses.fields(SamplingParams) if "int" in f.type or "float" in f.type}
    assert of_sampling == {*WHOLE_SAMPLING, *REAL_SAMPLING, *ID_LISTS, "bad_words_ids", "logit_bias"}
    of_engine = {f.name for f in dataclasses.fields(EngineConfig) if "int" in f.type or "float" in f.type}
    assert of_engine == {*WHOLE_ENGINE, *FRACTIONS, "swa_full_tokens_ratio"}


@pytest.mark.parametrize("value", [2**64, -(2**63), HUGE, UNWRITABLE, UNWRITABLE_BELOW])
@pytest.mark.parametrize("name", WHOLE_SAMPLING)
def test_whole_sampling_numbers_are_bounded(name, value):
    with pytest.raises(RequestError, match=f"^{name}=.* out of range; give ") as refusal:
        SamplingParams(**{name: value})
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "name", ["top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "no_repeat_ngram_size"]
)
def test_counts_fit_32_bits(name):
    arguments = {"max_tokens": None} if name == "min_tokens" else {}
    assert getattr(SamplingParams(**{name: 2**31 - 1, **arguments}), name) == 2**31 - 1
    with pytest.raises(RequestError, match=f"^{name}=2147483648 "):
        SamplingParams(**{name: 2**31, **arguments})


def test_samples_are_bounded_by_the_memory_that_they_take():
    assert SamplingParams(n=16_384).n == 16_384
    with pytest.raises(RequestError, match=r"^n=16385 .*at most 16384"):
        SamplingParams(n=16_385)


@pytest.mark.parametrize("value", [HUGE, HUGE_BELOW, UNWRITABLE, float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize("name", REAL_SAMPLING)
def test_real_sampling_numbers_are_bounded(name, value):
    with pytest.raises(RequestError, match=f"^{name}=.* out of range; give "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [2**31, 2**63, -1, HUGE, UNWRITABLE])
@pytest.mark.parametrize("name", [*ID_LISTS, "bad_words_ids"])
def test_token_ids_are_bounded(name, value):
    with pytest.raises(RequestError, match=rf"^{name}=.* out of range; give ids"):
        SamplingParams(**{name: [[1, value]] if name == "bad_words_ids" else [1, value]})


@pytest.mark.parametrize("value", [HUGE, HUGE_BELOW, UNWRITABLE, float("nan"), float("inf"), -float("inf"), 1e300])
def test_biases_are_bounded(value):
    with pytest.raises(RequestError, match=r"^logit_bias\[3\]=.* out of range; give a number to add"):
        SamplingParams(logit_bias={1: 1.0, 3: value})


@pytest.mark.parametrize(
    "value", [HUGE, UNWRITABLE, -5, 2**64, float("nan"), 2.5, "5", True, np.True_, [5], np.ones(2)]
)
@pytest.mark.parametrize("name", WHOLE_ENGINE)
def test_whole_engine_numbers_are_bounded(name, value):
    with pytest.raises(ConfigError, match=f"^{name}=") as refusal:
        EngineConfig("m", **{name: value})
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    ("name", "most"),
    [("max_num_seqs", 2**16), ("max_num_batched_tokens", 2**24), ("page_size", 2**16), ("max_model_len", 2**31 - 1),
     ("kv_cache_memory_bytes", 2**50), ("swa_eviction_interval", 2**31 - 1), ("retention_grid_tokens", 2**31 - 1),
     ("seed", 2**64 - 1)],
)  # fmt: skip
def test_the_ends_of_the_engines_ranges(name, most):
    more = {"max_num_batched_tokens": 2**24}
    assert getattr(EngineConfig("m", **{**more, name: np.uint64(most)}), name) == most
    assert type(getattr(EngineConfig("m", **{**more, name: np.uint64(most)}), name)) is int
    with pytest.raises(ConfigError, match=f"^{name}={most + 1} is out of range; give .*{most}"):
        EngineConfig("m", **{**more, name: most + 1})


@pytest.mark.parametrize("value", [0, -1, 1.5, HUGE, float("nan"), "0.5", True, [1], np.True_])
@pytest.mark.parametrize("name", FRACTIONS)
def test_fractions_are_fractions(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}=.*\(0, 1\]"):
        EngineConfig("m", **{name: value})
    assert type(getattr(EngineConfig("m", **{name: np.float32(0.5)}), name)) is float


@pytest.mark.parametrize("value", [HUGE, 1e300, 1e-300, np.True_, [1]])
def test_the_ratio_is_bounded(value):
    with pytest.raises(ConfigError, match=r"^swa_full_tokens_ratio=.*from 1e-06 to 1e\+06"):
        EngineConfig("m", kv_split="ratio", swa_full_tokens_ratio=value)
    assert (
        type(EngineConfig("m", kv_split="ratio", swa_full_tokens_ratio=np.float32(0.5)).swa_full_tokens_ratio) is float
    )


@pytest.mark.parametrize(
    "name",
    ["enable_prefix_caching", "disable_hybrid_kv_cache", "windowed_replay", "enforce_eager", "check_invariants",
     "async_scheduling", "enable_lora", "disable_log_stats"],
)  # fmt: skip
def test_truth_values_are_truth_values(name):
    of_that_type = {f.name for f in dataclasses.fields(EngineConfig) if "bool" in f.type}
    assert name in of_that_type
    assert len(of_that_type) == 8
    for value in ("no", "", 0, 1, [], np.ones(2)):
        with pytest.raises(ConfigError, match=f"^{name}=.*True or False"):
            EngineConfig("m", **{name: value})
    assert getattr(EngineConfig("m", **{name: np.False_}), name) is False


@pytest.mark.parametrize("name", ["model", "tokenizer", "cache_dir"])
def test_paths_are_paths(name):
    assert getattr(EngineConfig(**{"model": "m", name: Path("a/b")}), name) == "a/b"
    for value in (3, b"x", "", "a\0b", ["m"], True):
        with pytest.raises(ConfigError, match=f"^{name}="):
            EngineConfig(**{"model": "m", name: value})


@pytest.mark.parametrize(
    "name", ["load_format", "dtype", "quantization", "attention_backend", "kv_cache_dtype", "kv_split",
             "scheduling_policy", "retention"],
)  # fmt: skip
@pytest.mark.parametrize("value", [3, ["auto"], b"auto", np.array(["auto", "auto"]), True])
def test_choices_are_words(name, value):
    with pytest.raises(ConfigError, match=f"^{name}=.*choose one of"):
        EngineConfig("m", **{name: value})


def test_devices_are_checked():
    for device in ("auto", "cpu", "cuda", "cuda:1", torch.device("cpu"), torch.device("cuda", 3)):
        assert EngineConfig("m", device=device).device == str(device)
    for device in ("gpu", "tpu:0", "cuda:", "cuda:-1", "cuda:99999999", "CPU", 0, b"cpu", True, ["cpu"]):
        with pytest.raises(ConfigError, match=r'^device=.*use "auto", "cpu"'):
            EngineConfig("m", device=device)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("half", "float16"), ("float", "float32"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16")],
)
def test_dtypes_have_vllms_aliases(given, meant):
    assert EngineConfig("m", dtype=given).dtype == meant


def test_an_unusable_dtype_of_torch_is_refused():
    with pytest.raises(ConfigError, match=r"^dtype='float64'.*choose one of"):
        EngineConfig("m", dtype=torch.float64)


@pytest.mark.parametrize("value", [0, -3, HUGE, True, 2.5, "16"])
def test_a_retention_grid_is_bounded(value):
    with pytest.raises(ConfigError, match=r"^retention_grid_tokens="):
        RetentionPolicy("tails", value)


def test_more_kv_memory_than_there_is_is_refused_before_tables_are_made(folder):
    with pytest.raises(CapacityError, match=r"^kv_cache_memory_bytes=1125899906842624 is more than the \d+ bytes"):
        LLM(folder, kv_cache_memory_bytes=2**50)


def test_memory_that_ends_at_start_up_is_a_capacity_error(folder, monkeypatch):
    def end(config, *, shows_progress, start_workers):
        raise MemoryError("no 8 GiB")

    monkeypatch.setattr("lamella.engine.engine.load_engine", end)
    with pytest.raises(CapacityError, match=r"max_num_seqs=4.*max_model_len=128 \(no 8 GiB\); lower them"):
        LLM(folder, **ARGUMENTS)


@pytest.mark.parametrize("token", [2**63, 2**64, -(2**63) - 1, HUGE, UNWRITABLE])
def test_token_ids_beyond_any_array_are_refused(llm, token):
    for prompt in ([5, token], {"prompt_token_ids": [5, token]}):
        with pytest.raises(RequestError, match=r"^prompts\[0\]: prompt token 1 is .*must lie in \[0, \d+\]"):
            llm.generate([prompt], SamplingParams(), use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def test_a_top_k_above_the_vocabulary_means_all_of_it(llm):
    def drawn(**arguments):
        params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True, seed=7, **arguments)
        return llm.generate([[9, 8, 7]], params, use_tqdm=False)[0].outputs[0].token_ids

    vocab_size = llm.model_config.vocab_size
    everything = drawn(top_k=0)
    for top_k in (vocab_size, vocab_size + 1, 2**31 - 1):
        assert drawn(top_k=top_k) == everything
        assert drawn(top_k=top_k, top_p=0.9) == drawn(top_p=0.9)
    assert drawn(top_k=1) != everything


def test_the_ends_of_the_ranges_run(llm):
    params = SamplingParams(
        temperature=2.0, top_k=2**31 - 1, max_tokens=2**31 - 1, seed=2**64 - 1, repetition_penalty=1e6, min_p=1e-300
    )
    greedy = SamplingParams(temperature=0, max_tokens=4, repetition_penalty=1e-6, ignore_eos=True)
    first, second = llm.generate([[9, 8, 7], [9, 8, 7]], [params, greedy], use_tqdm=False)
    assert first.outputs[0].finish_reason in ("stop", "length")
    assert (second.outputs[0].finish_reason, len(second.outputs[0].token_ids)) == ("length", 4)


def plain(value, path=""):
    """(where, type) of whatever is none of Python's own numbers, strings, truth values or None."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from plain(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from plain(key, f"{path} key")
            yield from plain(one, f"{path}[]")
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from plain(one, f"{path}[]")
    elif type(value) not in (int, float, str, bool, type(None)):
        yield path, type(value).__name__


def test_numbers_in_outputs_are_pythons_own(llm):
    params = SamplingParams(temperature=0.9, max_tokens=6, logprobs=3, n=2, stop_token_ids=[5, 6, 7, 8], seed=1)
    prompts = [np.arange(3, 40), np.arange(3, 40, dtype=np.uint16), list(map(np.int64, range(3, 40))), "the quick"]
    outputs = [*llm.generate(prompts, params, use_tqdm=False), *llm.generate(prompts, params, use_tqdm=False)]
    assert outputs[-2].num_cached_tokens > 0
    assert outputs[0].outputs[0].cumulative_logprob < 0
    assert set(plain(outputs)) == set()


def test_statistics_are_pythons_own_numbers(llm):
    assert set(plain(llm.engine.stats())) == set()
