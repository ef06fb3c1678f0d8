"""The digest of a model: the same for the same files wherever they lie, another for others."""

from __future__ import annotations

import shutil

import numpy as np

from lamella.model_executor.weights.model_identity import model_identity
from lamella.model_executor.weights.model_source import ModelSource, resolve_model
from tests.helpers.tiny_gemma import save_tiny_gemma


def test_it_depends_on_content_and_not_on_the_place(tmp_path):
    save_tiny_gemma(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found = model_identity(resolve_model(str(tmp_path / "a")))
    assert model_identity(resolve_model(str(tmp_path / "b"))) == found
    config = tmp_path / "b" / "config.json"
    config.write_text(config.read_text().replace('"sliding_window": 16', '"sliding_window": 17'))
    assert model_identity(resolve_model(str(tmp_path / "b"))) != found
    save_tiny_gemma(tmp_path / "c", seed=1)
    assert model_identity(resolve_model(str(tmp_path / "c"))) != found
    assert model_identity(resolve_model(str(tmp_path / "a"), "dummy")) != found


def test_a_tensor_of_a_thousandth_of_a_file_does_not_go_unseen(tmp_path):
    """9 MiB: 7 between the edges, of which 1,024 places are looked at."""
    content = np.random.default_rng(0).integers(0, 256, 9 << 20, dtype=np.uint8)
    path = tmp_path / "model.gguf"
    source = ModelSource("gguf", (path,), "model", tmp_path)
    path.write_bytes(content.tobytes())
    found = model_identity(source)
    for start in (100, 3_000_001, 7_777_777, (9 << 20) - 5):
        changed = content.copy()
        changed[start : start + len(content) // 1000] ^= 1
        path.write_bytes(changed.tobytes())
        assert model_identity(source) != found
    path.write_bytes(content[:-1].tobytes())
    assert model_identity(source) != found
