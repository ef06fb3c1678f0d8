"""What a block manager was made with."""

from __future__ import annotations

from dataclasses import dataclass

from lamella.kv_cache.retention import RetentionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """num_slabs: slabs of the arena, the null slab included.
    num_rows: most running requests, of up to max_model_len tokens each.
    interval_tokens: how many tokens must have left a window before decode slides it.
    slab_quota: slabs of each group's own pool; None: one pool for all.
    windowed_replay: resume where only full-attention KV is cached, if that costs less than half (see `replay`).
    skips_prompts: where all layers are windowed, leave out what no later token depends on.
    step_pages_bytes: size of the region behind the last slab (see `step_pages`).
    max_pinned_bytes: the most that pinned prefixes may keep; None: what leaves room for one request.
    num_draft_tokens: the most tokens behind a row's last one that a step computes to verify them.
    """

    num_slabs: int
    num_rows: int
    max_model_len: int
    interval_tokens: int
    enable_prefix_caching: bool
    retention: RetentionPolicy
    slab_quota: tuple[int, ...] | None
    windowed_replay: bool
    skips_prompts: bool
    step_pages_bytes: int
    max_pinned_bytes: int | None = None
    num_draft_tokens: int = 0

    @property
    def num_blocks_more(self) -> int:
        """Number of blocks below its windows that a row leaves in the tree for the resume point at its end."""
        return self.retention.num_blocks_more if self.enable_prefix_caching else 0
