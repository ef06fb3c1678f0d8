"""Checks of the fused operators against float64 formulas, on a GPU or in the interpreter.

Each takes the kernels to check, so that copies with faults can be checked too. Inputs are rows of a wider matrix that
is NaN elsewhere; what a kernel must not touch is NaN, too, and must stay so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from lamella.attention.contract import LayerCache, token_major_cache
from lamella.attention.native_backend import HeadTransform
from tests.helpers.attention_cases import nan_arena
from tests.helpers.triton_cases import DEVICE, make_spec

# Of one rounding to the dtype, or of float32 arithmetic. The interpreter truncates where it makes bfloat16.
RELATIVE = {
    torch.float32: 1e-5,
    torch.float16: 2.0**-11 * 1.01,
    torch.bfloat16: 2.0**-7,
    torch.float8_e4m3fn: 2.0**-4 * 1.01,
    torch.float8_e5m2: 2.0**-3 * 1.01,
}
ABSOLUTE = {torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}  # half a step of the subnormal numbers
EXACT_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu_tanh": lambda x: 0.5 * x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()),
    "gelu": lambda x: 0.5 * x * torch.erfc(-x / 2**0.5),
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
    "relu": lambda x: x.clamp(min=0),
    "relu_squared": lambda x: x.clamp(min=0) ** 2,
}
PADDING = 13  # elements around the rows of an input


@dataclass(frozen=True, slots=True)
class Kernels:
    """The modules of `layers/triton`, as they are or as a copy with a fault has them."""

    norm: ModuleType
    heads: ModuleType
    activation: ModuleType


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """expected: float64. What 8 bits cannot hold is their largest number."""
    if actual.dtype in ABSOLUTE:
        largest = torch.finfo(actual.dtype).max
        expected = expected.clamp(-largest, largest)
    absolute = ABSOLUTE.get(actual.dtype, 0.0) + 4e-6
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=RELATIVE[actual.dtype], atol=absolute)


def random_rows(generator: torch.Generator, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_rows, width] on the device, its rows apart and NaN between them."""
    wide = torch.full((num_rows, width + 2 * PADDING), torch.nan)
    wide[:, PADDING:-PADDING] = torch.randn(num_rows, width, generator=generator) * 1.5
    return wide.to(dtype).to(DEVICE)[:, PADDING:-PADDING]


def assert_padding_untouched(rows: torch.Tensor) -> None:
    width = rows.shape[1] + 2 * PADDING
    wide = rows.as_strided((rows.shape[0], width), (width, 1), rows.storage_offset() - PADDING)
    assert wide.isnan().sum() == rows.shape[0] * 2 * PADDING


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.cpu().double()
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight.cpu().double()


def check_norm(kernels: Kernels, *, width: int, num_rows: int, dtype: torch.dtype, eps: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(width + num_rows)
    x = random_rows(generator, num_rows, width, dtype)
    weight = torch.randn(width, generator=generator).to(DEVICE)
    out = kernels.norm.rms_norm(x, weight, eps)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, x.shape, True)
    assert_near(out, norm64(x, weight, eps))


def check_add_norm(
    kernels: Kernels,
    *,
    width: int,
    num_rows: int,
    dtype: torch.dtype,
    has_post: bool = True,
    has_next: bool = True,
    bias_dtype: torch.dtype | None = None,
) -> None:
    """has_post, has_next: whether what is added and the sum are normed. bias_dtype: None for no bias."""
    generator = torch.Generator().manual_seed(width + num_rows)
    x, y = (random_rows(generator, num_rows, width, dtype) for _ in range(2))
    post, following, bias = (torch.randn(width, generator=generator).to(DEVICE) for _ in range(3))
    options: dict[str, torch.Tensor] = {}
    added = y.cpu().double()
    if bias_dtype is not None:
        options["bias"] = bias.to(bias_dtype)
        added = added + options["bias"].cpu().double()
    expected_x = x.cpu().double() + (norm64(added, post, 0.3) if has_post else added)
    out = kernels.norm.add_norm(
        x,
        y,
        post_weight=post if has_post else None,
        post_eps=0.3,
        next_weight=following if has_next else None,
        next_eps=0.7,
        **options,
    )
    assert_near(x, expected_x)
    assert_padding_untouched(x)
    if not has_next:
        assert out is x
        return
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, x.shape, True)
    # The norm is that of x as it is kept, exactly: so it is asked of the rounded one.
    assert_near(out, norm64(x, following, 0.7))


def check_layer_norm(
    kernels: Kernels, *, width: int, num_rows: int, dtype: torch.dtype, has_bias: bool, eps: float = 0.3
) -> None:
    generator = torch.Generator().manual_seed(width + num_rows)
    x = random_rows(generator, num_rows, width, dtype)
    weight, bias = (torch.randn(width, generator=generator).to(DEVICE) for _ in range(2))
    out = kernels.norm.layer_norm(x, weight, bias if has_bias else None, eps)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, x.shape, True)
    exact = x.cpu().double()
    expected = norm64(exact - exact.mean(-1, keepdim=True), weight, eps)
    assert_near(out, expected + bias.cpu().double() if has_bias else expected)


def check_activated(
    kernels: Kernels,
    *,
    width: int,
    num_rows: int,
    dtype: torch.dtype,
    activation: str,
    has_factor: bool,
    bias_dtype: torch.dtype | None,
) -> None:
    """An activation that is not of a gate beside its input. bias_dtype: None for no bias."""
    generator = torch.Generator().manual_seed(width + num_rows)
    x, factor = (random_rows(generator, num_rows, width, dtype) for _ in range(2))
    sums, options = x.cpu().double(), {}
    if bias_dtype is not None:
        options["bias"] = torch.randn(width, generator=generator).to(bias_dtype).to(DEVICE)
        sums = sums + options["bias"].cpu().double()
    if has_factor:
        options["factor"] = factor
    out = kernels.activation.activated(x, activation, **options)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, x.shape, True)
    expected = EXACT_ACTIVATIONS[activation](sums)
    assert_near(out, expected * factor.cpu().double() if has_factor else expected)


def check_gate(
    kernels: Kernels, *, num_gates: int, dim: int, num_rows: int, dtype: torch.dtype, activation: str, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(num_gates + dim)
    attended = torch.randn(num_rows, num_gates * dim, generator=generator).to(dtype).to(DEVICE)
    gate = random_rows(generator, num_rows, num_gates, dtype)
    bias = torch.randn(num_gates, generator=generator).to(DEVICE)
    sums = gate.cpu().double() + (bias.cpu().double() if has_bias else 0)
    opened = sums.sigmoid() if activation == "sigmoid" else (1 + sums.exp()).log()
    expected = attended.cpu().double() * opened.repeat_interleave(dim, dim=1)
    out = kernels.activation.gate_attention(attended, gate, activation, bias if has_bias else None)
    assert out is attended
    assert_near(out, expected)


def check_gated(
    kernels: Kernels,
    *,
    width: int,
    num_rows: int,
    dtype: torch.dtype,
    activation: str,
    bias_dtype: torch.dtype | None = None,
) -> None:
    """bias_dtype: None for no bias."""
    generator = torch.Generator().manual_seed(width + num_rows)
    gate_up = random_rows(generator, num_rows, 2 * width, dtype)
    if num_rows:
        gate_up[0, : min(width, 4)] = torch.tensor([-60.0, 60.0, 0.0, -9.0])[:width]  # far into both tails
    sums, options = gate_up.cpu().double(), {}
    if bias_dtype is not None:
        options["bias"] = torch.randn(2 * width, generator=generator).to(bias_dtype).to(DEVICE)
        sums = sums + options["bias"].cpu().double()
    out = kernels.activation.gated_activation(gate_up, activation, **options)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, (num_rows, width), True)
    gate, up = sums[:, :width], sums[:, width:]
    assert_near(out, EXACT_ACTIVATIONS[activation](gate) * up)


def check_softcap(kernels: Kernels, *, width: int, num_rows: int, dtype: torch.dtype, softcap: float) -> None:
    logits = random_rows(torch.Generator().manual_seed(width), num_rows, width, dtype) * 20
    if num_rows:
        logits[0, : min(width, 3)] = torch.tensor([-3e4, 3e4, 0.0])[:width]  # far above any cap
    out = kernels.activation.capped_logits(logits, softcap)
    assert (out.dtype, out.shape, out.is_contiguous()) == (torch.float32, (num_rows, width), True)
    torch.testing.assert_close(
        out.cpu().double(), (logits.cpu().double() / softcap).tanh() * softcap, rtol=1e-5, atol=3e-7 * softcap
    )


def rotated64(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x float64 [T, heads, dim], elements i and i + n as one complex number, times that of the angle: cos and sin
    [T, 1, n], 2 n at most dim; the other elements as they are."""
    half = cos.shape[-1]
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    turned = pairs * torch.complex(cos.cpu().double(), sin.cpu().double())
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


def check_heads(
    kernels: Kernels,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    page_tokens: int = 4,
    unslotted: Sequence[int] = (),
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    v_dim: int | None = None,
    rotary_dim: int | None = None,
    has_norms: bool = True,
    bias_dtype: torch.dtype | None = None,
) -> None:
    """unslotted: tokens with slot -1, whose projection is NaN as a padded row's may be.

    head_dim: of Q and K; v_dim None: of V, too. rotary_dim: how much of a head is rotated; None: all, 0: there are no
    tables. bias_dtype: None for no bias.
    """
    cache_dtype = cache_dtype or dtype
    v_dim = head_dim if v_dim is None else v_dim
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    generator = torch.Generator().manual_seed(head_dim + num_heads)
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * v_dim]
    columns = random_rows(generator, num_tokens, sum(sizes), dtype)
    query_norm, key_norm = (torch.randn(head_dim, generator=generator).to(DEVICE) for _ in range(2))
    angles = torch.randn(num_tokens, 1, rotary_dim // 2, generator=generator) * 3
    cos, sin = angles.cos().to(dtype).to(DEVICE), angles.sin().to(dtype).to(DEVICE)
    options = {}
    if bias_dtype is not None:
        options["bias"] = torch.randn(sum(sizes), generator=generator).to(bias_dtype).to(DEVICE)

    # A page is wider than a unit, and this layer's part begins inside it.
    key_bytes, value_bytes = (max(1, num_kv_heads) * dim * cache_dtype.itemsize for dim in (head_dim, v_dim))
    layer_bytes = page_tokens * (key_bytes + value_bytes)
    unit_bytes, offset_bytes, num_pages = 2 * layer_bytes + 64, layer_bytes, 2 + num_tokens
    # One more page at either end: a kernel that writes to slot -1, or too far, finds memory there as in an arena.
    arena = nan_arena((num_pages + 2) * unit_bytes).to(DEVICE)
    spec = make_spec(
        "full",
        num_kv_heads=max(1, num_kv_heads),
        k_dim=head_dim,
        v_dim=v_dim,
        itemsize_bytes=cache_dtype.itemsize,
    )
    cache: LayerCache = token_major_cache(
        arena,
        spec=spec,
        dtype=cache_dtype,
        page_tokens=page_tokens,
        unit_bytes=unit_bytes,
        offset_bytes=unit_bytes + offset_bytes,
    )
    slots = torch.randperm(num_pages * page_tokens, generator=generator)[:num_tokens]
    for token in unslotted:
        slots[token] = -1
        columns[token] = torch.nan

    query = kernels.heads.transform_heads(
        columns,
        HeadTransform(
            query_norm if has_norms else None,
            key_norm if has_norms else None,
            0.3,
            cos if rotary_dim else None,
            sin if rotary_dim else None,
        ),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        cache=cache,
        slots=slots.to(DEVICE),
        k_scale=k_scale,
        v_scale=v_scale,
        **options,
    )

    sums = columns.cpu().double()
    if options:
        sums = sums + options["bias"].cpu().double()
    queries, keys, expected_values = sums.split(sizes, dim=1)
    queries, keys = (part.unflatten(1, (-1, head_dim)) for part in (queries, keys))
    if has_norms:
        queries, keys = norm64(queries, query_norm, 0.3), norm64(keys, key_norm, 0.3)
    expected_query, expected_keys = rotated64(queries, cos, sin), rotated64(keys, cos, sin)
    assert (query.dtype, query.shape, query.is_contiguous()) == (dtype, (num_tokens, num_heads, head_dim), True)
    slotted = slots >= 0
    if num_heads:
        assert_near(query[slotted], expected_query[slotted])
        assert query[~slotted].isnan().all()

    # By plain byte offsets; what has been compared is made NaN again, and then there must be nothing else.
    left = arena.cpu()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0 or num_kv_heads == 0:
            continue
        page, in_page = divmod(slot, page_tokens)
        begin = (1 + page) * unit_bytes + offset_bytes
        for expected, scale, start, row_bytes in (
            (expected_keys, k_scale, begin + in_page * key_bytes, key_bytes),
            (expected_values, v_scale, begin + page_tokens * key_bytes + in_page * value_bytes, value_bytes),
        ):
            written = left[start : start + row_bytes]
            assert_near(written.view(cache_dtype), expected[token].flatten() / scale)
            written.fill_(0xFF)
    assert (left == 0xFF).all()
