"""The ways to manage KV memory that are compared, by the names that --systems takes.

lamella       slabs lent to whichever group needs them
hinted        the same, and requests say where prompts will part (`prefix_boundary`), where the trace knows
viewed        lamella with metrics and the line in the log, told of steps as the engine tells it
profiled      the same, and a trace is written
split:R       fixed pools, R windowed tokens per full token
hybrid-off    every layer keeps its KV for the request's life
vllm          vLLM's own scheduler and KV cache manager (see `vllm_process`); vllm:I keeps a window every I tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from lamella.engine.scheduling.scheduler import Scheduler
from lamella.errors import ConfigError
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.layout import build_layout, without_sliding
from lamella.kv_cache.sizing import size_pool
from lamella.kv_cache.spec import KVCacheSpec, ceil_div
from lamella.kv_cache.split import split_pools


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """max_num_seqs requests and max_num_batched_tokens tokens a step; interval_tokens None: a page."""

    page_tokens: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    interval_tokens: int | None = None
    policy: str = "fcfs"

    @property
    def eviction_tokens(self) -> int:
        return self.interval_tokens or self.page_tokens

    def whole_pages(self, num_tokens: int) -> int:
        """num_tokens, rounded up."""
        return ceil_div(num_tokens, self.page_tokens) * self.page_tokens


class Labels(TypedDict):
    policy: str
    interval_tokens: int | None


@dataclass(frozen=True, slots=True)
class System:
    """kind: "lamella", "hinted", "viewed", "profiled", "split", "hybrid-off", "vllm" or "vllm-dense"; value: what
    follows the colon."""

    kind: str
    value: float | None = None

    @property
    def is_vllm(self) -> bool:
        return self.kind in ("vllm", "vllm-dense")

    @property
    def name(self) -> str:
        return self.kind if self.value is None else f"{self.kind}:{self.value:g}"

    def variants(self, variants: Sequence[Limits]) -> Sequence[Limits]:
        """Those of `variants` that make a difference to this system: policies and intervals are lamella's."""
        return variants[:1] if self.is_vllm else variants

    def labels(self, limits: Limits) -> Labels:
        """What a cell says of `limits`: vLLM is first come, first served whatever they say."""
        if self.is_vllm:
            return {"policy": "fcfs", "interval_tokens": None}
        return {"policy": limits.policy, "interval_tokens": limits.eviction_tokens}


def parse_system(text: str) -> System:
    """Raises ConfigError for anything but the names above."""
    kind, colon, value = text.strip().partition(":")
    try:
        number = float(value) if colon else None
    except ValueError:
        number = -1.0
    takes_value = {
        "lamella": (False,), "hinted": (False,), "viewed": (False,), "profiled": (False,), "hybrid-off": (False,),
        "split": (True,), "vllm": (False, True),
        "vllm-dense": (False,),
    }  # fmt: skip
    is_sensible = number is None or (number > 0 if kind == "split" else number >= 0)
    if (number is not None) not in takes_value.get(kind, ()) or not is_sensible:
        raise ConfigError(
            f"system {text!r} is not known; use lamella, hinted, split:RATIO, viewed, profiled, hybrid-off, vllm, "
            "vllm:INTERVAL or vllm-dense"
        )
    return System(kind, number)


def build_scheduler(
    system: System, specs: Sequence[KVCacheSpec], limits: Limits, *, budget_bytes: int, max_model_len: int
) -> Scheduler:
    """lamella's scheduler over an arena of `budget_bytes`, as the engine builds it.

    Raises CapacityError where a request of max_model_len tokens does not fit.
    """
    stored = without_sliding(specs) if system.kind == "hybrid-off" else list(specs)
    layout = build_layout(stored, page_tokens=limits.page_tokens)
    interval_tokens = limits.eviction_tokens
    slab_quota, step_pages_bytes = None, 0
    if system.kind == "split":
        pools = split_pools(
            layout,
            memory_bytes=budget_bytes,
            ratio=system.value,
            max_model_len=max_model_len,
            longest_model_len=max_model_len,
            chunk_tokens=limits.max_num_batched_tokens,
            interval_tokens=interval_tokens,
            max_num_seqs=limits.max_num_seqs,
            enable_prefix_caching=True,
        )
        num_slabs, chunk_tokens = pools.num_slabs, pools.chunk_tokens
        slab_quota, interval_tokens = pools.slab_quota, pools.interval_tokens
    else:
        size = size_pool(
            layout,
            memory_bytes=budget_bytes,
            max_model_len=max_model_len,
            longest_model_len=max_model_len,
            chunk_tokens=limits.max_num_batched_tokens,
            interval_tokens=interval_tokens,
        )
        num_slabs, chunk_tokens, step_pages_bytes = size.num_slabs, size.chunk_tokens, size.step_pages_bytes
    manager = BlockManager(
        layout,
        num_slabs=num_slabs,
        num_rows=limits.max_num_seqs,
        max_model_len=max_model_len,
        interval_tokens=interval_tokens,
        slab_quota=slab_quota,
        step_pages_bytes=step_pages_bytes,
    )
    return Scheduler(
        manager,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=max_model_len,
        chunk_tokens=chunk_tokens,
        scheduling_policy=limits.policy,
    )
