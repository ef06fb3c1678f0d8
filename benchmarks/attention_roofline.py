"""What attention must move and compute, by count, and how long that takes a GPU at best.

    python benchmarks/attention_roofline.py

Bytes: K and V of every key that some query of the request sees, once (what programs read again is in the cache), the
queries, the outputs, and decode's partial results, written and read. FLOPs: two products over the visible pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lamella.attention.triton.backend import MAX_SEGMENTS, SEGMENT_TOKENS
from lamella.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

H200_BYTES_PER_SECOND = 4.8e12
H200_BF16_FLOPS = 989e12


def segment_length(seen_tokens: int, *, segment_tokens: int, max_segments: int) -> int:
    """Tokens per segment of decode's partial results, for a request that sees that many: its length, or the window or
    chunk if that is less."""
    while segment_tokens * max_segments < seen_tokens:
        segment_tokens *= 2
    return segment_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """One layer's attention for `num_requests` equal requests: num_new queries each, after num_prior tokens."""

    name: str
    spec: KVCacheSpec
    num_heads: int
    num_requests: int
    num_prior: int
    num_new: int

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs that see each other, per query head."""
        queries = np.arange(self.num_prior, self.num_prior + self.num_new)
        return int((queries - self.spec.first_visible_each(queries) + 1).sum()) * self.num_requests

    @property
    def num_flops(self) -> int:
        return 2 * self.num_pairs * self.num_heads * (self.spec.k_dim + self.spec.v_dim)

    @property
    def num_bytes(self) -> int:
        spec = self.spec
        first = spec.first_visible(self.num_prior)
        stop = self.num_prior + self.num_new
        keys = (stop - first) * spec.token_bytes
        rows = self.num_new * self.num_heads * (spec.k_dim + spec.v_dim) * spec.itemsize_bytes
        partial = 0
        if self.num_new == 1:
            seen_tokens = min(stop, spec.reach_tokens or stop)
            segment = segment_length(seen_tokens, segment_tokens=SEGMENT_TOKENS, max_segments=MAX_SEGMENTS)
            num_segments = (stop - 1) // segment - first // segment + 1
            partial = 2 * num_segments * self.num_heads * (spec.v_dim + 2) * 4
        return self.num_requests * (keys + rows + partial)

    @property
    def seconds(self) -> float:
        return max(self.num_bytes / H200_BYTES_PER_SECOND, self.num_flops / H200_BF16_FLOPS)


_GEMMA = SlidingWindowSpec(num_kv_heads=16, k_dim=128, v_dim=128, itemsize_bytes=2, window_tokens=1024)
_LLAMA = FullAttentionSpec(num_kv_heads=8, k_dim=128, v_dim=128, itemsize_bytes=2)
WORKLOADS = (
    Workload("decode 256 at 8,192, gemma-3-27b window 1024", _GEMMA, 32, 256, 8191, 1),
    Workload("decode 64 at 32,768, llama-3.1-8b full", _LLAMA, 32, 64, 32767, 1),
    Workload("prefill 8,192 after 24,576, gemma-3-27b window 1024", _GEMMA, 32, 1, 24576, 8192),
    Workload("prefill 8,192, llama-3.1-8b full", _LLAMA, 32, 1, 0, 8192),
)


def main() -> None:
    print("| workload, one layer, bf16 | bytes moved | FLOPs | at best on an H200 | limited by |")
    print("|---|---|---|---|---|")
    for work in WORKLOADS:
        by_memory = work.num_bytes / H200_BYTES_PER_SECOND >= work.num_flops / H200_BF16_FLOPS
        print(
            f"| {work.name} | {work.num_bytes / 1e6:,.1f} MB | {work.num_flops / 1e9:,.1f} G | "
            f"{work.seconds * 1e6:,.0f} µs | {'memory' if by_memory else 'matrix units'} |"
        )


if __name__ == "__main__":
    main()
