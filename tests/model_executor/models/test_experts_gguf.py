"""Experts in GGUF metadata."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config_gguf import ConfigGguf
from lamella.model_executor.models.experts_gguf import experts_from_gguf, has_experts
from lamella.model_executor.models.mlp_config import RouterConfig
from lamella.model_executor.weights.gguf_header import read_gguf_header

ROUTER = RouterConfig(scoring="softmax", top_k=1)


def metadata(path: Path, **values: int) -> ConfigGguf:
    writer = gguf.GGUFWriter(path, "some")
    for key, value in values.items():
        writer.add_uint32(f"some.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ConfigGguf(read_gguf_header(path))


def test_numbers(tmp_path):
    numbers = {"expert_count": 6, "expert_used_count": 2, "feed_forward_length": 80}
    config = metadata(tmp_path / "a.gguf", **numbers)
    assert has_experts(config)
    experts = experts_from_gguf(config, ROUTER, shared_has_gate=True)
    assert (experts.num_experts, experts.router.top_k, experts.expert.width) == (6, 2, 80)
    assert (experts.shared, experts.shared_has_gate) == (None, False)
    others = {"expert_feed_forward_length": 48, "expert_shared_feed_forward_length": 32}
    experts = experts_from_gguf(metadata(tmp_path / "b.gguf", **numbers, **others), ROUTER, shared_has_gate=True)
    assert experts.shared is not None
    assert (experts.expert.width, experts.shared.width, experts.shared_has_gate) == (48, 32, True)


def test_a_file_without_experts(tmp_path):
    assert not has_experts(metadata(tmp_path / "a.gguf", feed_forward_length=8))
    assert not has_experts(metadata(tmp_path / "b.gguf", expert_count=0))


def test_more_experts_a_token_than_there_are(tmp_path):
    config = metadata(tmp_path / "a.gguf", expert_count=2, expert_used_count=3, feed_forward_length=8)
    with pytest.raises(ModelLoadError, match="expert_used_count=3: there are 2 experts"):
        experts_from_gguf(config, ROUTER)
