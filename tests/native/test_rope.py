"""qk_norm_rope_write against the formulas in float64, the models' own layers, and bit for bit against itself."""

from __future__ import annotations

import pytest
import torch

from lamella.attention.native_backend import NativeBackend, NativeLayerCache
from lamella.errors import InvariantError
from lamella.kv_cache.spec import FullAttentionSpec
from lamella.model_executor.layers.rotary import apply_rotary, rotary_frequencies, rotary_tables
from lamella.model_executor.layers.torch_functions import rms_norm
from lamella.model_executor.models.config import RotaryConfig
from lamella.native.attention import AttentionKernels
from lamella.native.library import NativeLibrary
from tests.helpers.attention_cases import make_metadata, nan_arena

EPS = 1e-6
NUM_HEADS, PAGE_TOKENS, NUM_PAGES = 3, 32, 6


@pytest.fixture(scope="module")
def kernels(native_library: NativeLibrary) -> AttentionKernels:
    return AttentionKernels(native_library)


def make_spec(k_dim: int = 64, v_dim: int = 64) -> FullAttentionSpec:
    return FullAttentionSpec(num_kv_heads=2, k_dim=k_dim, v_dim=v_dim, itemsize_bytes=4)


def make_cache(kernels: AttentionKernels, spec: FullAttentionSpec) -> tuple[NativeLayerCache, torch.Tensor]:
    page_bytes = PAGE_TOKENS * spec.token_bytes
    arena = nan_arena(NUM_PAGES * page_bytes)
    cache = NativeBackend(kernels).layer_cache(
        arena, spec=spec, dtype=torch.float32, page_tokens=PAGE_TOKENS, unit_bytes=page_bytes, offset_bytes=0
    )
    return cache, arena


def make_tables(
    positions: torch.Tensor, rotary_dim: int, theta: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = rotary_frequencies(RotaryConfig(rotary_dim, theta, scale), positions.device)
    return rotary_tables(positions, frequencies, torch.float32)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_qkv(spec: FullAttentionSpec, num_tokens: int) -> torch.Tensor:
    return 3 * randn(num_tokens, NUM_HEADS * spec.k_dim + spec.num_kv_heads * (spec.k_dim + spec.v_dim))


def scattered_slots(num_tokens: int) -> torch.Tensor:
    return torch.randperm(NUM_PAGES * PAGE_TOKENS, generator=torch.Generator().manual_seed(7))[:num_tokens]


def split(spec: FullAttentionSpec, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [T, NUM_HEADS, k_dim], key, value."""
    sizes = [NUM_HEADS * spec.k_dim, spec.num_kv_heads * spec.k_dim, spec.num_kv_heads * spec.v_dim]
    query, key, value = qkv.split(sizes, dim=1)
    return (
        query.reshape(-1, NUM_HEADS, spec.k_dim),
        key.reshape(-1, spec.num_kv_heads, spec.k_dim),
        value.reshape(-1, spec.num_kv_heads, spec.v_dim),
    )


def exact(heads: torch.Tensor, weight: torch.Tensor | None, positions: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """float64: the norm, then each pair (i, i + rotary_dim / 2) as a complex number turned by position * frequency."""
    heads = heads.double()
    if weight is not None:
        heads = heads / (heads.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    half = rotary_dim // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(len(positions), half).double(), positions.double()[:, None] * frequency)
    turned = torch.complex(heads[..., :half], heads[..., half:rotary_dim]) * turn[:, None]
    return torch.cat([turned.real, turned.imag, heads[..., rotary_dim:]], dim=-1)


def tokens_at(
    cache: NativeLayerCache, spec: FullAttentionSpec, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    pages = torch.arange(NUM_PAGES)
    keys = cache.keys[pages].reshape(-1, spec.num_kv_heads, spec.k_dim)
    return keys[slots], cache.values[pages].reshape(-1, spec.num_kv_heads, spec.v_dim)[slots]


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize(("k_dim", "v_dim", "rotary_dim"), [(64, 64, 64), (256, 256, 256), (96, 32, 40), (80, 48, 2)])
def test_equals_the_formulas(
    kernels: AttentionKernels, k_dim: int, v_dim: int, rotary_dim: int, with_norm: bool, num_tokens: int
) -> None:
    spec = make_spec(k_dim, v_dim)
    cache, _ = make_cache(kernels, spec)
    qkv, slots = make_qkv(spec, num_tokens), scattered_slots(num_tokens)
    positions = torch.arange(num_tokens) * 13 + 5
    cos, sin = make_tables(positions, rotary_dim, 10000.0, 1.0)
    query_weight, key_weight = (randn(k_dim, seed=1), randn(k_dim, seed=2)) if with_norm else (None, None)
    rotated = kernels.qk_norm_rope_write(
        cache.pages, qkv, num_heads=NUM_HEADS, cos=cos, sin=sin, slots=slots,
        query_weight=query_weight, key_weight=key_weight, eps=EPS,
    )  # fmt: skip
    query, key, value = split(spec, qkv)
    written_keys, written_values = tokens_at(cache, spec, slots)
    # The angle is rounded to float32: at position 525 by 3e-5.
    tolerance = {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(rotated.double(), exact(query, query_weight, positions, rotary_dim), **tolerance)
    torch.testing.assert_close(written_keys.double(), exact(key, key_weight, positions, rotary_dim), **tolerance)
    assert torch.equal(written_values, value)


@pytest.mark.parametrize("num_tokens", [2, 33])
def test_equals_the_layers_of_the_models(kernels: AttentionKernels, num_tokens: int) -> None:
    spec = make_spec(128, 128)
    cache, _ = make_cache(kernels, spec)
    qkv, slots = make_qkv(spec, num_tokens), scattered_slots(num_tokens)
    tables = make_tables(torch.arange(num_tokens) + 3000, 128, 1e6, 8.0)
    query_weight, key_weight = 1 + randn(128, seed=1), 1 + randn(128, seed=2)
    rotated = kernels.qk_norm_rope_write(
        cache.pages, qkv, num_heads=NUM_HEADS, cos=tables[0], sin=tables[1], slots=slots,
        query_weight=query_weight, key_weight=key_weight, eps=EPS,
    )  # fmt: skip
    query, key, _ = split(spec, qkv)
    torch.testing.assert_close(rotated, apply_rotary(rms_norm(query, query_weight, EPS), tables), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        tokens_at(cache, spec, slots)[0], apply_rotary(rms_norm(key, key_weight, EPS), tables), rtol=1e-5, atol=1e-5
    )


def test_bits_do_not_depend_on_neighbours_threads_strides_or_the_way_to_the_page(kernels: AttentionKernels) -> None:
    spec = make_spec()
    num_tokens = 50
    slots, positions = scattered_slots(num_tokens), torch.randint(0, 90, (num_tokens,))
    qkv = make_qkv(spec, num_tokens)
    cos, sin = (table[:, 0] for table in make_tables(torch.arange(90), 64, 10000.0, 1.0))
    weight = randn(64, seed=1)
    options = {"num_heads": NUM_HEADS, "cos": cos, "sin": sin, "query_weight": weight, "key_weight": weight, "eps": EPS}
    cache, arena = make_cache(kernels, spec)
    rotated = kernels.qk_norm_rope_write(cache.pages, qkv, slots=slots, positions=positions, **options)

    one_by_one, arena_of_one_by_one = make_cache(kernels, spec)
    for token in torch.randperm(num_tokens).tolist():
        rows = slice(token, token + 1)
        alone = kernels.qk_norm_rope_write(
            one_by_one.pages, qkv[rows], slots=slots[rows], positions=positions[rows], **options
        )
        assert torch.equal(alone[0], rotated[token])
    assert torch.equal(arena_of_one_by_one, arena)

    torch.set_num_threads(2)
    wide = torch.cat([qkv, randn(num_tokens, 8)], dim=1)[:, :-8]
    strided, arena_of_strided = make_cache(kernels, spec)
    table_rows = options | {"cos": cos[positions], "sin": sin[positions]}
    assert torch.equal(kernels.qk_norm_rope_write(strided.pages, wide, slots=slots, **table_rows), rotated)
    assert torch.equal(arena_of_strided, arena)

    # Keys as if they were queries, then write_kv: the same bytes.
    _, key, value = split(spec, qkv)
    plain, arena_of_plain = make_cache(kernels, spec)
    as_query = torch.cat([key.flatten(1), key.flatten(1), value.flatten(1)], dim=1)
    rotated_key = kernels.qk_norm_rope_write(
        plain.pages, as_query, slots=torch.full_like(slots, -1), positions=positions, **(options | {"num_heads": 2})
    )
    assert arena_of_plain.eq(0xFF).all()
    metadata = make_metadata(
        page_tokens=PAGE_TOKENS, num_decodes=0, query_start=slots[:0].numpy(), seq_lens=slots[:0].numpy(),
        first_blocks=slots[:0].numpy(), block_tables=slots[:0].numpy(), slot_mapping=slots.numpy(),
    )  # fmt: skip
    NativeBackend(kernels).write_kv(plain, rotated_key, value, metadata)
    assert torch.equal(arena_of_plain, arena)


def test_a_token_without_a_slot_is_rotated_and_not_written(kernels: AttentionKernels) -> None:
    spec = make_spec()
    qkv, slots = make_qkv(spec, 20), scattered_slots(20)
    cos, sin = make_tables(torch.arange(20), 64, 10000.0, 1.0)
    cache, arena = make_cache(kernels, spec)
    everywhere = kernels.qk_norm_rope_write(cache.pages, qkv, num_heads=NUM_HEADS, cos=cos, sin=sin, slots=slots)
    some = torch.where(torch.arange(20) % 3 == 0, -1, slots)
    partly, partly_arena = make_cache(kernels, spec)
    rotated = kernels.qk_norm_rope_write(partly.pages, qkv, num_heads=NUM_HEADS, cos=cos, sin=sin, slots=some)
    assert torch.equal(rotated, everywhere)
    written_keys, written_values = tokens_at(partly, spec, slots)
    assert written_keys[::3].isnan().all()
    assert written_values[::3].isnan().all()
    keys, values = tokens_at(cache, spec, slots)
    for kept in (1, 2):
        assert torch.equal(written_keys[kept::3], keys[kept::3])
        assert torch.equal(written_values[kept::3], values[kept::3])
    num_floats = 13 * 2 * (64 + 64)  # 13 of 20 tokens
    assert int(partly_arena.view(torch.float32).isfinite().sum()) == num_floats
    assert arena.view(torch.float32).isfinite().sum() > num_floats


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(4, 100)}, "qkv"),
        ({"qkv": torch.zeros(4, 448, dtype=torch.float64)}, "qkv"),
        ({"cos": torch.zeros(3, 32), "sin": torch.zeros(3, 32)}, "rotary tables"),
        ({"cos": torch.zeros(4, 40), "sin": torch.zeros(4, 40)}, "at most 32 columns"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, "3 slots"),
        ({"key_weight": torch.zeros(32)}, "key_weight"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(kernels: AttentionKernels, changes: dict, message: str) -> None:
    spec = make_spec()
    cache, arena = make_cache(kernels, spec)
    arguments = {
        "qkv": torch.zeros(4, 448), "cos": torch.zeros(4, 32), "sin": torch.zeros(4, 32),
        "slots": torch.zeros(4, dtype=torch.int64),
    }  # fmt: skip
    with pytest.raises(InvariantError, match=message):
        kernels.qk_norm_rope_write(cache.pages, num_heads=NUM_HEADS, **(arguments | changes))
    assert arena.eq(0xFF).all()
