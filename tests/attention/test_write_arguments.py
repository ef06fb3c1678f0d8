"""What does not fit is not written, by any backend with token-major pages. Pages are NaN at first."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lamella.attention.contract import AttentionBackend
from lamella.attention.reference import ReferenceBackend
from lamella.attention.torch_backend import TorchBackend
from lamella.attention.triton.backend import TritonBackend
from lamella.errors import InvariantError
from lamella.kv_cache.spec import FullAttentionSpec
from tests.helpers.attention_cases import Ragged, make_case, nan_arena

SPEC = FullAttentionSpec(num_kv_heads=2, k_dim=16, v_dim=32, itemsize_bytes=4)
BACKENDS = {"reference": ReferenceBackend, "torch": TorchBackend, "triton": TritonBackend}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return BACKENDS[request.param]()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda key, value, slots, stop: (key, value[:-1], slots), r"value has shape \[3, 2, 32\]; 4 keys take"),
        (lambda key, value, slots, stop: (key, value[:1], slots), r"value has shape \[1, 2, 32\]"),
        (lambda key, value, slots, stop: (key, value[:, :1], slots), r"value has shape \[4, 1, 32\]"),
        (lambda key, value, slots, stop: (key[..., :1], value, slots), r"key has shape \[4, 2, 1\]"),
        (lambda key, value, slots, stop: (key, value, slots[:-1]), r"slot_mapping is torch.int64 \[3\]; 4 tokens"),
        (lambda key, value, slots, stop: (key[:-1], value[:-1], slots), r"slot_mapping is torch.int64 \[4\]; 3 tokens"),
        (lambda key, value, slots, stop: (key, value, slots.int()), "slot_mapping is torch.int32"),
        (lambda key, value, slots, stop: (key, value, slots.float()), "slot_mapping is torch.float32"),
        (lambda key, value, slots, stop: (key, value, slots.index_fill(0, torch.tensor([2]), stop)), "holds {stop}; a"),
        (lambda key, value, slots, stop: (key, value, slots.index_fill(0, torch.tensor([2]), -2)), r"holds -2; a slot"),
    ],
)
def test_nothing_is_written_where_something_does_not_fit(backend: AttentionBackend, change, message: str) -> None:
    case = make_case(SPEC, [Ragged(0, 4)], num_heads=2, page_tokens=16)
    arena = nan_arena(len(case.arena))
    cache = case.cache(backend, arena)
    stop = cache.keys.shape[0] * 16
    key, value, slots = change(case.new_keys, case.new_values, case.metadata.slot_mapping, stop)
    metadata = dataclasses.replace(case.metadata, slot_mapping=slots)
    with pytest.raises(InvariantError, match=message.format(stop=stop)):
        backend.write_kv(cache, key, value, metadata)
    assert arena.eq(0xFF).all()


def test_slots_count_the_caches_pages(backend: AttentionBackend) -> None:
    case = make_case(SPEC, [Ragged(0, 4)], num_heads=2, page_tokens=16)
    metadata = dataclasses.replace(case.metadata, page_tokens=32)
    with pytest.raises(InvariantError, match="pages of 32 tokens; the cache has 16"):
        backend.write_kv(case.cache(backend, case.arena), case.new_keys, case.new_values, metadata)
