"""What would make a kernel read or write elsewhere is refused, and nothing is written. Pages are NaN at first."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from lamella.attention.contract import AttentionParams
from lamella.attention.native_backend import NativeBackend, paged_layer
from lamella.errors import ConfigError, InvariantError
from lamella.kv_cache.spec import FullAttentionSpec
from lamella.native.attention import AttentionKernels
from lamella.native.decoder import LayerStep, run_layers
from lamella.native.elementwise import add_norm, softcap
from lamella.native.gguf_linear import GgufWeight, linear_gguf
from lamella.native.int8 import Int8Weight, gather_rows_int8, linear_int8, quantize_int8
from lamella.native.int8_head import Int8Head, build_int8_head
from lamella.native.library import NativeLibrary
from lamella.native.linear import PackedWeight, linear, pack_weight
from lamella.native.top_columns import top_columns
from tests.helpers.attention_cases import Ragged, make_case, nan_arena
from tests.helpers.native_stack import Stack

PAGE_TOKENS, NUM_PAGES, NUM_TOKENS = 32, 3, 4
SPEC = FullAttentionSpec(num_kv_heads=2, k_dim=32, v_dim=16, itemsize_bytes=4)
NUM_SLOTS = NUM_PAGES * PAGE_TOKENS
ON_META = torch.device("meta")


@pytest.fixture(scope="module")
def kernels(native_library: NativeLibrary) -> AttentionKernels:
    return AttentionKernels(native_library)


def make_cache(kernels: AttentionKernels):
    page_bytes = PAGE_TOKENS * SPEC.token_bytes
    arena = nan_arena(NUM_PAGES * page_bytes)
    cache = NativeBackend(kernels).layer_cache(
        arena, spec=SPEC, dtype=torch.float32, page_tokens=PAGE_TOKENS, unit_bytes=page_bytes, offset_bytes=0
    )
    return cache, arena


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


WRONG_SLOTS = {
    "int32": (int64(0, 1, 2, 3).int(), "dtype torch.int32"),
    "float": (torch.zeros(NUM_TOKENS), "dtype torch.float32"),
    "short": (int64(0, 1, 2), r"3 slots|shape \[3\]"),
    "long": (int64(0, 1, 2, 3, 4), r"5 slots|shape \[5\]"),
    "column": (int64(0, 1, 2, 3)[:, None], r"shape \[4, 1\]"),
    "every second": (torch.arange(8)[::2], r"strides \(2,\)"),
    "one after the last": (
        int64(0, 1, NUM_SLOTS, 3),
        rf"slots\[2\] is {NUM_SLOTS}; it must lie in \[-1, {NUM_SLOTS}\)",
    ),
    "huge": (int64(0, 2**62, 2, 3), r"slots\[1\] is 4611686018427387904"),
    "below -1": (int64(0, 1, 2, -2), r"slots\[3\] is -2"),
    "elsewhere": (int64(0, 1, 2, 3).to(ON_META), "on meta"),
}


@pytest.mark.parametrize("wrong", WRONG_SLOTS)
def test_write_kv_refuses_wrong_slots(kernels: AttentionKernels, wrong: str) -> None:
    cache, arena = make_cache(kernels)
    slots, message = WRONG_SLOTS[wrong]
    with pytest.raises(InvariantError, match=message):
        kernels.write_kv(cache.pages, torch.zeros(NUM_TOKENS, 2, 32), torch.zeros(NUM_TOKENS, 2, 16), slots)
    assert arena.eq(0xFF).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": torch.zeros(3, 2, 16)}, "value has 3 tokens; key has 4"),
        ({"value": torch.zeros(5, 2, 16)}, "value has 5 tokens; key has 4"),
        ({"value": torch.zeros(NUM_TOKENS, 2, 32)}, "value"),
        ({"value": torch.zeros(NUM_TOKENS, 2, 16, dtype=torch.float64)}, "value .*float64"),
        ({"value": torch.zeros(NUM_TOKENS, 2, 16, device=ON_META)}, "value is on meta"),
        ({"key": torch.zeros(NUM_TOKENS, 2, 32, device=ON_META)}, "key is on meta"),
        ({"key": torch.zeros(NUM_TOKENS, 64)}, "key"),
    ],
)
def test_write_kv_refuses_wrong_rows(kernels: AttentionKernels, changes: dict, message: str) -> None:
    cache, arena = make_cache(kernels)
    rows = {"key": torch.zeros(NUM_TOKENS, 2, 32), "value": torch.zeros(NUM_TOKENS, 2, 16)} | changes
    with pytest.raises(InvariantError, match=message):
        kernels.write_kv(cache.pages, rows["key"], rows["value"], int64(0, 1, 2, 3))
    assert arena.eq(0xFF).all()


def test_the_last_slot_and_no_slot_are_right(kernels: AttentionKernels) -> None:
    cache, arena = make_cache(kernels)
    key, value = torch.rand(NUM_TOKENS, 2, 32), torch.rand(NUM_TOKENS, 2, 16)
    kernels.write_kv(cache.pages, key, value, int64(-1, NUM_SLOTS - 1, -1, 0))
    tokens = cache.keys[torch.arange(NUM_PAGES)].reshape(-1, 2, 32)
    assert torch.equal(tokens[NUM_SLOTS - 1], key[1])
    assert torch.equal(tokens[0], key[3])
    assert int(arena.view(torch.float32).isfinite().sum()) == 2 * 2 * (32 + 16)


def rope_arguments() -> dict:
    return {
        "qkv": torch.zeros(NUM_TOKENS, 3 * 32 + 2 * (32 + 16)), "num_heads": 3, "cos": torch.ones(8, 16),
        "sin": torch.zeros(8, 16), "slots": int64(0, 1, 2, 3), "positions": int64(0, 1, 2, 7),
    }  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_SLOTS)
def test_qk_norm_rope_write_refuses_wrong_slots(kernels: AttentionKernels, wrong: str) -> None:
    cache, arena = make_cache(kernels)
    slots, message = WRONG_SLOTS[wrong]
    with pytest.raises(InvariantError, match=message):
        kernels.qk_norm_rope_write(cache.pages, **(rope_arguments() | {"slots": slots}))
    assert arena.eq(0xFF).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": int64(0, 1, 2, 8)}, r"positions\[3\] is 8; it must lie in \[0, 8\)"),
        ({"positions": int64(-1, 1, 2, 3)}, r"positions\[0\] is -1"),
        ({"positions": int64(0, 1, 2)}, r"positions has shape \[3\]"),
        ({"positions": int64(0, 1, 2, 3).int()}, "positions has dtype torch.int32"),
        ({"positions": torch.arange(8)[::2]}, "positions has strides"),
        ({"qkv": torch.zeros(NUM_TOKENS, 192, device=ON_META)}, "qkv is on meta"),
        ({"cos": torch.ones(8, 16, device=ON_META)}, "cos is on meta"),
        ({"sin": torch.ones(8, 16, device=ON_META)}, "sin is on meta"),
        ({"key_weight": torch.ones(32, device=ON_META)}, "key_weight is on meta"),
    ],
)
def test_qk_norm_rope_write_refuses_wrong_positions_and_devices(
    kernels: AttentionKernels, changes: dict, message: str
) -> None:
    cache, arena = make_cache(kernels)
    with pytest.raises(InvariantError, match=message):
        kernels.qk_norm_rope_write(cache.pages, **(rope_arguments() | changes))
    assert arena.eq(0xFF).all()
    assert kernels.qk_norm_rope_write(cache.pages, **rope_arguments()).shape == (NUM_TOKENS, 3, 32)


def attention_case(kernels: AttentionKernels):
    case = make_case(SPEC, [Ragged(40), Ragged(3, 7)], num_heads=4, page_tokens=PAGE_TOKENS, panels=True)
    backend = NativeBackend(kernels)
    return backend, case, case.cache(backend, case.arena)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: {"query": case.query[:-1]}, "query has 7 rows"),
        (lambda case: {"out": torch.empty(9, 4, 16)}, "out 9"),
        (lambda case: {"query": case.query[:, :3]}, r"a multiple of 2 heads"),
        (lambda case: {"query": case.query.to(ON_META)}, "query is on meta"),
        (lambda case: {"out": torch.empty(8, 4, 16, device=ON_META)}, "out is on meta"),
    ],
)
def test_attention_refuses_rows_that_the_batch_has_not(kernels: AttentionKernels, change, message: str) -> None:
    backend, case, cache = attention_case(kernels)
    tensors = {"query": case.query, "out": torch.empty(8, 4, 16)} | change(case)
    with pytest.raises(InvariantError, match=message):
        backend.attend_all(case.params, cache, tensors["query"], case.metadata, tensors["out"])


def test_attention_refuses_pages_that_the_layer_has_not(kernels: AttentionKernels) -> None:
    backend, case, cache = attention_case(kernels)
    case.metadata.block_tables_host[0, 0] = cache.pages.num_ids
    with pytest.raises(InvariantError, match=f"holds page {cache.pages.num_ids}; this layer has pages 0 to"):
        backend.attend_all(case.params, cache, case.query, case.metadata, torch.empty(8, 4, 16))


def test_attention_refuses_sinks_of_fewer_heads(kernels: AttentionKernels) -> None:
    backend, case, cache = attention_case(kernels)
    params = AttentionParams(spec=SPEC, num_heads=4, scale=1.0, sinks=torch.zeros(3))
    with pytest.raises(InvariantError, match=r"sinks has shape \[3\]; it must be \[4\]"):
        backend.attend_all(params, cache, case.query, case.metadata, torch.empty(8, 4, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda slots: slots.astype(np.int32), "slots has dtype torch.int32"),
        (lambda slots: np.where(slots == slots.max(), 64, slots), "slots up to 64"),
        (lambda slots: np.where(slots == slots.max(), -7, slots), r"slots\[\d+\] is -7"),
    ],
)
def test_layers_refuse_wrong_slots(native_library: NativeLibrary, change, message: str) -> None:
    stack = Stack(native_library)
    slots = torch.from_numpy(change(stack.metadata.slot_mapping.numpy()))
    stack.metadata = dataclasses.replace(stack.metadata, slot_mapping=slots)
    before = stack.x.clone()
    with pytest.raises(InvariantError, match=message):
        stack.as_one_call()
    assert torch.equal(stack.x, before)


def test_layers_refuse_pages_that_a_layer_has_not(native_library: NativeLibrary) -> None:
    stack = Stack(native_library)
    tables = np.where(stack.metadata.block_tables_host == 3, 4, stack.metadata.block_tables_host)
    stack.metadata = dataclasses.replace(stack.metadata, block_tables_host=tables)
    with pytest.raises(InvariantError, match="pages up to 4; a layer's pages end with slot 63 of page 3"):
        stack.as_one_call()


def test_a_step_is_of_its_batch(native_library: NativeLibrary) -> None:
    stack = Stack(native_library)
    cos, sin = stack.rotary
    step = stack.backend.layer_step(stack.params[0], stack.rotary, stack.metadata)
    with pytest.raises(InvariantError, match="slots are of 23 tokens; the batch has 24"):
        LayerStep(step._kept[0], stack.metadata.slot_mapping[:23], cos[:23], sin[:23])
    layer = paged_layer(stack.params[0], stack.caches()[0], stack.weights[0])
    with pytest.raises(InvariantError, match="24 tokens"):
        run_layers([layer], [step], stack.x[:23], stack.normed[:23])


def test_query_heads_share_kv_heads_evenly(native_library: NativeLibrary) -> None:
    stack = Stack(native_library)
    params = dataclasses.replace(stack.params[0], num_heads=3)
    with pytest.raises(ConfigError, match="3 query heads cannot share 2 KV heads"):
        paged_layer(params, stack.caches()[0], stack.weights[0])


def int8_weight() -> Int8Weight:
    return quantize_int8(torch.rand(20, 8))


def gguf_panels(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


# Each makes a weight whose memory is not what its sizes say: a kernel would read on beyond its end.
WRONG_WEIGHTS = {
    "packed, elsewhere": lambda: PackedWeight(torch.zeros(2, 8, 16, device=ON_META), 20, 8),
    "int8, panels": lambda: dataclasses.replace(int8_weight(), num_out=33),
    "int8, inputs": lambda: dataclasses.replace(int8_weight(), num_in=9),
    "int8, scales": lambda: dataclasses.replace(int8_weight(), scales=torch.zeros(20)),
    "int8, elsewhere": lambda: dataclasses.replace(int8_weight(), panels=int8_weight().panels.to(ON_META)),
    "gguf, type": lambda: GgufWeight(gguf_panels(1, 1, 17, 16), "Q2_K", 16, 32),
    "gguf, panels": lambda: GgufWeight(gguf_panels(1, 1, 17, 16), "Q8_0", 17, 32),
    "gguf, inputs": lambda: GgufWeight(gguf_panels(1, 1, 17, 16), "Q8_0", 16, 96),
    "gguf, inputs that end inside a block": lambda: GgufWeight(gguf_panels(1, 1, 17, 16), "Q8_0", 16, 40),
    "gguf, words": lambda: GgufWeight(gguf_panels(1, 1, 11, 16), "Q8_0", 16, 32),
    "gguf, dtype": lambda: GgufWeight(gguf_panels(1, 1, 17, 16).short(), "Q8_0", 16, 32),
    "head, slopes": lambda: dataclasses.replace(make_head(), norm_slopes=torch.zeros(16)),
    "head, floats": lambda: dataclasses.replace(make_head(), float_panels=torch.zeros(1, 8, 16)),
}


def make_head() -> Int8Head:
    return build_int8_head(pack_weight(torch.rand(20, 8)).data, 20)


@pytest.mark.parametrize("wrong", WRONG_WEIGHTS)
def test_weights_are_as_large_as_they_say(native_library: NativeLibrary, wrong: str) -> None:
    with pytest.raises(InvariantError, match=r"must be|run on the CPU|has no kernel"):
        WRONG_WEIGHTS[wrong]()


CALLS_ON_META = {
    "linear_int8": lambda x: linear_int8(x, int8_weight()),
    "linear_int8, bias": lambda x: linear_int8(torch.rand(1, 8), int8_weight(), torch.zeros(20, device=ON_META)),
    "gather_rows_int8": lambda x: gather_rows_int8(int8_weight(), torch.zeros(1, dtype=torch.int64, device=ON_META)),
    "linear_gguf": lambda x: linear_gguf(x.repeat(1, 4), GgufWeight(gguf_panels(1, 1, 17, 16), "Q8_0", 16, 32)),
    "softcap": lambda x: softcap(x, 3.0),
    "head": lambda x: make_head().best(x),
}


@pytest.mark.parametrize("call", CALLS_ON_META)
def test_tensors_lie_on_the_cpu(native_library: NativeLibrary, call: str) -> None:
    with pytest.raises(InvariantError, match="on meta"):
        CALLS_ON_META[call](torch.zeros(1, 8, device=ON_META))


def test_rows_that_are_written_do_not_overlap(native_library: NativeLibrary) -> None:
    overlapping = torch.zeros(1, 20).expand(3, 20)
    with pytest.raises(InvariantError, match=r"out has strides .*must not overlap"):
        linear(torch.rand(3, 8), pack_weight(torch.rand(20, 8)), out=overlapping)
    with pytest.raises(InvariantError, match=r"x has strides .*must not overlap"):
        add_norm(overlapping, None, None, torch.ones(20), 1e-6)


def test_scores_are_a_matrix(native_library: NativeLibrary) -> None:
    with pytest.raises(InvariantError, match=r"scores has shape \[8\]"):
        top_columns(torch.zeros(8), 1)
    with pytest.raises(ConfigError, match=r"x is torch.float32 \[\]"):
        linear_int8(torch.tensor(1.0), int8_weight())
