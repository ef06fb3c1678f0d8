"""Prompts that share prefixes, all queued at once: what each order of the queue finds in the cache.

Scheduler and KV manager without a model, in memory for a few prompts. FCFS over the sorted prompts is what there is to
find: each prefix is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kv_replay.drive import Driver
from kv_replay.layouts import full_token_bytes, layer_specs
from kv_replay.systems import Limits, System, build_scheduler
from kv_replay.traces import VOCAB_SIZE
from markdown_tables import table

ORDERS = (("fcfs", "sorted"), ("fcfs", "shuffled"), ("prefix", "shuffled"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroups:
    """num_groups prefixes, each with num_members suffixes. memory_prompts: the arena holds the full-attention KV of so
    many whole requests, output included."""

    num_groups: int
    num_members: int
    prefix_tokens: int = 480
    suffix_tokens: int = 40
    output_tokens: int = 16
    memory_prompts: float = 12
    layout: str = "gpt-oss-20b"
    limits: Limits = field(default_factory=lambda: Limits(max_num_seqs=16, max_num_batched_tokens=2048))

    @property
    def request_tokens(self) -> int:
        return self.prefix_tokens + self.suffix_tokens + self.output_tokens

    def prompts(self) -> list[np.ndarray]:
        """int32 [prefix_tokens + suffix_tokens] each, group by group."""
        rng = np.random.default_rng(0)
        prompts = []
        for _ in range(self.num_groups):
            prefix = rng.integers(0, VOCAB_SIZE, self.prefix_tokens, dtype=np.int32)
            for _ in range(self.num_members):
                suffix = rng.integers(0, VOCAB_SIZE, self.suffix_tokens, dtype=np.int32)
                prompts.append(np.concatenate([prefix, suffix]))
        return prompts


@dataclass(frozen=True, slots=True)
class OrderResult:
    policy: str
    arrival: str
    hit_share: float
    num_steps: int
    num_preemptions: int


def run_orders(groups: PrefixGroups) -> list[OrderResult]:
    """One result for each of ORDERS. Raises CapacityError where a request does not fit."""
    prompts = groups.prompts()
    shuffled = [prompts[index] for index in np.random.default_rng(1).permutation(len(prompts))]
    return [_run(groups, policy, arrival, prompts if arrival == "sorted" else shuffled) for policy, arrival in ORDERS]


def _run(groups: PrefixGroups, policy: str, arrival: str, prompts: Sequence[np.ndarray]) -> OrderResult:
    specs = layer_specs(groups.layout)
    budget_bytes = int(groups.memory_prompts * groups.request_tokens * full_token_bytes(specs))
    limits = replace(groups.limits, policy=policy)
    scheduler = build_scheduler(
        System("lamella"),
        specs,
        limits,
        budget_bytes=budget_bytes,
        max_model_len=limits.whole_pages(groups.request_tokens),
    )
    driver = Driver(scheduler, budget_bytes=budget_bytes)
    output = np.zeros(groups.output_tokens, dtype=np.int32)
    for index, prompt in enumerate(prompts):
        driver.add(f"r{index}", prompt, output)
    while scheduler.has_requests:
        driver.step()
    measured = driver.measurements()
    return OrderResult(policy, arrival, measured.hit_share, measured.steps, measured.preemptions)


def order_report(results: Sequence[OrderResult]) -> str:
    rows = [
        [one.policy, one.arrival, f"{one.hit_share:.1%}", f"{one.num_steps:,}", str(one.num_preemptions)]
        for one in results
    ]
    return table(["order", "prompts come", "found in the cache", "steps", "preempted"], rows)
