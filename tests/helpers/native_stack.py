"""A stack of layers on the native kernels, as one call and kernel by kernel."""

from __future__ import annotations

import numpy as np
import torch

from lamella.attention.contract import AttentionParams
from lamella.attention.native_backend import HeadTransform, NativeBackend, paged_layer
from lamella.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from lamella.model_executor.layers.rotary import rotary_frequencies, rotary_tables
from lamella.model_executor.models.config import RotaryConfig
from lamella.native.attention import AttentionKernels
from lamella.native.decoder import DecoderWeights, run_layers
from lamella.native.layer_linear import LinearLayer
from lamella.native.layers import LayerTail
from lamella.native.linear import pack_weight
from lamella.native.mlp import Gate, GatedMLP
from tests.helpers.attention_cases import make_metadata, nan_arena

EPS = 1e-6
WIDTH, MLP_WIDTH, NUM_HEADS, HEAD_DIM, PAGE_TOKENS = 48, 80, 4, 32, 16
SPECS = [
    FullAttentionSpec(num_kv_heads=2, k_dim=HEAD_DIM, v_dim=HEAD_DIM, itemsize_bytes=4),
    SlidingWindowSpec(num_kv_heads=1, k_dim=HEAD_DIM, v_dim=HEAD_DIM, itemsize_bytes=4, window_tokens=9),
]
LENGTHS = [1, 20, 3]  # of prompts


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 4


def layer_of(num_out: int, num_in: int, seed: int) -> LinearLayer:
    return LinearLayer([pack_weight(random(num_out, num_in, seed=seed))])


def make_weights(spec, seed: int) -> DecoderWeights:
    mlp = GatedMLP(layer_of(2 * MLP_WIDTH, WIDTH, seed + 1), layer_of(WIDTH, MLP_WIDTH, seed + 2), Gate("gelu_tanh"))
    tail = LayerTail(
        layer_of(WIDTH, NUM_HEADS * HEAD_DIM, seed), mlp, post_attention_norm=random(WIDTH, seed=seed + 3),
        pre_mlp_norm=1 + random(WIDTH, seed=seed + 4), post_mlp_norm=random(WIDTH, seed=seed + 5),
        following_norm=1 + random(WIDTH, seed=seed + 6), eps=EPS,
    )  # fmt: skip
    columns = (NUM_HEADS + 2 * spec.num_kv_heads) * HEAD_DIM
    norms = 1 + random(HEAD_DIM, seed=seed + 7), 1 + random(HEAD_DIM, seed=seed + 8)
    return DecoderWeights(layer_of(columns, WIDTH, seed + 9), *norms, EPS, tail)


class Stack:
    """A full and a sliding layer with their pages, for prompts that are computed in one step."""

    def __init__(self, native_library) -> None:
        self.backend = NativeBackend(AttentionKernels(native_library))
        self.params = [AttentionParams(spec=spec, num_heads=NUM_HEADS, scale=0.2) for spec in SPECS]
        self.weights = [make_weights(spec, 20 * index) for index, spec in enumerate(SPECS)]
        num_tokens = sum(LENGTHS)
        starts = np.cumsum([0, *LENGTHS])
        self.positions = torch.cat([torch.arange(length) for length in LENGTHS])
        tables = np.full((len(LENGTHS), 2), -1)
        tables[0, 0], tables[1], tables[2, 0] = 3, (1, 0), 2
        request = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
        position = self.positions.numpy()
        slots = tables[request, position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
        self.metadata = make_metadata(
            page_tokens=PAGE_TOKENS, num_decodes=1, query_start=starts, seq_lens=np.array(LENGTHS),
            first_blocks=np.zeros(len(LENGTHS), dtype=np.int64), block_tables=tables, slot_mapping=slots,
        )  # fmt: skip
        frequencies = rotary_frequencies(RotaryConfig(HEAD_DIM, 1e4), torch.device("cpu"))
        self.rotary = rotary_tables(self.positions, frequencies, torch.float32)
        self.x, self.normed = random(num_tokens, WIDTH, seed=90), random(num_tokens, WIDTH, seed=91)

    def caches(self):
        caches = []
        for spec in SPECS:
            page_bytes = PAGE_TOKENS * spec.token_bytes
            caches.append(
                self.backend.layer_cache(
                    nan_arena(4 * page_bytes), spec=spec, dtype=torch.float32, page_tokens=PAGE_TOKENS,
                    unit_bytes=page_bytes, offset_bytes=0,
                )
            )  # fmt: skip
        return caches

    def one_by_one(self):
        x, normed, caches = self.x.clone(), self.normed, self.caches()
        for params, weights, cache in zip(self.params, self.weights, caches, strict=True):
            transform = HeadTransform(weights.query_norm, weights.key_norm, EPS, *self.rotary)
            qkv = weights.qkv_proj(normed)
            num_query = NUM_HEADS * HEAD_DIM
            self.backend.write_keys_values(params, cache, qkv[:, num_query:], transform, self.metadata)
            attended = self.backend.attend_queries(params, cache, qkv[:, :num_query], transform, self.metadata)
            normed = weights.tail(x, attended.flatten(1))
        return x, normed, caches

    def as_one_call(self):
        x, normed, caches = self.x.clone(), self.normed.clone(), self.caches()
        parts = list(zip(self.params, self.weights, caches, strict=True))
        run_layers(
            [paged_layer(params, cache, weights) for params, weights, cache in parts],
            [self.backend.layer_step(params, self.rotary, self.metadata) for params, _, _ in parts],
            x,
            normed,
        )
        return x, normed, caches
