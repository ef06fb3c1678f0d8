"""Attention kernels to compare, each as a function from a batch to a call that computes its outputs.

What a kernel wants to have prepared (keys gathered to a dense array, a mask, a plan) is made outside the call, where
its users make it once per step or have it anyway. Only torch's SDPA and FlexAttention and flash-attn read dense keys,
and their gathering is not timed: that flatters them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu_attention.batches import Batch
from lamella.attention.contract import AttentionBackend
from lamella.errors import ConfigError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

# -> outputs [num_requests * num_new, num_heads, v_dim]
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Peer:
    """`prepare` may raise anything: what it does not support is for the report."""

    name: str
    module: str  # that must be importable
    prepare: Callable[[Batch], Call]

    @property
    def is_missing(self) -> bool:
        return importlib.util.find_spec(self.module) is None


def backend_call(backend: AttentionBackend, batch: Batch) -> Call:
    """One of our backends: decode or prefill over pages. What it derives from the metadata is derived once."""
    spec = batch.params.spec
    out = batch.query.new_empty(batch.query.shape[0], batch.params.num_heads, spec.v_dim)
    run = backend.decode if batch.metadata.num_decodes else backend.prefill

    def call() -> torch.Tensor:
        run(batch.params, batch.cache, batch.query, batch.metadata, out)
        return out

    return call


def triton(batch: Batch) -> Call:
    from lamella.attention.triton.backend import TritonBackend

    return backend_call(TritonBackend(), batch)


class _NoBackend:
    """Where another backend would do the work instead."""

    name = "no backend"

    def __getattr__(self, attribute: str) -> Any:
        raise ConfigError("no operator takes the layer's heads on this device")


def xformers(batch: Batch) -> Call:
    """With its gather, which is part of the backend, and nothing that takes over what it cannot do."""
    from lamella.attention.xformers_backend import XformersBackend

    other: Any = _NoBackend()
    return backend_call(XformersBackend(other=other), batch)


def _dense_inputs(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [num_requests, num_heads, num_new, k_dim], keys and values [num_requests, num_kv_heads, num_keys, dim]"""
    keys, values = (x.transpose(1, 2).contiguous() for x in batch.visible_keys())
    query = batch.query.unflatten(0, (batch.work.num_requests, -1)).transpose(1, 2).contiguous()
    return query, keys, values


def _rows(out: torch.Tensor) -> torch.Tensor:
    """[num_requests, num_heads, num_new, v_dim] as outputs"""
    return out.transpose(1, 2).flatten(0, 1)


def torch_sdpa(batch: Batch) -> Call:
    query, keys, values = _dense_inputs(batch)
    is_square = query.shape[2] == keys.shape[2]
    is_causal = is_square and isinstance(batch.work.spec, FullAttentionSpec) and query.shape[2] > 1
    visible = batch.visible()
    mask = None if is_causal or bool(visible.all()) else visible

    def call() -> torch.Tensor:
        return _rows(
            torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, mask, is_causal=is_causal, scale=batch.params.scale, enable_gqa=True
            )
        )

    return call


def flex_attention(batch: Batch) -> Call:
    """Compiled on a GPU, eager elsewhere."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as function

    query, keys, values = _dense_inputs(batch)
    device = query.device
    spec = batch.work.spec
    num_prior, first_key = batch.work.num_prior, batch.first_key
    reach = spec.reach_tokens or 0

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        query_position, key_position = q + num_prior, k + first_key
        seen = key_position <= query_position
        if isinstance(spec, SlidingWindowSpec):
            seen = seen & (query_position - key_position < reach)
        if isinstance(spec, ChunkedLocalAttentionSpec):
            seen = seen & (query_position // reach == key_position // reach)
        return seen

    mask = create_block_mask(mask_mod, None, None, query.shape[2], keys.shape[2], device=device.type)
    run = torch.compile(function, dynamic=False) if device.type == "cuda" else function

    def call() -> torch.Tensor:
        out = run(query, keys, values, block_mask=mask, scale=batch.params.scale, enable_gqa=True)
        assert isinstance(out, torch.Tensor)
        return _rows(out)

    return call


def _window(batch: Batch) -> tuple[int, int]:
    """(keys to the left, keys to the right) of a query's own as flash-attn counts them, -1 for all."""
    spec = batch.work.spec
    if isinstance(spec, ChunkedLocalAttentionSpec):
        raise ConfigError("has no chunked-local mask")
    return (-1, -1) if spec.reach_tokens is None else (spec.reach_tokens - 1, 0)


def _prefix_sum(length: int, batch: Batch) -> torch.Tensor:
    """int32 [num_requests + 1] of equal lengths"""
    steps = torch.arange(batch.work.num_requests + 1, dtype=torch.int32, device=batch.query.device)
    return steps * length


def flash_attn(batch: Batch) -> Call:
    """On dense keys: its paged form takes pages of 256 tokens only."""
    from flash_attn import flash_attn_varlen_func

    keys, values = (x.flatten(0, 1) for x in batch.visible_keys())
    num_keys = batch.seq_len - batch.first_key
    query_start, key_start = _prefix_sum(batch.work.num_new, batch), _prefix_sum(num_keys, batch)

    def call() -> torch.Tensor:
        return flash_attn_varlen_func(
            batch.query,
            keys,
            values,
            query_start,
            key_start,
            batch.work.num_new,
            num_keys,
            softmax_scale=batch.params.scale,
            causal=True,
            window_size=_window(batch),
        )

    return call


def vllm_flash_attn(batch: Batch) -> Call:
    """On pages, K and V of a page in one array each."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    first_position = batch.first_key // batch.metadata.page_tokens * batch.metadata.page_tokens
    num_keys = batch.seq_len - first_position
    keys, values = batch.cache.keys.contiguous(), batch.cache.values.contiguous()
    table = batch.metadata.block_tables.int()
    query_start = _prefix_sum(batch.work.num_new, batch)
    lengths = torch.full((batch.work.num_requests,), num_keys, dtype=torch.int32, device=batch.query.device)

    def call() -> torch.Tensor:
        return flash_attn_varlen_func(
            q=batch.query,
            k=keys,
            v=values,
            max_seqlen_q=batch.work.num_new,
            cu_seqlens_q=query_start,
            max_seqlen_k=num_keys,
            seqused_k=lengths,
            block_table=table,
            softmax_scale=batch.params.scale,
            causal=True,
            window_size=list(_window(batch)),
        )

    return call


def flashinfer(batch: Batch) -> Call:
    """On pages, K and V of a page in one array each; planned outside the call, as once per step."""
    import flashinfer as library

    spec, work, page_tokens = batch.work.spec, batch.work, batch.metadata.page_tokens
    device = batch.query.device
    pages = (batch.cache.keys.contiguous(), batch.cache.values.contiguous())
    num_blocks = batch.metadata.block_tables.shape[1]
    table_start = _prefix_sum(num_blocks, batch)
    indices = batch.metadata.block_tables.int().flatten()
    last_tokens = torch.full(
        (work.num_requests,), (batch.seq_len - 1) % page_tokens + 1, dtype=torch.int32, device=device
    )
    workspace = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    options = {
        "window_left": _window(batch)[0],
        "sm_scale": batch.params.scale,
        "q_data_type": batch.query.dtype,
        "kv_data_type": batch.query.dtype,
    }
    if work.num_new == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(
            table_start, indices, last_tokens, work.num_heads, spec.num_kv_heads, spec.k_dim, page_tokens, **options
        )
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            _prefix_sum(work.num_new, batch),
            table_start,
            indices,
            last_tokens,
            work.num_heads,
            spec.num_kv_heads,
            spec.k_dim,
            page_tokens,
            causal=True,
            **options,
        )
    return lambda: wrapper.run(batch.query, pages)


OURS = Peer("triton", "triton", triton)
OTHERS = (
    Peer("torch SDPA", "torch", torch_sdpa),
    Peer("FlexAttention", "torch", flex_attention),
    Peer("xformers", "xformers", xformers),
    Peer("flash-attn", "flash_attn", flash_attn),
    Peer("FlashInfer", "flashinfer", flashinfer),
    Peer("vLLM flash-attn", "vllm", vllm_flash_attn),
)
