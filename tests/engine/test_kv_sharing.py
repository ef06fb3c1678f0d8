"""A model config with layers that read another's KV gets the memory of the others, and no more."""

from __future__ import annotations

import dataclasses

import pytest

from lamella import Engine, InvariantError, SamplingParams
from lamella.engine import model_opening
from lamella.model_executor.weights.loading import load_config
from lamella.native.library import load_library
from tests.helpers.tiny_gemma import save_tiny_gemma

KV_SHARING = {3: 1, 4: 1, 5: 2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny Gemma 3, two sliding layers to a full one, whose config says that its last three layers share KV."""
    save_tiny_gemma(tmp_path)

    def load(source):
        config = load_config(source)
        layers = [
            dataclasses.replace(own, attention=dataclasses.replace(own.attention, kv_owner=KV_SHARING.get(index)))
            for index, own in enumerate(config.layers)
        ]
        return dataclasses.replace(config, layers=tuple(layers))

    monkeypatch.setattr(model_opening, "load_config", load)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("is_uniform", "groups"),
    [(False, [["sliding_16", "2", "8,192"], ["full", "1", "4,096"]]), (True, [["full", "3", "12,288"]])],
)
def test_the_engine_gives_shared_layers_no_memory(folder, is_uniform, groups):
    """256 B a token and layer, 16 tokens a page: 4,096 B for each of two sliding owners and one full."""
    with Engine(
        model=folder,
        load_format="dummy",
        dtype="float32",
        device="cpu",
        kv_cache_memory_bytes=2**20,
        max_model_len=64,
        disable_hybrid_kv_cache=is_uniform,
    ) as engine:
        lines = [line.split() for line in engine.kv_cache_report().splitlines()]
        layer_lines = lines[1 : lines.index([])]
        assert [line[:3] for line in lines[lines.index([]) + 2 :][: len(groups)]] == groups
        shared = [line[0:1] + line[-1:] for line in layer_lines if "shares" in line]
        assert shared == [["3-4", "1's"], ["5", "2's"]]


def test_a_model_that_has_its_own_kv_after_all_is_stopped(tmp_path, monkeypatch):
    save_tiny_gemma(tmp_path)
    monkeypatch.setattr(model_opening, "kv_sharing", lambda config: KV_SHARING)
    with Engine(
        model=str(tmp_path),
        dtype="float32",
        device="cpu",
        kv_cache_memory_bytes=2**20,
        max_model_len=64,
        check_invariants=True,
    ) as engine:
        engine.add_request("r", [1, 2, 3], SamplingParams(max_tokens=1))
        with pytest.raises(
            InvariantError, match="layer 3 gave K and V, but by the KV layout it reads those of layer 1"
        ):
            engine.step()


@pytest.mark.skipif(load_library() is None, reason="the native kernels are not there")
def test_the_log_names_the_layers_that_the_native_kernels_do_not_fuse(folder, caplog):
    with (
        caplog.at_level("INFO", logger="lamella.model_executor.layers.stack"),
        Engine(
            model=folder, load_format="dummy", device="cpu", kv_cache_memory_bytes=2**20, max_model_len=64
        ) as engine,
    ):
        assert engine.attention_backend == "native"
    (told,) = [record.getMessage() for record in caplog.records if "in finer parts" in record.getMessage()]
    assert told == f"layers {sorted(KV_SHARING)} run in finer parts on native: it reads another layer's K and V"
