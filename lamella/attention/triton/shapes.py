"""What kernels are compiled for: a layer's shape and its visibility rule as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from lamella.attention.contract import AttentionParams, LayerCache
from lamella.attention.kv_dtype import FP8_MANTISSA_BITS
from lamella.attention.metadata import AttentionMetadata, require_covering_tables
from lamella.attention.triton.device import device_arch
from lamella.attention.triton.device_functions import CHUNK, FULL, WINDOW
from lamella.errors import ConfigError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

MAX_HEAD_DIM = 512  # the widest that tuning.json has tiles for
_RULES = {FullAttentionSpec: FULL.value, SlidingWindowSpec: WINDOW.value, ChunkedLocalAttentionSpec: CHUNK.value}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """group: query heads per KV head. rule, reach: the spec's visibility rule; reach is 0 where there is none.
    dtype: of the cache. in_float32: queries, K, V and the softmax's weights are widened before they are multiplied (K
    and V of 8 bits always are, to the query's dtype). fp8_mantissa: see `device_functions`."""

    rule: int
    reach: int
    num_kv_heads: int
    group: int
    k_dim: int
    v_dim: int
    page_tokens: int
    dtype: torch.dtype
    in_float32: bool
    fp8_mantissa: int = 0

    @staticmethod
    def of(params: AttentionParams, cache: LayerCache, query_dtype: torch.dtype) -> LayerShape:
        spec = params.spec
        rule, reach = visibility_rule(spec)
        dtype = cache.keys.dtype
        is_mixed = query_dtype != dtype and dtype not in FP8_MANTISSA_BITS
        return LayerShape(
            rule=rule,
            reach=reach,
            num_kv_heads=spec.num_kv_heads,
            group=params.num_heads // spec.num_kv_heads,
            k_dim=spec.k_dim,
            v_dim=spec.v_dim,
            page_tokens=cache.keys.shape[1],
            dtype=dtype,
            in_float32=is_mixed or _interpreter_cannot_multiply(query_dtype),
            fp8_mantissa=unpacked_mantissa(dtype, device_arch(cache.keys.device)),
        )

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time constants that decode and prefill share."""
        return {
            "RULE": self.rule,
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "K_DIM": self.k_dim,
            "K_PADDED": triton.next_power_of_2(max(16, self.k_dim)),
            "V_DIM": self.v_dim,
            "V_PADDED": triton.next_power_of_2(max(16, self.v_dim)),
            "PAGE_TOKENS": self.page_tokens,
            "IN_FLOAT32": self.in_float32,
            "FP8_MANTISSA": self.fp8_mantissa,
        }


def unpacked_mantissa(dtype: torch.dtype, arch: str) -> int:
    """FP8_MANTISSA for kernels that read pages of `dtype`: 0 where they are no fp8, or `arch` has instructions that
    widen them."""
    if dtype == torch.float8_e4m3fn and arch.startswith("sm_") and int(arch[3:]) >= 89:
        return 0
    return FP8_MANTISSA_BITS.get(dtype, 0)


def page_view(pages: torch.Tensor, fp8_mantissa: int) -> torch.Tensor:
    """The cache's K or V as kernels with that FP8_MANTISSA take it."""
    return pages.view(torch.uint8) if fp8_mantissa else pages


def _interpreter_cannot_multiply(dtype: torch.dtype) -> bool:
    """The interpreter represents bfloat16 by integers and would multiply those."""
    return dtype == torch.bfloat16 and triton.knobs.runtime.interpret


def visibility_rule(spec: KVCacheSpec) -> tuple[int, int]:
    """(number of the rule, its reach in tokens or 0). Raises ConfigError for a spec that the kernels do not know."""
    rule = _RULES.get(type(spec))
    if rule is None:
        raise ConfigError(
            f"spec {type(spec).__name__} has no visibility rule in the triton kernels; use FullAttentionSpec, "
            "SlidingWindowSpec or ChunkedLocalAttentionSpec, or attention_backend='torch'"
        )
    return rule, spec.reach_tokens or 0


def unsupported(spec: KVCacheSpec) -> str | None:
    """Why the kernels cannot keep KV of `spec`; None if they can."""
    if type(spec) not in _RULES:
        return f"{type(spec).__name__} has no visibility rule in its kernels"
    if max(spec.k_dim, spec.v_dim) > MAX_HEAD_DIM:
        return f"its heads have at most {MAX_HEAD_DIM} dimensions, not {max(spec.k_dim, spec.v_dim)}"
    return None


def check_tables(spec: KVCacheSpec, metadata: AttentionMetadata) -> None:
    """Check, on the host's copies and once per step, that every block table covers what its request's first query sees.

    Raises InvariantError where one starts above it. (Kernels cannot raise: they would read another request's memory.)
    """
    if spec in metadata.memo.covered_specs:
        return
    require_covering_tables(
        spec,
        page_tokens=metadata.page_tokens,
        query_start=metadata.query_start_host,
        seq_lens=metadata.seq_lens_host,
        first_blocks=metadata.first_blocks_host,
        first_keys=metadata.first_keys_host,
    )
    metadata.memo.covered_specs.add(spec)
