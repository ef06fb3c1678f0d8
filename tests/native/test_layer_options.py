"""Layers with and without what models differ in, as one call: against float64 formulas, and bit for bit against
themselves in other batches. The layers of one call differ from each other, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch.nn import functional

from lamella.attention.contract import AttentionParams
from lamella.attention.native_backend import HeadTransform, NativeBackend, paged_layer
from lamella.errors import ConfigError, InvariantError
from lamella.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from lamella.native.attention import AttentionKernels
from lamella.native.decoder import DecoderWeights, run_layers
from lamella.native.gguf_linear import pack_gguf
from lamella.native.int8 import quantize_int8
from lamella.native.layer_linear import LinearLayer
from lamella.native.layers import LayerTail
from lamella.native.library import NativeLibrary
from lamella.native.linear import pack_weight
from lamella.native.mlp import Gate, GatedMLP
from tests.helpers.attention_cases import make_metadata, nan_arena
from tests.helpers.pairwise import pairwise

EPS, THETA, SCALE = 1e-6, 1e4, 0.2
PAGE_TOKENS, PAGES_OF_REQUEST = 16, 2
LENGTHS = [1, 20, 3]  # of prompts
ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}

OPTIONS: dict[str, list[Any]] = {
    "dims": [(2, 1, 32, 32), (4, 2, 64, 64), (4, 4, 48, 16), (6, 2, 16, 80)],  # heads, KV heads, k_dim, v_dim
    "rotary": ["none", "part", "all"],
    "head_norms": [(), ("query", "key"), ("key",)],
    "norms": ["before", "after", "both", "none"],
    "biases": [(), ("qkv",), ("qkv", "o", "gate_up", "down")],
    "kind": ["float32", "int8", "w8a8", "Q4_1", "Q5_0", "parts"],
    "activation": ["silu", "gelu_tanh"],
    "window_tokens": [None, 9],
}


@dataclass(frozen=True)
class Layer:
    """What is computed with, and the same numbers in float64."""

    dims: tuple[int, int, int, int]
    rotary: str
    head_norms: tuple[str, ...]
    norms: str
    biases: tuple[str, ...]
    kind: str
    activation: str
    window_tokens: int | None
    width: int
    mlp_width: int
    seed: int
    exact: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def rotary_dim(self) -> int:
        k_dim = self.dims[2]
        return {"none": 0, "part": k_dim // 4 + 2, "all": k_dim}[self.rotary]

    @property
    def params(self) -> AttentionParams:
        num_heads, num_kv_heads, k_dim, v_dim = self.dims
        sizes = {"num_kv_heads": num_kv_heads, "k_dim": k_dim, "v_dim": v_dim, "itemsize_bytes": 4}
        if self.window_tokens is None:
            return AttentionParams(spec=FullAttentionSpec(**sizes), num_heads=num_heads, scale=SCALE)
        spec = SlidingWindowSpec(**sizes, window_tokens=self.window_tokens)
        return AttentionParams(spec=spec, num_heads=num_heads, scale=SCALE)

    def random(self, name: str, *shape: int) -> torch.Tensor:
        seed = 1000 * self.seed + sum(map(ord, name))
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    def linear(self, name: str, num_out: int, num_in: int) -> LinearLayer:
        weight = self.random(name, num_out, num_in) / num_in**0.5
        bias = self.random(name + " bias", num_out) if name in self.biases else None
        cuts = [0, num_out // 2 + 3, num_out] if self.kind == "parts" else [0, num_out]
        kinds = ["float32", "Q8_0"] if self.kind == "parts" else [self.kind]
        pieces = [stored(weight[begin:end], kind) for begin, end, kind in zip(cuts[:-1], cuts[1:], kinds, strict=True)]
        self.exact[name] = torch.cat([exact for _, exact in pieces])
        if bias is not None:
            self.exact[name + " bias"] = bias.double()
        return LinearLayer([made for made, _ in pieces], int8_activations=self.kind == "w8a8", bias=bias)

    def norm(self, name: str, width: int, is_there: bool) -> torch.Tensor | None:
        if not is_there:
            return None
        weight = 1 + self.random(name, width) / 4
        self.exact[name] = weight.double()
        return weight

    def weights(self) -> DecoderWeights:
        num_heads, num_kv_heads, k_dim, v_dim = self.dims
        before, after = self.norms in ("before", "both"), self.norms in ("after", "both")
        tail = LayerTail(
            self.linear("o", self.width, num_heads * v_dim),
            GatedMLP(
                self.linear("gate_up", 2 * self.mlp_width, self.width),
                self.linear("down", self.width, self.mlp_width),
                Gate(self.activation),
            ),
            post_attention_norm=self.norm("post_attention", self.width, after),
            pre_mlp_norm=self.norm("pre_mlp", self.width, before),
            post_mlp_norm=self.norm("post_mlp", self.width, after),
            following_norm=self.norm("following", self.width, before),
            eps=EPS,
        )
        return DecoderWeights(
            self.linear("qkv", num_heads * k_dim + num_kv_heads * (k_dim + v_dim), self.width),
            self.norm("query", k_dim, "query" in self.head_norms),
            self.norm("key", k_dim, "key" in self.head_norms),
            EPS,
            tail,
        )


def stored(weight: torch.Tensor, kind: str) -> tuple[Any, torch.Tensor]:
    """(as the kernels take it, the numbers that it then has in float64)."""
    if kind == "float32":
        return pack_weight(weight.contiguous()), weight.double()
    if kind in ("int8", "w8a8"):
        int8 = quantize_int8(weight)
        return int8, int8.levels().double() * int8.scales[: int8.num_out, None].double()
    storage = gguf.GGMLQuantizationType[kind]
    blocks = gguf.quants.quantize(weight.numpy(), storage)
    return pack_gguf(blocks, kind), torch.from_numpy(gguf.quants.dequantize(blocks, storage)).double()


def angles(positions: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """float64 [T, 1, rotary_dim / 2]."""
    frequencies = THETA ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    return (positions.double()[:, None] * frequencies)[:, None]


def exact_norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def exact_layer(layer: Layer, x: torch.Tensor, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One whole prompt, float64 [T, width] each."""
    exact, (num_heads, num_kv_heads, k_dim, v_dim) = layer.exact, layer.dims

    def linear(name: str, values: torch.Tensor) -> torch.Tensor:
        return functional.linear(values, exact[name], exact.get(name + " bias"))

    def turned(heads: torch.Tensor) -> torch.Tensor:
        half = layer.rotary_dim // 2
        turn = torch.polar(torch.ones(1).double(), angles(torch.arange(len(heads)), layer.rotary_dim))
        pairs = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * turn
        return torch.cat([pairs.real, pairs.imag, heads[..., 2 * half :]], dim=-1)

    sizes = [num_heads * k_dim, num_kv_heads * k_dim, num_kv_heads * v_dim]
    query, key, value = linear("qkv", normed).split(sizes, dim=1)
    query = turned(exact_norm(query.unflatten(1, (num_heads, k_dim)), exact.get("query")))
    key = turned(exact_norm(key.unflatten(1, (num_kv_heads, k_dim)), exact.get("key")))
    value = value.unflatten(1, (num_kv_heads, v_dim))
    key, value = (part.repeat_interleave(num_heads // num_kv_heads, dim=1) for part in (key, value))
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    is_seen = (distance >= 0) & (distance < (layer.window_tokens or len(x)))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
    x = x + exact_norm(linear("o", attended), exact.get("post_attention"))
    gate, up = linear("gate_up", exact_norm(x, exact.get("pre_mlp"))).chunk(2, dim=1)
    x = x + exact_norm(linear("down", ACTIVATIONS[layer.activation](gate) * up), exact.get("post_mlp"))
    return x, exact_norm(x, exact.get("following"))


class Stack:
    """Layers with their pages, which begin as NaN. Rows of x and normed are those of the prompts one after another."""

    def __init__(self, native_library: NativeLibrary, layers: list[Layer]) -> None:
        self.backend = NativeBackend(AttentionKernels(native_library))
        self.layers, self.weights = layers, [layer.weights() for layer in layers]
        generator = torch.Generator().manual_seed(5)
        self.x, self.normed = (torch.randn(sum(LENGTHS), layers[0].width, generator=generator) for _ in range(2))
        self.starts = np.cumsum([0, *LENGTHS])

    def caches(self) -> list[Any]:
        made = []
        for layer in self.layers:
            spec = layer.params.spec
            page_bytes = PAGE_TOKENS * spec.token_bytes
            arena = nan_arena(PAGES_OF_REQUEST * len(LENGTHS) * page_bytes)
            options = {"dtype": torch.float32, "page_tokens": PAGE_TOKENS, "unit_bytes": page_bytes, "offset_bytes": 0}
            made.append(self.backend.layer_cache(arena, spec=spec, **options))
        return made

    def metadata(self, spans: list[tuple[int, int, int]]):
        """spans: (request, position of its first token in this step, one past its last)."""
        request = np.concatenate([np.full(stop - start, one) for one, start, stop in spans])
        position = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
        slots = (request * PAGES_OF_REQUEST + position // PAGE_TOKENS) * PAGE_TOKENS + position % PAGE_TOKENS
        requests = np.array([one for one, _, _ in spans])
        return (
            make_metadata(
                page_tokens=PAGE_TOKENS,
                num_decodes=0,
                query_start=np.cumsum([0, *(stop - start for _, start, stop in spans)]),
                seq_lens=np.array([stop for _, _, stop in spans]),
                first_blocks=np.zeros(len(spans), dtype=np.int64),
                block_tables=requests[:, None] * PAGES_OF_REQUEST + np.arange(PAGES_OF_REQUEST),
                slot_mapping=slots,
            ),
            torch.from_numpy(self.starts[request] + position),
            torch.from_numpy(position),
        )

    def rotary(self, layer: Layer, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not layer.rotary_dim:
            return None
        turn = angles(positions, layer.rotary_dim)
        return turn.cos().float(), turn.sin().float()

    def run(self, steps: list[list[tuple[int, int, int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens, in these steps."""
        caches = self.caches()
        out = torch.full_like(self.x, torch.nan), torch.full_like(self.x, torch.nan)
        for spans in steps:
            metadata, rows, positions = self.metadata(spans)
            x, normed = self.x[rows], self.normed[rows]
            parts = list(zip(self.layers, self.weights, caches, strict=True))
            run_layers(
                [paged_layer(layer.params, cache, weights) for layer, weights, cache in parts],
                [
                    self.backend.layer_step(layer.params, self.rotary(layer, positions), metadata)
                    for layer in self.layers
                ],
                x,
                normed,
            )
            out[0][rows], out[1][rows] = x, normed
        return out

    def one_by_one(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens in one step, by the calls that the layers of a pruned step are made of."""
        metadata, rows, positions = self.metadata([(one, 0, length) for one, length in enumerate(LENGTHS)])
        x, normed = self.x.clone(), self.normed
        for layer, weights, cache in zip(self.layers, self.weights, self.caches(), strict=True):
            tables = self.rotary(layer, positions) or (None, None)
            transform = HeadTransform(weights.query_norm, weights.key_norm, EPS, *tables)
            num_query = layer.dims[0] * layer.dims[2]
            qkv = weights.qkv_proj(normed)
            self.backend.write_keys_values(layer.params, cache, qkv[:, num_query:], transform, metadata)
            attended = self.backend.attend_queries(
                layer.params, cache, qkv[:, :num_query], transform.of_rows(rows), metadata
            )
            normed = weights.tail(x, attended.flatten(1))
        return x, normed

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        xs, norms = [], []
        for begin, end in zip(self.starts[:-1], self.starts[1:], strict=True):
            x, normed = self.x[begin:end].double(), self.normed[begin:end].double()
            for layer in self.layers:
                x, normed = exact_layer(layer, x, normed)
            xs.append(x)
            norms.append(normed)
        return torch.cat(xs), torch.cat(norms)


AT_ONCE = [[(one, 0, length) for one, length in enumerate(LENGTHS)]]
TOKEN_BY_TOKEN = [[(one, at, at + 1)] for one, length in enumerate(LENGTHS) for at in range(length)]
IN_CHUNKS = [[(1, 0, 7)], [(0, 0, 1), (1, 7, 9), (2, 0, 2)], [(1, 9, 20), (2, 2, 3)]]

ROWS = pairwise(OPTIONS)


def check(native_library: NativeLibrary, layers: list[Layer]) -> None:
    stack = Stack(native_library, layers)
    together = stack.run(AT_ONCE)
    tolerance = 5e-3 if any(layer.kind == "w8a8" for layer in layers) else 2e-4
    for found, expected in zip(together, stack.exact(), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    for steps in (TOKEN_BY_TOKEN, IN_CHUNKS):
        for found, expected in zip(stack.run(steps), together, strict=True):
            assert torch.equal(found, expected)
    for found, expected in zip(stack.one_by_one(), together, strict=True):
        assert torch.equal(found, expected)
    torch.set_num_threads(2)
    for found, expected in zip(stack.run(AT_ONCE), together, strict=True):
        assert torch.equal(found, expected)


def label(row: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "") for value in row.values())


@pytest.mark.parametrize("index", range(len(ROWS)), ids=[label(row) for row in ROWS])
def test_layers_of_every_pair_of_options(native_library: NativeLibrary, index: int) -> None:
    """Three layers: this one between two of the other rows, so that neighbours differ in what they have."""
    chosen = [ROWS[index], ROWS[(index + 1) % len(ROWS)], ROWS[(index + 7) % len(ROWS)]]
    check(
        native_library,
        [Layer(**row, width=96, mlp_width=64 + 32 * seed, seed=seed) for seed, row in enumerate(chosen)],
    )


@pytest.mark.parametrize("kind", ["float32", "int8", "w8a8", "Q4_1", "parts"])
@pytest.mark.parametrize(
    ("dims", "width", "mlp_width", "biases"),
    [
        pytest.param((9, 3, 64, 64), 576, 1536, (), id="smollm2-135m"),
        pytest.param((14, 2, 64, 64), 896, 4864, ("qkv",), id="qwen2.5-0.5b", marks=pytest.mark.slow),
    ],
)
def test_a_layer_of_a_model(
    native_library: NativeLibrary, dims: Any, width: int, mlp_width: int, biases: tuple[str, ...], kind: str
) -> None:
    sizes = {"dims": dims, "width": width, "mlp_width": mlp_width, "biases": biases}
    options = {"rotary": "all", "head_norms": (), "norms": "before", "activation": "silu", "window_tokens": None}
    check(native_library, [Layer(**sizes, **options, kind=kind, seed=1)])


def test_what_does_not_fit_is_refused(native_library: NativeLibrary) -> None:
    stack = Stack(native_library, [Layer(**ROWS[0], width=96, mlp_width=64, seed=0)])
    layer, cache = stack.layers[0], stack.caches()[0]
    metadata, _, positions = stack.metadata(AT_ONCE[0])
    params, weights = layer.params, stack.weights[0]
    turn = angles(positions, 16).float()
    with pytest.raises(InvariantError, match="sin is None and the other is not; give both or neither"):
        stack.backend.layer_step(params, (turn, None), metadata)
    with pytest.raises(InvariantError, match="cos is None and the other is not; give both or neither"):
        stack.backend.kernels.qk_norm_rope_write(
            cache.pages, torch.zeros(24, weights.qkv_proj.num_out), num_heads=layer.dims[0], cos=None, sin=turn[:, 0],
            slots=metadata.slot_mapping,
        )  # fmt: skip
    wide = angles(positions, 2 * layer.dims[2]).float()
    step = stack.backend.layer_step(params, (wide, wide), metadata)
    made = paged_layer(params, cache, weights)
    with pytest.raises(InvariantError, match=f"{2 * layer.dims[2]} rotated dimensions .*heads of {layer.dims[2]}"):
        run_layers([made], [step], stack.x, stack.normed)
    other = Layer(**ROWS[0] | {"dims": (2, 1, 64, 32)}, width=96, mlp_width=64, seed=0).weights()
    with pytest.raises(ConfigError, match="do not fit"):
        paged_layer(params, cache, other)
