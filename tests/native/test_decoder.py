"""Whole layers as one call, bit for bit against their kernels one by one."""

import pytest
import torch

from lamella.attention.native_backend import paged_layer
from lamella.errors import ConfigError, InvariantError
from lamella.native.decoder import run_layers
from tests.helpers.native_stack import Stack


@pytest.mark.parametrize("num_threads", [1, 2])
def test_is_its_kernels_one_by_one(native_library, num_threads):
    torch.set_num_threads(num_threads)
    stack = Stack(native_library)
    x, normed, caches = stack.as_one_call()
    expected_x, expected, expected_caches = stack.one_by_one()
    assert torch.equal(x, expected_x)
    assert torch.equal(normed, expected)
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        assert torch.equal(cache.keys.nan_to_num(7.0), expected_cache.keys.nan_to_num(7.0))
        assert torch.equal(cache.values.nan_to_num(7.0), expected_cache.values.nan_to_num(7.0))
    assert not torch.equal(x, stack.x), "or the test could not fail"


def test_what_does_not_fit_is_refused(native_library):
    stack = Stack(native_library)
    full, sliding = stack.params
    cache = stack.caches()[0]
    with pytest.raises(ConfigError, match=r"48 -> 192.*do not fit 4 query heads and 2 KV heads.*48 -> 256"):
        paged_layer(full, cache, stack.weights[1])
    step = stack.backend.layer_step(sliding, stack.rotary, stack.metadata)
    layer = paged_layer(full, cache, stack.weights[0])
    with pytest.raises(InvariantError, match="24 tokens and 32 rotated dimensions came with 23 rows"):
        run_layers([layer], [step], stack.x[:23], stack.normed[:23])
    with pytest.raises(InvariantError, match="normed has 5 rows; x has 24"):
        run_layers([layer], [step], stack.x, stack.normed[:5])
    with pytest.raises(InvariantError, match=r"cos has shape \[3, 1, 16\]; 24 tokens take \[24, 16\]"):
        stack.backend.layer_step(full, (stack.rotary[0][:3], stack.rotary[1]), stack.metadata)
