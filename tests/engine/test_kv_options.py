"""Engine arguments that shape the KV memory: fixed pools, and the report."""

from __future__ import annotations

import logging

import pytest

from lamella import LLM, CapacityError, ConfigError, Engine, EngineClosedError, EngineConfig, SamplingParams
from tests.helpers.tiny_gemma import save_tiny_gemma

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
# Two full and four sliding layers of 256 B a token (float32), windows of 16: pages of 8 and 16 KiB, slabs of 16 KiB.
SLAB_BYTES = 2**14
ARGUMENTS = {"max_model_len": 128, "max_num_seqs": 4, "check_invariants": True, "dtype": "float32", "device": "cpu"}
PROMPTS = [list(range(10, 10 + length)) for length in (5, 70, 33, 100, 17, 64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


def generated(folder, **arguments):
    with LLM(folder, **{**ARGUMENTS, **arguments}) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_kv_split_is_elastic_or_ratio():
    with pytest.raises(ConfigError, match="kv_split='half' is not known; choose one of elastic, ratio"):
        EngineConfig(model="m", kv_split="half")
    assert EngineConfig(model="m").kv_split == "elastic"


def test_a_ratio_needs_the_split():
    with pytest.raises(ConfigError, match=r'swa_full_tokens_ratio=0\.8 is given.*set kv_split="ratio"'):
        EngineConfig(model="m", swa_full_tokens_ratio=0.8)
    assert EngineConfig(model="m", kv_split="ratio", swa_full_tokens_ratio=0.8).swa_full_tokens_ratio == 0.8
    assert EngineConfig(model="m", kv_split="ratio", swa_full_tokens_ratio=2).swa_full_tokens_ratio == 2


@pytest.mark.parametrize("ratio", [0, -1.0, float("nan"), float("inf"), "0.8", True])
def test_a_ratio_is_a_positive_number(ratio):
    with pytest.raises(ConfigError, match=r"swa_full_tokens_ratio=.*must be a positive number"):
        EngineConfig(model="m", kv_split="ratio", swa_full_tokens_ratio=ratio)


@pytest.mark.parametrize(("ratio", "enable_prefix_caching"), [(0.5, True), (1.0, False), (None, False)])
def test_fixed_pools_give_the_same_tokens(folder, ratio, enable_prefix_caching):
    """13 slabs beside the null one: at r = 1 just enough for one request of 128 tokens (8 + 4 of them)."""
    expected = generated(folder, kv_cache_memory_bytes=2**22)
    options = {"swa_full_tokens_ratio": ratio, "enable_prefix_caching": enable_prefix_caching}
    assert generated(folder, kv_split="ratio", kv_cache_memory_bytes=14 * SLAB_BYTES, **options) == expected


def test_pools_stay_within_their_slabs(folder):
    """20 usable slabs at r = 0.8: cell = 2 * 256 + 0.8 * 4 * 256 = 1,331.2 B, 246 tokens, in pages 240, 7 slabs of two
    full pages; 0.8 * 240 = 192 tokens, 12 slabs of one."""
    with Engine(model=folder, kv_split="ratio", kv_cache_memory_bytes=21 * SLAB_BYTES, **ARGUMENTS) as engine:
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, GREEDY)
        while engine.has_unfinished_requests():
            engine.step()
            pages = engine.stats().pages
            assert sum(pages["full"]) <= 14
            assert sum(pages["sliding_16"]) <= 12
        peaks = engine.stats().peak_pages
        assert 8 <= peaks["full"] <= 14
        report = [line.split() for line in engine.kv_cache_report().splitlines()]
    assert ["full", "2", "8,192", "2", "2", "0.00%", "7", "224"] in report
    assert ["sliding_16", "4", "16,384", "4", "1", "0.00%", "12", "192"] in report


def test_capped_chunks_and_intervals_are_reported(folder, caplog):
    """4 windowed pages of 16 tokens: 1 + ceil(15 / 16) + ceil((c + 15) / 16) <= 4 up to c = 17, and
    1 + ceil((15 + I) / 16) <= 4 up to 33."""
    options = {"kv_split": "ratio", "swa_full_tokens_ratio": 0.5, "kv_cache_memory_bytes": 10 * SLAB_BYTES}
    with (
        caplog.at_level(logging.INFO, logger="lamella"),
        Engine(model=folder, swa_eviction_interval=100, **options, **ARGUMENTS) as engine,
    ):
        assert "prefill chunk: at most 17 tokens; eviction interval: 33 tokens" in engine.kv_cache_report()
    assert "the eviction interval is capped at 33 tokens" in caplog.text
    assert "chunks of one request are capped at 17 tokens" in caplog.text


def test_pools_below_one_request_are_refused(folder):
    with pytest.raises(CapacityError, match=r'kv_split="ratio", swa_full_tokens_ratio=0\.8.* bytes .* would do'):
        Engine(model=folder, kv_split="ratio", kv_cache_memory_bytes=6 * SLAB_BYTES, **ARGUMENTS)


def test_without_hybrid_memory_there_is_no_ratio(folder):
    arguments = {"disable_hybrid_kv_cache": True, "kv_split": "ratio", "kv_cache_memory_bytes": 2**22}
    with pytest.raises(ConfigError, match="no windowed layers"):
        Engine(model=folder, swa_full_tokens_ratio=0.8, **arguments, **ARGUMENTS)
    with Engine(model=folder, **arguments, **ARGUMENTS) as engine:
        assert "fixed pools" in engine.kv_cache_report()


def test_the_report_of_an_engine(folder):
    engine = Engine(model=folder, kv_cache_memory_bytes=33 * SLAB_BYTES, **ARGUMENTS)
    report = engine.kv_cache_report()
    lines = [line.split() for line in report.splitlines()]
    assert ["0-1", "sliding_16", "sliding", "window", "16", "2", "16", "16", "256"] in lines
    assert ["2", "full", "full", "all", "2", "16", "16", "256"] in lines
    assert ["full", "2", "8,192", "2", "2", "0.00%"] in lines
    assert "arena: 33 slabs = 540,672 B (528.0 KiB), one of them the null slab; slabs move between groups" in report
    # 128 tokens: 8 full pages and 1 + ceil((15 + 16) / 16) = 3 windowed ones, 114,688 B. The first has 8 windowed ones
    # for its chunk, so k requests take 4 k + 3 k + 5 slabs: 3 in 32.
    assert ["128", "3", "112.0", "KiB", "3", "8"] in lines
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.kv_cache_report()
